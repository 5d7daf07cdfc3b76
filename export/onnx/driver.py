"""Exported graphs on ONNX Runtime as a parity Driver, and graphs that also give their logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    ROWS,
    STEP,
    TOKENS,
    VALID,
    Geometry,
    past_key,
    past_value,
)
from ssdevice.export.onnx.graph import LOGITS
from ssdevice.export.parity.reference import Drafts, StepOut

Array = np.ndarray[Any, Any]


class OnnxDriver:
    """One conversation; ``files``: function -> graph. Each session opens at its first call, with one thread.

    ``with_logits``: the graphs also give the main rows' logits, kept in ``logits [rows, V]`` after each call.
    ``adapter``: what the slots of the graphs take, by graph input.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        geometry: Geometry,
        with_logits: bool = False,
        adapter: Mapping[str, ort.OrtValue] | None = None,
    ) -> None:
        self.files, self.geometry, self.with_logits = files, geometry, with_logits
        self.adapter = {name: value.numpy() for name, value in (adapter or {}).items()}
        self.cache = np.zeros((2 * geometry.layers, geometry.capacity, geometry.row_width), np.float32)
        self.logits: Array | None = None
        self._sessions: dict[str, ort.InferenceSession] = {}

    def prefill(self, tokens: Sequence[int], length: int) -> tuple[int, Drafts]:
        """See parity.Driver."""
        chunk = np.zeros(self.geometry.chunk, np.int32)
        chunk[: len(tokens)] = tokens
        out = self._run(PREFILL, {CHUNK: chunk, VALID: _int(len(tokens))}, length)
        self.cache[:, length : length + len(tokens)] = out[ROWS][:, : len(tokens)]
        return int(out[NEXT_ROOT][0]), out[NEXT_DRAFTS].tolist()

    def step(self, root: int, drafts: Drafts, length: int) -> StepOut:
        """See parity.Driver."""
        out = self._run(STEP, {ROOT: _int(root), DRAFTS: np.array(drafts, np.int32)}, length)
        count = int(out[COUNT][0])
        self.cache[:, length : length + count] = out[ROWS][:, :count]
        return StepOut(out[TOKENS][:count].tolist(), out[NEXT_DRAFTS].tolist())

    def plain(self, root: int, length: int) -> int:
        """See parity.Driver."""
        out = self._run(PLAIN, {ROOT: _int(root)}, length)
        self.cache[:, length : length + 1] = out[ROWS]
        return int(out[TOKENS][0])

    def rows(self, start: int, end: int) -> Array:
        """See parity.Driver."""
        return self.cache[:, start:end].copy()

    def _run(self, function: str, integers: dict[str, Array], length: int) -> dict[str, Array]:
        if function not in self._sessions:
            self._sessions[function] = open_session(self.files[function], self.with_logits)
        session = self._sessions[function]
        feeds = {**integers, LENGTH: _int(length)}
        for layer in range(self.geometry.layers):
            visible = slice(0, max(length, 1))
            feeds[past_key(layer)] = self.cache[2 * layer, visible]
            feeds[past_value(layer)] = self.cache[2 * layer + 1, visible]
        for value in session.get_inputs():
            if value.name not in feeds:
                feeds[value.name] = self.adapter[value.name]
        names = [value.name for value in session.get_outputs()]
        out = dict(zip(names, session.run(names, feeds), strict=True))
        self.logits = out.get(LOGITS)
        return out


def open_session(file: Path, with_logits: bool = False, threads: int = 1) -> ort.InferenceSession:
    """A session of one graph; with logits, of a copy in memory that also gives them."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not with_logits:
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    # A model from memory finds its weights through this entry.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent))
    return ort.InferenceSession(logits_variant(file), options, providers=["CPUExecutionProvider"])


def logits_variant(file: Path) -> bytes:
    """An exported graph with the main rows' logits ``[rows, V]`` as one more output, for tests and ``verify``."""
    model = onnx.load(str(file), load_external_data=False)
    model.graph.output.append(onnx.helper.make_tensor_value_info(LOGITS, onnx.TensorProto.FLOAT, None))
    return bytes(model.SerializeToString())


def _int(value: int) -> Array:
    return np.array([value], np.int32)
