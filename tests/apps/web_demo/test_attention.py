"""Attention in WebAssembly: a drafted row has the bits that it has in plain decoding."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest

from ssdevice.contract import Geometry
from ssdevice.runtime.onnx.cache import RowCache
from ssdevice.tree import Tree
from tests.apps.web_demo import host
from tests.export.onnx.test_kernels import CACHES, GROUPS, KV_HEADS, attention_model

DIM = 64
ROWS = 5
CONTEXT = 96
WIDTH = KV_HEADS * DIM


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("length", [29, 30, 31, 32])
def test_a_drafted_row_has_the_bits_of_plain_decoding(
    length: int, kind: str, tmp_path: Path
) -> None:
    """onnxruntime-web adds the last numbers of a row apart, so how many rows a call has could
    decide a bit.
    """
    draw = np.random.default_rng(length)
    keys, values = draw.standard_normal((2, CONTEXT, WIDTH)).astype(np.float32)
    old_keys = keys.astype(CACHES[kind])
    old_values = values.astype(CACHES[kind])
    queries = draw.standard_normal((CONTEXT, GROUPS * WIDTH)).astype(np.float32)

    cache = RowCache(
        Geometry(1, KV_HEADS, DIM, 1, 0, 1, Tree.root_only(), CONTEXT, 1), CACHES[kind]
    )

    def call(first: int, rows: int) -> str:
        """A chain of ``rows`` from position ``first`` on."""
        shown = cache.visible(first)
        seen = np.concatenate(
            [np.tile(np.arange(shown) < first, (rows, 1)), np.tri(rows, dtype=bool)], axis=1
        )
        new = slice(first, first + rows)
        feeds = {
            "q": queries[None, new],
            "past_keys": old_keys[:shown],
            "keys": keys[new],
            "past_values": old_values[:shown],
            "values": values[new],
            "more_keys": keys[:0],
            "more_values": values[:0],
            "mask": np.where(seen, np.float32(0), np.float32(-1e9))[None, None],
        }
        file = tmp_path / f"{rows}-{shown}.onnx"
        file.write_bytes(attention_model(kind, rows, shown, DIM))
        tensors = {
            name: {
                "type": value.dtype.name,
                "dims": value.shape,
                "bytes": b64encode(value.tobytes()).decode(),
            }
            for name, value in feeds.items()
        }
        return json.dumps({"model": str(file), "feeds": tensors}) + "\n"

    calls = [call(length, ROWS), *(call(length + i, 1) for i in range(ROWS))]
    done = host.script("run.mjs", given="".join(calls))
    assert done.returncode == 0, done.stderr
    step, *plain = (np.array(json.loads(line), np.float32) for line in done.stdout.splitlines())
    np.testing.assert_array_equal(step.reshape(ROWS, -1), np.stack(plain))
