"""Methods that need no training, and ours, on the same prompts and the same weights, in one table.

    python -m research.methods export --model DIR --out FOLDER
    python -m research.methods run FOLDER --data prompts.jsonl --results results.jsonl [--store answers.jsonl]
    python -m research.methods table results.jsonl

``export`` writes a bundle for each tree, ``run`` a line for each method and prompt; a second run goes on where the
first one ended. Every answer must be that of plain decoding.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from research import shapes
from research.drafters import Datastore, Drafter, Lookahead, Merged, PromptLookup, Recycling, Rest
from ssdevice.runtime.adaptive import Adaptive
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.lookup import Lookup, LookupOnly
from ssdevice.runtime.loop import Advance, decode, plain, speculative
from ssdevice.runtime.session import Session
from ssdevice.text.stream import Emission
from ssdevice.tree import Tree

SMALL, LARGE = (5, 3, 3), (15, 5, 15)
"""Lookahead's W, N and G: rows as the other small trees have, and what its paper takes for 7 B."""
TREES = {
    "chain-4": Tree.chain(4),
    "chain-10": Tree.chain(10),
    "bushy-16": shapes.bushy(16),
    "bushy-64": shapes.bushy(64),
    "chains-3x5": shapes.chains(3, 5),
    "lookahead-16": shapes.lookahead(*SMALL)[0],
    "lookahead-120": shapes.lookahead(*LARGE)[0],
}
UNVERIFIED = np.zeros((0, 0), np.int32)
"""``Conversation.verified`` of a call that verifies no drafts."""
STREAMS = "streams"
"""The folder of a bundle with an app's streams, which ``ssdevice export --choose host`` made."""


def _ours() -> Advance:
    lookup = LookupOnly()
    return lambda conversation, last: lookup(conversation, last) or plain(conversation, last)


def _merged(store: Datastore) -> Drafter:
    return Merged([PromptLookup(5), Rest(store, Tree.chain(5)), Recycling(Tree.chain(5))])


METHODS: dict[str, tuple[str, Callable[[Datastore], Advance]]] = {
    "plain": ("chain-4", lambda _: plain),
    "our lookup": ("chain-4", lambda _: _ours()),
    "our adaptive": ("chain-4", lambda _: Adaptive(LookupOnly())),
    "streams, plain": (STREAMS, lambda _: plain),
    "our streams": (STREAMS, lambda _: speculative),
    "our streams, adaptive with lookup": (STREAMS, lambda _: Adaptive(Lookup())),
    "prompt lookup, 4": ("chain-4", lambda _: PromptLookup(4)),
    "prompt lookup, 10": ("chain-10", lambda _: PromptLookup(10)),
    "REST, chain of 4": ("chain-4", lambda store: Rest(store, TREES["chain-4"])),
    "REST, 16 rows": ("bushy-16", lambda store: Rest(store, TREES["bushy-16"])),
    "REST, 64 rows": ("bushy-64", lambda store: Rest(store, TREES["bushy-64"])),
    "token recycling, chain of 4": ("chain-4", lambda _: Recycling(TREES["chain-4"])),
    "token recycling, 16 rows": ("bushy-16", lambda _: Recycling(TREES["bushy-16"])),
    "token recycling, 64 rows": ("bushy-64", lambda _: Recycling(TREES["bushy-64"])),
    "Lookahead, W 5, N 3, G 3": ("lookahead-16", lambda _: Lookahead(*SMALL)),
    "Lookahead, W 15, N 5, G 15": ("lookahead-120", lambda _: Lookahead(*LARGE)),
    "merged: lookup, REST, recycling": ("chains-3x5", _merged),
}
"""Each method with its bundle, and what makes it."""


