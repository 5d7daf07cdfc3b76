"""Training an app's adapter: batches, the Speculative Streaming loss, the trainer. Needs torch."""
