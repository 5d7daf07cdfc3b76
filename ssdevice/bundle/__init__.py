"""Bundles: folder, manifest, integrity, writing and signature."""
