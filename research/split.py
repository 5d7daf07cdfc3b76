"""Drafting on a device and verifying on a server over a slow network, a server that streams, and a device alone.

    python -m research.split cut --model DIR --layers 0,1,7 --out SMALL-DIR         # a model to train for the device
    python -m research.split run LARGE SMALL --data prompts.jsonl --results FILE    # goes on where it ended
    python -m research.split outage LARGE SMALL --data prompts.jsonl
    python -m research.split table FILE

LARGE and SMALL are bundles with an app of the same name and the same tokenizer. Server, network and client are three
processes on this machine. The network is a relay of TCP: a chunk leaves when the ones before it have left at the given
rate, and arrives half a round trip later; connecting takes no time. Answers of the server must be equal in both ways.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from ctypes import Structure, c_bool, c_double, c_long
from http.client import HTTPConnection
from itertools import cycle, groupby, islice, product
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from time import monotonic, perf_counter, sleep
from typing import Any

from research.methods import lines
from ssdevice.bench import report
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.session import Session
from ssdevice.runtime.split import VerifyAt

HOST = "127.0.0.1"
SPLIT, STREAM, ALONE = "split", "stream", "alone"


class State(Structure):
    """``trip``: seconds there and back; ``rate``: bytes a second each way; ``cut``: what arrives is lost.

    ``up`` and ``down``: bytes so far, of HTTP and what it carries.
    """

    _fields_ = (
        ("trip", c_double),
        ("rate", c_double),
        ("cut", c_bool),
        ("up", c_long),
        ("down", c_long),
    )
    trip: float
    rate: float
    cut: bool
    up: int
    down: int


def relay(listening: socket.socket, to: int, state: State) -> None:
    """Carry every connection to a port of this machine, until ``listening`` is closed."""
    with suppress(OSError):
        while True:
            near, _ = listening.accept()
            far = socket.create_connection((HOST, to))
            for one, other, way in ((near, far, "up"), (far, near, "down")):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                due: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                Thread(target=take, args=(one, due, state, way), daemon=True).start()
                Thread(target=give, args=(other, due, state), daemon=True).start()


def take(end: socket.socket, due: SimpleQueue[tuple[float, bytes]], state: State, way: str) -> None:
    """Queue what an end sends with the time at which it arrives; nothing at the end of all."""
    free = 0.0
    with suppress(OSError):
        while chunk := end.recv(1 << 12):
            setattr(state, way, getattr(state, way) + len(chunk))
            free = max(free, monotonic()) + len(chunk) / state.rate
            due.put((free + state.trip / 2, chunk))
    due.put((0.0, b""))


def give(end: socket.socket, due: SimpleQueue[tuple[float, bytes]], state: State) -> None:
    """Send what arrives; a connection that has lost something gives nothing any more."""
    lost = False
    with suppress(OSError):
        while (item := due.get())[1]:
            sleep(max(0.0, item[0] - monotonic()))
            lost |= state.cut
            if not lost:
                end.sendall(item[1])
        end.shutdown(socket.SHUT_WR)


@contextmanager
def network(bundle: Path, threads: int) -> Iterator[tuple[int, State]]:
    """A server of a bundle, the port at which a relay leads to it, and what the relay does."""
    serve = [
        sys.executable,
        "-m",
        "ssdevice",
        "serve",
        str(bundle),
        "--verify",
        "--port",
        "0",
        "--quiet",
    ]
    with subprocess.Popen(
        [*serve, "--threads", str(threads)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        found = re.search(r":(\d+)/v1", server.stdout.readline())
        if found is None:
            raise SystemExit(f"{bundle}: no server")
        listening, state = socket.create_server((HOST, 0)), RawValue(State, 0.0, float("inf"))
        args = (listening, int(found[1]), state)
        way = multiprocessing.get_context("spawn").Process(target=relay, args=args, daemon=True)
        way.start()
        try:
            yield listening.getsockname()[1], state
        finally:
            way.kill()
            server.terminate()


@contextmanager
def device(args: argparse.Namespace, port: int | None, **more: Any) -> Iterator[Session]:
    """A session of SMALL; ``port``: of the server that verifies."""
    at = None if port is None else VerifyAt(f"http://{HOST}:{port}/v1", drafts=args.drafts, **more)
    opener = open_engine if at is None else at.open_engine
    with Session.open(
        args.small, options=EngineOptions(threads=args.threads), opener=opener
    ) as session:
        yield session


def answered(session: Session, prompt: str, most: int) -> dict[str, Any]:
    """A session's answer: its text, tokens, steps after the first, and seconds for the first and for the others."""
    for _ in session.runs(session.prompt_ids(prompt), max_tokens=most, mode=session.mode(True)):
        pass
    last = session.last
    found = {
        "text": last.text,
        "tokens": len(last.tokens),
        "steps": last.steps,
        "alone": last.alone,
    }
    return {**found, "first": last.prefill_seconds, "rest": last.decode_seconds}


