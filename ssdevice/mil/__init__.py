"""Core ML programs without a Mac.

``reader.Package`` opens and validates a saved ``.mlpackage``, ``program.Program`` runs it in NumPy,
``audit.audit`` describes it.

Nothing here imports torch; of coremltools only the protobuf classes are taken.
"""
