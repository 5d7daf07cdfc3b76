"""Thousands of answers from one process: nothing grows, and no answer depends on what was asked
before.
"""
