"""``research/split.py``: a network of a given delay and rate, and every way over it, with the
tiny model.
"""

from __future__ import annotations

import json
import socket
from ctypes import sizeof
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest

from research import split
from tests.runtime.tiny_bundle import CONTEXT, base_folder, tiny_bundle


def test_a_chunk_takes_half_a_round_trip_and_its_bytes_time(tmp_path: Path) -> None:
    state = RawValue(split.State, 0.2, 1000.0)
    with (
        socket.create_server((split.HOST, 0)) as there,
        socket.create_server((split.HOST, 0)) as relayed,
    ):
        Thread(
            target=split.relay, args=(relayed, there.getsockname()[1], state), daemon=True
        ).start()
        with socket.create_connection(relayed.getsockname()) as near:
            far, _ = there.accept()
            began = monotonic()
            near.sendall(bytes(100))
            assert len(far.recv(200)) == 100 and monotonic() - began >= 0.2
            far.sendall(b"abc")
            assert near.recv(9) == b"abc" and monotonic() - began >= 0.3
            assert (state.up, state.down) == (100, 3) and sizeof(state)
            state.cut = True
            near.sendall(b"lost")
            state.trip = 0.0
            near.shutdown(socket.SHUT_WR)
            assert far.recv(9) == b""
            far.close()


def test_all_ways_give_the_server_s_answers_and_a_second_run_adds_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "hello"))
    )
    bundles = [str(tiny_bundle().folder), str(tiny_bundle("int8").folder)]
    data = ["--data", str(tmp_path / "prompts.jsonl"), "--max-tokens", "12"]
    results = tmp_path / "results.jsonl"
    for _ in range(2):
        split.main(["run", *bundles, *data, "--results", str(results), "--trips", "0,30"])
        found = [json.loads(line) for line in results.read_text().splitlines()]
        assert [(each["way"], each["trip"], each["prompt"]) for each in found] == [
            *(
                (way, 0, prompt)
                for prompt in (0, 1)
                for way in (split.SPLIT, split.STREAM, split.ALONE)
            ),
            *((way, 30, prompt) for prompt in (0, 1) for way in (split.SPLIT, split.STREAM)),
        ]
    for each in found:
        if each["way"] == split.SPLIT:
            assert (
                each["rest"] >= each["trip"] / 1e3 * each["steps"]
                and min(each["up"], each["down"]) > each["tokens"]
            )
        assert each["tokens"] == 12 and bool(each["up"]) == (each["way"] != split.ALONE)
    split.main(["table", str(results)])
    assert "\n| 30" in capfd.readouterr().out


def test_the_device_goes_on_alone_while_the_network_is_cut(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "abc"}) + "\n")
    bundles = [str(tiny_bundle().folder), str(tiny_bundle("int8").folder)]
    data = ["--data", str(tmp_path / "prompts.jsonl"), "--max-tokens", str(CONTEXT // 2)]
    split.main(["outage", *bundles, *data, "--trips", "10", "--before", "0.3", "--gap", "0.3"])
    said = capfd.readouterr().out
    assert (
        "tokens/s verified" in said
        and "of the device alone" in said
        and "the server is back" in said
    )


def test_a_cut_model_has_the_chosen_layers(tmp_path: Path) -> None:
    from ssdevice.model import loading

    split.main(
        ["cut", "--model", str(base_folder()), "--layers", "1", "--out", str(tmp_path / "small")]
    )
    small = loading.load_hf(tmp_path / "small")
    large = loading.load_hf(base_folder())
    (layer,) = small.model.layers
    assert (layer.mlp.up_proj.weight == large.model.layers[1].mlp.up_proj.weight).all()
    assert (tmp_path / "small" / "tokenizer.json").is_file()
