"""Exports: from a loaded model and its adapter to a bundle for one target.

Needs torch; loaded lazily by the CLI.
"""
