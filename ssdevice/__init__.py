"""Speculative Streaming on devices: train, export and run stream-fused language models."""

__version__ = "0.1.0"
