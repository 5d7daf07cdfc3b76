"""Measuring speed, quality and equality of a bundle."""
