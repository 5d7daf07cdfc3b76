"""What Core ML runs, whichever target carries it: rewrites, float16, weights and choices of ML Programs."""
