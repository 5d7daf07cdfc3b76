"""Text on both sides of a model: tokenizer, chat template, and answers as a growing text."""
