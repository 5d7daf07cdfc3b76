"""ML Programs for Core ML, in packages or as ExecuTorch delegates: rewrites, float16, weights and
options.
"""
