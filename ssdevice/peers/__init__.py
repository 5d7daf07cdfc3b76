"""Measures a bundle beside other engines on the same weights, each in a process of its own."""
