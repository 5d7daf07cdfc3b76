"""Measures a bundle beside other engines on the same weights; each engine runs in a process of its
own.
"""
