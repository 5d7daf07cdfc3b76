"""Weights that keep the model's quality in four bits: rounded with an app's own rows, for every
target alike.
"""
