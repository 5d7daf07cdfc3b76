"""Measures the speed, quality and equality of a bundle."""
