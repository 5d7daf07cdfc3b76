"""Core ML programs without a Mac: read a saved ``.mlpackage``, check it, list its contents and run it in NumPy.

``reader.Package`` opens and validates, ``program.Program`` executes, ``audit.audit`` describes. Nothing here
imports coremltools or torch: the model file and the weight file are read with the standard library and NumPy.
"""
