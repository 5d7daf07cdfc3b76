"""Right random models, none of which an INT4 export may refuse; ``python -m
tests.export.random_models --count 200``.

Their norms are ones, so that rows of layer 0 are codes of the embedding: many of these are exactly
between two levels of INT4's inputs, and whatever rounds them otherwise than the reference is right
as well.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch

from ssdevice.cli import main
from ssdevice.runtime.onnx import kernels
from tests.export.models import write_tokenizer

SHAPES = (
    ("llama", 256, 3, 32),
    ("qwen3", 256, 3, 32),
    ("llama", 512, 2, 32),
    ("qwen3", 512, 2, 16),
    ("mistral", 384, 2, 8),
    ("qwen2", 320, 2, 64),
    ("granite", 256, 2, 16),
    ("llama", 1024, 1, 8),
)
"""Model type, hidden size, layers, and tokens of a prefill call."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def write(folder: Path, seed: int) -> str:
    """One of the models, and what it is; the next seed has another shape and type of weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, hidden, layers, _ = SHAPES[seed % len(SHAPES)]
    dtype = DTYPES[seed % len(DTYPES)]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        vocab_size=2048,
        max_position_embeddings=1024,
        tie_word_embeddings=seed % 2 == 0,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return f"{model_type}, {layers} layers of {hidden}, {dtype}, seed {seed}"


def export(model: Path, seed: int) -> int:
    """The exit code of its INT4 export."""
    options = [
        "--context",
        "256",
        "--chunk",
        str(SHAPES[seed % len(SHAPES)][3]),
        "--overwrite",
        "--quiet",
    ]
    out = str(model.with_suffix(".bundle"))
    return main(
        [
            "export",
            "--model",
            str(model),
            "--target",
            "onnx",
            "--quant",
            "int4",
            "--out",
            out,
            *options,
        ]
    )


def run(count: int) -> int:
    """Export so many, half of them with the kernels of this machine; how many were refused."""
    place = os.environ.get(kernels.FOLDER)
    compiled = kernels.library() is not None
    refused = with_kernels = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(count):
            if place is not None:
                os.environ[kernels.FOLDER] = place
            if seed // len(SHAPES) % 2:
                os.environ[kernels.FOLDER] = "/nowhere"
            with_kernels += kernels.library() is not None
            what = write(Path(folder) / "model", seed)
            if export(Path(folder) / "model", seed):
                refused += 1
                print(f"refused: {what}", flush=True)
    print(
        f"{refused} of {count} models were refused; {with_kernels if compiled else 0} ran with "
        "our kernels"
    )
    return refused


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    raise SystemExit(1 if run(parser.parse_args().count) else 0)
