"""ExecuTorch bundles."""
