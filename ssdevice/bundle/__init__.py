"""Bundles: folder, manifest, integrity, writing, archive and signature."""