def streamed(connection: HTTPConnection, app: str, prompt: str, most: int) -> dict[str, Any]:
    """The same by the server's own endpoint: what a program reads of the stream of an ordinary chat completion."""
    body = {
        "model": app,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": most,
        "stream": True,
    }
    content = json.dumps({**body, "stream_options": {"include_usage": True}})
    first, text, tokens, began = 0.0, "", 0, perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", content, {"Content-Type": "application/json"}
    )
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            tokens = (event["usage"] or {}).get("completion_tokens", 0)
            said = "".join(choice["delta"].get("content", "") for choice in event["choices"])
            first = first or (perf_counter() - began if said else 0.0)
            text += said
    rest = perf_counter() - began - first
    return {"text": text, "tokens": tokens, "steps": 0, "alone": 0, "first": first, "rest": rest}


def run(args: argparse.Namespace) -> None:
    """Answer every prompt in each way over every network, and write a line for each."""
    done = list(lines(args.results)) if args.results.exists() else []
    known = {(each["way"], each["trip"], each["prompt"]) for each in done}
    texts = {each["prompt"]: each["text"] for each in done if each["way"] != ALONE}
    rows = list(islice(lines(args.data), args.limit))
    asked = product(args.trips, range(len(rows)), (SPLIT, STREAM, ALONE))
    left = [
        (way, trip, i)
        for trip, i, way in asked
        if (way, trip, i) not in known and not (way == ALONE and trip)
    ]
    if not left:
        return
    with network(args.large, args.threads) as (port, state), args.results.open("a") as out:
        state.rate = args.rate * 125_000
        with (
            device(args, port, patience=60.0) as split,
            device(args, None) as alone,
            closing(HTTPConnection(HOST, port)) as plain,
        ):
            ways: dict[str, Callable[[str], dict[str, Any]]] = {
                SPLIT: lambda prompt: answered(split, prompt, args.max_tokens),
                STREAM: lambda prompt: streamed(plain, str(split.app), prompt, args.max_tokens),
                ALONE: lambda prompt: answered(alone, prompt, args.max_tokens),
            }
            for answer in ways.values():
                answer(rows[-1]["prompt"])  # the first calls open graphs
            for way, trip, number in left:
                state.trip, before = trip / 1e3, (state.up, state.down)
                found = ways[way](rows[number]["prompt"])
                if way != ALONE and (
                    texts.setdefault(number, found["text"]) != found["text"] or found["alone"]
                ):
                    raise SystemExit(
                        f"{way}, prompt {number}: {found} instead of {texts[number]!r}"
                    )
                sizes = {"up": state.up - before[0], "down": state.down - before[1]}
                print(
                    json.dumps({"way": way, "trip": trip, "prompt": number, **found, **sizes}),
                    file=out,
                    flush=True,
                )


def outage(args: argparse.Namespace) -> None:
    """Answer prompts with a network that is cut meanwhile, and print what came and how fast.

    It is cut after ``--before`` s of tokens that the server verified, until ``--gap`` s of the device's own came.
    """
    said, came = list[str](), list[tuple[float, int, bool]]()
    with (
        network(args.large, args.threads) as (port, state),
        device(args, port, tell=said.append) as session,
    ):
        state.rate, state.trip = args.rate * 125_000, args.trips[0] / 1e3
        answered(session, next(lines(args.data))["prompt"], args.max_tokens)
        begin, since, stage = perf_counter(), 0.0, 0
        waits = [
            args.before,
            0.0,
            args.gap,
            0.0,
            args.before,
        ]  # verified; cut, and alone; joined, and verified again
        for tokens, alone in calls(
            session, list(islice(lines(args.data), args.limit)), args.max_tokens
        ):
            at = perf_counter() - begin
            came.append((at, tokens, alone))
            if alone == (stage in (1, 2)) and at - since >= waits[stage]:
                stage, since = stage + 1, at
                state.cut = stage in (1, 2)
            if stage == len(waits):
                break
    for first, last, text in phases(came):
        print(f"{first:.2f} to {last:.2f} s: {text}")
    print("\n".join(said))


