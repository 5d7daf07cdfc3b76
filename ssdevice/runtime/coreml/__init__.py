"""Core ML bundles."""
