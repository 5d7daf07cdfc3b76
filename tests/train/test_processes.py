"""Two processes are one with twice the batch: the same losses, the same weights, one set of
answers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ssdevice.cli import main
from tests.train.test_run import base, command, data  # noqa: F401  # fixtures

STEPS = 6


def launch(processes: int, arguments: list[str]) -> None:
    """What torchrun sets, without its supervisor."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "ssdevice", *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    for process in running:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["lossless", pytest.param("shared", marks=pytest.mark.slow)])
def test_two_processes_are_one_with_twice_the_batch(
    base: Path,  # noqa: F811
    data: Path,  # noqa: F811
    tmp_path: Path,
    mode: str,
) -> None:
    """26 rows in batches of 8, so that the last one is short."""
    for name, processes, batch in (("one", 1, 8), ("two", 2, 4)):
        arguments = command(
            base, data, tmp_path / name, "--mode", mode, "--self-distill", "--steps", str(STEPS)
        )[3:]
        arguments += ["--batch-size", str(batch), "--draft-vocabulary", "24"]
        if processes == 1:
            assert main(arguments) == 0
        else:
            launch(processes, arguments)
    one, two = (
        json.loads((tmp_path / name / "streams.json").read_text())["training"]
        for name in ("one", "two")
    )
    assert one["final_loss"] == pytest.approx(two["final_loss"], abs=1e-4)
    if mode == "shared":
        # Adam divides gradients by their size: where LoRA's are almost nothing, rounding decides
        return
    expected, found = (
        load_file(tmp_path / name / "streams.safetensors") for name in ("one", "two")
    )
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].float(), value.float(), rtol=1e-3, atol=1e-4, msg=name
        )