def calls(
    session: Session, rows: Sequence[dict[str, Any]], most: int
) -> Iterator[tuple[int, bool]]:
    """Answers without an end, call by call: how many tokens, and whether the device chose them alone."""
    for row in cycle(rows):
        alone = 0
        for each in session.runs(session.prompt_ids(row["prompt"]), max_tokens=most):
            yield len(each.tokens), session.last.alone > alone
            alone = session.last.alone


def phases(came: Sequence[tuple[float, int, bool]]) -> Iterator[tuple[float, float, str]]:
    """Begin, end and tokens/s of each stretch of tokens from one side; ``came``: seconds, tokens, whether alone."""
    for alone, group in groupby(came, lambda each: each[2]):
        (first, _, _), *others = group
        last = others[-1][0] if others else first
        speed = sum(tokens for _, tokens, _ in others) / max(last - first, 1e-9)
        yield first, last, f"{speed:.1f} tokens/s {'of the device alone' if alone else 'verified'}"


def table(args: argparse.Namespace) -> None:
    """Print a row for each round trip; ``expected``: tokens a step over the round trip and a step's time without it."""
    found: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for line in lines(args.results):
        numbers = {
            name: value
            for name, value in line.items()
            if name not in ("way", "trip", "prompt", "text")
        }
        found[line["way"], line["trip"]] += Counter(answers=1, **numbers)

    def speed(each: Counter[str]) -> str:
        return f"{each['tokens'] / (each['first'] + each['rest']):.1f}"

    rows = []
    for trip in sorted({trip for _, trip in found}):
        split, stream = found[SPLIT, trip], found[STREAM, trip]
        own = found[SPLIT, 0]["rest"] / found[SPLIT, 0]["steps"]
        after, steps = split["tokens"] - split["answers"], split["steps"]
        sizes = [
            f"{each[way] / each['tokens']:.0f}"
            for each in (split, stream)
            for way in ("up", "down")
        ]
        rows.append([
            f"{trip}", speed(split), speed(stream), f"{after / steps:.2f}", f"{1e3 * split['rest'] / steps:.1f}",
            f"{after / split['rest']:.1f}", f"{after / steps / (trip / 1e3 + own):.1f}", *sizes,
        ])  # fmt: skip
    ways = ["split", "streams"]
    head = [
        "round trip, ms",
        *(f"{way}, tokens/s" for way in ways),
        "β",
        "ms a step",
        "tokens/s after the first",
    ]
    head += ["expected", *(f"{way}: bytes a token {to}" for way in ways for to in ("up", "down"))]
    print("\n".join(report.table(head, *rows)).strip())
    print(f"the device alone: {speed(found[ALONE, 0])} tokens/s")


def cut(args: argparse.Namespace) -> None:
    """Write a model of some of a model's layers."""
    from ssdevice.model import loading

    model = loading.load_hf(args.model)
    model.model.layers = model.model.layers[:0].extend(model.model.layers[i] for i in args.layers)
    model.config.num_hidden_layers = len(args.layers)
    model.save_pretrained(args.out)
    for file in args.model.glob("*"):
        if not (args.out / file.name).exists() and file.suffix in (".json", ".jinja"):
            shutil.copy(file, args.out)


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    numbers = {"limit": 10, "max-tokens": 64, "drafts": 3, "threads": 1}
    for name, command in (("run", run), ("outage", outage)):
        (one := commands.add_parser(name)).set_defaults(run=command)
        add = one.add_argument
        add("large", type=Path, metavar="LARGE")
        add("small", type=Path, metavar="SMALL")
        add("--data", type=Path, required=True)
        for number, default in numbers.items():
            add(f"--{number}", type=int, default=default)
        add("--rate", type=float, default=10.0, help="megabits a second, each way")
        if command is run:
            add("--results", type=Path, required=True)
        add(
            "--trips",
            type=integers,
            default=[0, 20, 50, 100, 150] if command is run else [50],
            help="milliseconds",
        )
        if command is outage:
            add("--before", type=float, default=3.0)
            add("--gap", type=float, default=6.0)
    (one := commands.add_parser("table")).set_defaults(run=table)
    one.add_argument("results", type=Path)
    (one := commands.add_parser("cut")).set_defaults(run=cut)
    one.add_argument("--model", type=Path, required=True)
    one.add_argument("--layers", type=integers, required=True)
    one.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    args.run(args)


def integers(text: str) -> list[int]:
    """Numbers between commas."""
    return list(map(int, text.split(",")))


if __name__ == "__main__":
    main()
