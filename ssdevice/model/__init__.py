"""The stream-fused model: Hugging Face layers, streams, and the step built from them.

Needs torch.
"""
