"""Core AI bundles on the runtime side."""
