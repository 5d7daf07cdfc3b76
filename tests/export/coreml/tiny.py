"""A tiny random llama in every precision: real packages in seconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from ssdevice.config import Mode, Schedule, StreamConfig
from ssdevice.contract import CHOOSING, FUNCTIONS, PLAIN, PREFILL, STEP, Geometry
from ssdevice.export.coreml.exporter import convert, save
from ssdevice.export.mlprogram.options import CoreMLOptions, KVWrite
from ssdevice.export.mlprogram.weights import Compression, schemes
from ssdevice.export.plan import Quant
from ssdevice.export.weights import stored
from ssdevice.model.loading import build
from ssdevice.model.step import StreamModel
from ssdevice.tree import Tree
from tests.model.tiny import VOCAB, randomise, tiny_config
from tests.once import made_once

TREE = Tree.of([[0], [1], [0, 0]])
GEOMETRY = Geometry(
    layers=2,
    kv_heads=2,
    head_dim=8,
    vocab=VOCAB,
    gamma=TREE.depth,
    k=TREE.width,
    tree=TREE,
    context=24,
    chunk=5,
    hidden=32,
)


@cache
def model(mode: Mode = Mode.SHARED) -> StreamModel:
    """Two layers of which one is an MSA layer; stream adapters that are not zero."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(
        "llama",
        num_hidden_layers=2,
        intermediate_size=64,
        tie_word_embeddings=True,
        attention_bias=True,
    )
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(hf, 1)
    torch.manual_seed(0)
    made = build(hf.eval(), StreamConfig(mode, TREE.depth, 1, adapter_rank=4), GEOMETRY.context)
    assert made.streams is not None
    with torch.no_grad():
        for value in made.streams.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
    return made.eval()


@cache
def package(
    quant: Quant = Quant.FP16,
    mode: Mode = Mode.SHARED,
    schedule: Schedule = Schedule.FUSED,
    write: KVWrite = KVWrite.SLICE,
    per_channel: bool = False,
    choosing: bool = False,
) -> Path:
    """The three functions, each program with its weights stored as an export stores them;
    ``choosing``: all six.
    """
    names = FUNCTIONS + CHOOSING if choosing else FUNCTIONS

    def make(out: Path) -> None:
        save(
            {name: program(name, quant, mode, schedule, write, per_channel) for name in names},
            out,
            STEP,
        )

    return made_once(
        f"coreml/{quant}-{mode}-{schedule}-{write}-{per_channel}-{choosing}.mlpackage", make
    )


@cache
def part(name: str, quant: Quant) -> Path:
    """One function as a package of its own."""

    def make(out: Path) -> None:
        save(
            {name: program(name, quant, Mode.SHARED, Schedule.FUSED, KVWrite.SLICE, False)},
            out,
            name,
        )

    return made_once(f"coreml/{name}-{quant}.mlpackage", make)


@cache
def program(
    name: str, quant: Quant, mode: Mode, schedule: Schedule, write: KVWrite, per_channel: bool
) -> Any:
    """One function. Only ``step`` depends on the schedule."""
    if name != STEP and schedule is not Schedule.DEFERRED:
        return program(name, quant, mode, Schedule.DEFERRED, write, per_channel)
    whole = model(mode)
    compression = Compression(stored(whole, schemes(quant, per_channel)))
    options = CoreMLOptions(kv_write=write)
    made = convert(name, whole, GEOMETRY, schedule, options, compression)
    assert compression.notes == []
    return made


__all__ = ["FUNCTIONS", "GEOMETRY", "PLAIN", "PREFILL", "STEP", "TREE", "model", "package", "part"]
