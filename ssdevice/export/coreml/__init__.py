"""The Core ML target."""