class Arm:
    """A method, a conversation of its bundle, and the target calls of an answer: rows and milliseconds of each, by
    ``clock``, which gives seconds."""

    def __init__(
        self,
        conversation: Conversation,
        stops: Sequence[int],
        advance: Advance,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.conversation, self.advance, self._stops, self._clock = (
            conversation,
            advance,
            frozenset(stops),
            clock,
        )
        self._rows: list[int] = []
        self._ms: list[float] = []

    def _counted(self, conversation: Conversation, last: int) -> Sequence[int]:
        conversation.verified, start = UNVERIFIED, self._clock()
        run = self.advance(conversation, last)
        self._ms.append(round(1e3 * (self._clock() - start), 3))
        self._rows.append(
            1 if conversation.verified is UNVERIFIED else conversation.geometry.tree.size
        )
        return run

    def _accepted(self, run: Sequence[int]) -> Emission:
        end = next((i + 1 for i, token in enumerate(run) if token in self._stops), None)
        return Emission("", end or len(run), end is not None)

    def __call__(self, ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """The answer to a prompt, and its calls after prefill, which leaves out what the conversation holds already."""
        self._rows, self._ms = [], []
        if isinstance(self.advance, Drafter):
            self.advance.begin(ids)
        known = self.conversation.length = self.conversation.shared(ids)
        runs = decode(self.conversation, ids[known:], self._counted, self._accepted, max_tokens)
        return {
            "tokens": [token for run in runs for token in run.tokens],
            "rows": self._rows,
            "ms": self._ms,
        }


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of JSON Lines, plain or gzip."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as content:
        for line in content:
            yield json.loads(line)


def export(args: argparse.Namespace) -> None:
    """Write the bundles that FOLDER does not have yet."""
    from research import bundles

    for name in dict.fromkeys(METHODS[method][0] for method in args.methods):
        if name in TREES and not (args.out / name).exists():
            tree = shapes.own_columns(TREES[name])
            bundles.export(
                args.model, args.adapter, args.quant, args.context, tree, args.out / name
            )


def run(args: argparse.Namespace) -> None:
    """Decode every prompt with every method of which FOLDER has the bundle. Raises SystemExit for another answer."""
    chosen = [name for name in args.methods if (args.folder / METHODS[name][0]).exists()]
    if not args.store:
        chosen = [name for name in chosen if "REST" not in name]
    results = list(lines(args.results)) if args.results.exists() else []
    done = {(each["method"], each["prompt"]) for each in results}
    answers = {each["prompt"]: each["tokens"] for each in results if each["method"] == "plain"}
    options = EngineOptions(threads=args.threads)
    folders = {METHODS[name][0] for name in chosen}
    sessions = {name: Session.open(args.folder / name, options=options) for name in folders}
    tokenizer = next(iter(sessions.values())).tokenizer
    stored = islice(
        (each["completion"] for file in args.store for each in lines(file)), args.stored
    )
    store = Datastore(map(tokenizer.completion_ids, stored))
    shared = {name: session.engine.new_conversation() for name, session in sessions.items()}
    arms = {
        name: Arm(shared[METHODS[name][0]], tokenizer.stop_ids, METHODS[name][1](store))
        for name in chosen
    }
    for name, arm in arms.items():
        arm(
            tokenizer.prompt_ids("Hello", instruction=args.instruction), 8
        )  # the first calls open graphs
        print("ready:", name, flush=True)
    for number, prompt in enumerate(islice(lines(args.data), args.limit)):
        ids = tokenizer.prompt_ids(prompt["prompt"], instruction=args.instruction)
        for name, arm in arms.items():
            if (name, number) in done:
                continue
            found = arm(ids, args.max_tokens)
            expected = answers.setdefault(number, found["tokens"])
            if found["tokens"] != expected:
                raise SystemExit(
                    f"{name}, prompt {number}: {found['tokens']} instead of {expected}"
                )
            with args.results.open("a") as out:
                print(
                    json.dumps(
                        {"method": name, "prompt": number, "kind": prompt.get("kind", ""), **found}
                    ),
                    file=out,
                )


def table(args: argparse.Namespace) -> None:
    """Print a row for each method; the last columns: how much faster than plain decoding of the same prompts, by kind.

    A method's call of a number of rows counts as the fastest quarter of them took, for other work on a machine delays
    the rest.
    """
    found = [line for file in args.results for line in lines(file)]
    costs: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in found:
        for rows, ms in zip(line["rows"], line["ms"], strict=True):
            costs[line["method"], rows].append(ms)
    cost = {key: float(np.quantile(times, 0.25)) for key, times in costs.items()}
    spent = {
        (line["method"], line["prompt"]): Counter(
            tokens=len(line["tokens"]) - 1,
            steps=len(line["rows"]),
            rows=sum(line["rows"]),
            ms=sum(cost[line["method"], rows] for rows in line["rows"]),
        )
        for line in found
    }
    kind_of = {line["prompt"]: line["kind"] for line in found}

    def total(name: str, prompts: Iterable[int]) -> Counter[str]:
        return sum((spent[name, prompt] for prompt in prompts), Counter())

    kinds = sorted({*kind_of.values()} - {""})
    columns = [
        "method",
        "prompts",
        "β",
        "rows a step",
        "ms a step",
        "tokens/s",
        "over plain",
        *kinds,
    ]
    print("|", *(f"{column} |" for column in columns), "\n" + "|---" * len(columns) + "|")
    for name in [name for name in METHODS if any(name == method for method, _ in spent)]:
        prompts = [prompt for method, prompt in spent if method == name]
        mine, over = total(name, prompts), []
        for kind in ("", *kinds):
            some = [prompt for prompt in prompts if kind in ("", kind_of[prompt])]
            over.append(
                f"{_speed(total(name, some)) / _speed(total('plain', some)):.2f}x |"
                if some
                else "|"
            )
        print(
            f"| {name} | {len(prompts)} | {mine['tokens'] / mine['steps']:.2f} | {mine['rows'] / mine['steps']:.1f} "
            f"| {mine['ms'] / mine['steps']:.1f} | {_speed(mine):.0f} |",
            *over,
        )


def _speed(spent: Counter[str]) -> float:
    return 1e3 * spent["tokens"] / spent["ms"]


def _named(text: str) -> list[str]:
    names = text.split(";")
    if unknown := set(names) - METHODS.keys():
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: choose of {'; '.join(METHODS)}")
    return names


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    add = (one := commands.add_parser("export")).add_argument
    one.set_defaults(run=export)
    add("--model", required=True, help="Hugging Face folder")
    add("--adapter", type=Path, help="a PEFT folder; its streams are left out")
    add("--quant", default="int4")
    add("--context", type=int, default=1024)
    add("--out", type=Path, required=True)
    add("--methods", type=_named, default=[*METHODS], help="only for these, with ; between names")
    add = (one := commands.add_parser("run")).add_argument
    one.set_defaults(run=run)
    add("folder", type=Path)
    add(
        "--data",
        type=Path,
        required=True,
        help='JSON Lines with "prompt" and, for a table by kind, "kind"',
    )
    add(
        "--store",
        type=Path,
        action="append",
        default=[],
        help='JSON Lines with "completion", for REST',
    )
    add("--stored", type=int, help="answers in the datastore (default: all)")
    add("--instruction", help="an app's instruction")
    add("--results", type=Path, required=True)
    add("--methods", type=_named, default=[*METHODS], help="only these, with ; between names")
    add("--limit", type=int)
    add("--max-tokens", type=int, default=128)
    add("--threads", type=int, default=0)
    add = (one := commands.add_parser("table")).add_argument
    one.set_defaults(run=table)
    add("results", type=Path, nargs="+")
    args = parser.parse_args(arguments)
    args.run(args)


if __name__ == "__main__":
    main()
