"""Calls graphs and keeps what they give; needs NumPy and ONNX Runtime alone, so it also runs under
an emulator.

    python calls.py FOLDER

Every ``NAME.onnx`` is called with the arrays of ``NAME.npz``; its outputs go to ``NAME.out.npz``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort


def call_all(folder: Path) -> None:
    """Call every graph of a folder on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    for file in sorted(folder.glob("*.onnx")):
        session = ort.InferenceSession(str(file), options)
        with np.load(file.with_suffix(".npz")) as feeds:
            outputs = session.run(None, dict(feeds))
        named = {
            tensor.name: array for tensor, array in zip(session.get_outputs(), outputs, strict=True)
        }
        np.savez(file.with_suffix(".out.npz"), **named)


if __name__ == "__main__":
    call_all(Path(sys.argv[1]))
