"""The ExecuTorch target."""
