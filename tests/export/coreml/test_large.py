"""A model of half a billion weights becomes an int4 package on a small machine: how much memory and
time that takes.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("coremltools", reason="needs the coreml extra")
torch = pytest.importorskip("torch", reason="needs the export extra")

from ssdevice.bundle.folder import Bundle  # noqa: E402
from ssdevice.config import StreamConfig  # noqa: E402
from tests.runtime.scripted import TEMPLATE, make_tokenizer  # noqa: E402

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Those of Qwen2 0.5 B."""
STREAMS = StreamConfig(gamma=3, msa_layers=4, lora_rank=0)
PEAK_BYTES = 6 << 30
FREE_DISK = 8 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where gigabytes lie for the length of a test."""
    if shutil.disk_usage(tmp_path).free < FREE_DISK:
        pytest.skip(f"needs {FREE_DISK >> 30} GiB of disk")
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


def write_base(folder: Path) -> Path:
    """Random float16 weights, written without ever holding them in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(**SIZES, eos_token_id=0, pad_token_id=0, dtype="float16")
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to(torch.float16).to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                value.fill_(1.0)
            else:
                value.normal_(0.0, 0.02)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer.tokenizer_json)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def write_streams_alone(folder: Path, base: Path) -> Path:
    """An adapter of streams that draft at random, made from a base of the same width and one layer
    more than theirs.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from ssdevice.adapters.settings import AdapterSettings, BaseIdentity
    from ssdevice.model.adapter import write_streams
    from ssdevice.model.loading import build

    small = Qwen2Config(**{**SIZES, "num_hidden_layers": STREAMS.msa_layers + 1, "vocab_size": 64})
    streams = build(Qwen2ForCausalLM(small).eval(), STREAMS, 64).streams
    assert streams is not None
    identity = BaseIdentity.of(base, Qwen2Config(**SIZES))
    write_streams(folder, streams, AdapterSettings("app", STREAMS, identity, "", {}))
    return folder


def test_half_a_billion_weights_become_an_int4_package(folder: Path, repository: Path, capsys):
    base = write_base(folder / "base")
    adapter = write_streams_alone(folder / "adapter", base)
    command = [
        sys.executable,
        "-m",
        "ssdevice",
        "export",
        "--model",
        str(base),
        "--adapter",
        f"app={adapter}",
        "--target",
        "coreml",
        "--quant",
        "int4",
        "--context",
        "256",
        "--chunk",
        "32",
        "--out",
        str(folder / "bundle"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    clock = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - clock
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert done.returncode == 0, done.stderr[-2000:]
    made = Bundle.open(folder / "bundle")
    size = sum(entry.size for entry in made.manifest.files.values())
    with capsys.disabled():
        print(
            f"\n{made.manifest.model.parameters / 1e6:.0f} M parameters to {size / 1e6:.0f} MB "
            f"in {seconds:.0f} s"
        )
        print(
            f"peak {peak / 2**30:.2f} GiB, {used.ru_utime + used.ru_stime:.0f} s of CPU, "
            f"load {os.getloadavg()}"
        )
    assert peak < PEAK_BYTES
