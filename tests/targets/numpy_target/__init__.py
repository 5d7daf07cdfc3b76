"""A target of another package, as small as one can be: llamas in float32, run by NumPy.

See CONTRIBUTING.md.
"""
