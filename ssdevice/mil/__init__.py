"""Core ML programs without a Mac: read a saved ``.mlpackage``, check it, list its contents and run it in NumPy.

``reader.Package`` opens and validates, ``program.Program`` executes, ``audit.audit`` describes. Nothing here
imports torch: of coremltools only the protobuf classes are taken, and the weight file is read with NumPy.
"""
