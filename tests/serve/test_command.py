"""``ssdevice serve`` as a program: what it refuses, prints, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ssdevice.cli import main
from ssdevice.serve.names import LOOPBACK
from tests.runtime.tiny_bundle import tiny_bundle
from tests.serve.serving import CHAT, ask, chat


def refused(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line with which ``ssdevice serve`` refuses these arguments."""
    assert main(["serve", *map(str, args)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    return said.err


def test_what_others_can_reach_needs_a_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::"):
        assert f"--host {host}: a server that others can reach needs --key-file" in refused(
            capsys, "b", "--host", host
        )
    assert "expected an address such as 127.0.0.1" in refused(capsys, "b", "--host", "example")
    for key in ("", "short", "a key of many characters", "ключ" * 5):
        (tmp_path / "key").write_text(key, "utf-8")
        said = refused(capsys, "b", "--key-file", tmp_path / "key")
        assert "a key has 16 or more ASCII characters" in said
    assert "none: no such file" in refused(capsys, "b", "--key-file", tmp_path / "none")
    (tmp_path / "key").write_bytes(b"\xff" * 20)
    assert "not UTF-8 text" in refused(capsys, "b", "--key-file", tmp_path / "key")


def test_a_port_that_cannot_be_had_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((LOOPBACK, 0)) as other:
        port = other.getsockname()[1]
        assert f"--port {port} is taken; choose another" in refused(capsys, "b", "--port", port)
    assert "no such bundle" in refused(capsys, "b", "--port", 0)


@pytest.mark.skipif(os.name == "nt", reason="no fork here")
def test_it_serves_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a-long-enough-key\n")
    command = [
        sys.executable,
        "-m",
        "ssdevice",
        "serve",
        tiny_bundle(choose=True).folder,
        "--port",
        "0",
    ]
    with subprocess.Popen(
        [*command, "--key-file", tmp_path / "key"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            address = server.stdout.readline().strip()
            assert address.startswith(f"http://{LOOPBACK}:") and address.endswith("/v1")
            port = int(address.removesuffix("/v1").rpartition(":")[2])
            assert ask(port, CHAT, chat(), Authorization="Bearer a-long-enough-key")[0] == 200
            assert ask(port, CHAT, chat())[0] == 401
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait(120) == 0
        assert server.stderr.read() == "ssdevice: models: letters; Ctrl-C ends the server\n"
