"""Compares what is exported with what a user of transformers and PEFT would run instead, before
graphs are written.
"""
