"""What streams and drafts that repeat the text gain over plain decoding as the context grows: the successor's appendix O.

    python -m research.long_context --model MODEL --adapter ADAPTER --data prompts.jsonl --out OUT --contexts 128,2048

Prompts are as long as each context, by the texts of other prompts before them (``top_attention.py``). Each is answered
plainly, with drafts that repeat the text (a bundle without streams) and with streams (``ssdevice export``), in INT4 on
one thread; every answer must be the plain one. A call of a number of rows counts as the fastest quarter of a method's
calls in that context took, in CPU time. Answers that are there are not given again.
"""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from research import bundles
from research.methods import METHODS, STREAMS, Arm, lines
from research.top_attention import long_prompts
from ssdevice.bench import report
from ssdevice.data import read_examples
from ssdevice.runtime.engine import EngineOptions
from ssdevice.runtime.session import Session
from ssdevice.tree import Tree

WITHOUT = "without-streams"
PLAIN, LOOKUP, DRAFTED = "plain", "our lookup", "our streams"
ARMS = {PLAIN: WITHOUT, LOOKUP: WITHOUT, DRAFTED: STREAMS}
"""The bundle of each method."""


def export(args: Namespace, context: int) -> None:
    """Write the bundles that OUT does not have yet."""
    if not (args.out / WITHOUT).is_dir():
        bundles.export(
            args.model, None, args.quant, context, Tree.parse(args.tree), args.out / WITHOUT
        )
    if not (args.out / STREAMS).is_dir():
        given = (
            args.model,
            f"chat={args.adapter}",
            args.quant,
            context,
            args.tree,
            args.out / STREAMS,
        )
        bundles.export_streams(*given, "--no-cross-check")


def answer(args: Namespace, contexts: Sequence[int]) -> None:
    """Write a line for each context, prompt and method. Raises SystemExit for an answer that is not the plain one."""
    results = args.out / "results.jsonl"
    found = list(lines(results)) if results.is_file() else []
    done = {(each["context"], each["prompt"], each["method"]): each["tokens"] for each in found}
    options = EngineOptions(threads=1)
    sessions = {name: Session.open(args.out / name, options=options) for name in (WITHOUT, STREAMS)}
    talks = {name: session.engine.new_conversation() for name, session in sessions.items()}
    tokenizer = sessions[STREAMS].tokenizer
    arms = {
        name: Arm(talks[ARMS[name]], tokenizer.stop_ids, METHODS[name][1](None), process_time)  # type: ignore[arg-type]
        for name in ARMS
    }
    texts = [example.prompt for example in read_examples(args.data, None, require_completion=False)]
    for context in contexts:
        for number, ids in enumerate(long_prompts(texts, tokenizer, context, args.prompts)):
            for name, arm in arms.items():
                if (context, number, name) in done:
                    continue
                given = arm(ids, args.max_tokens)
                expected = done.setdefault((context, number, PLAIN), given["tokens"])
                if given["tokens"] != expected:
                    raise SystemExit(
                        f"{name}, context {context}, prompt {number}: {given['tokens']}, not {expected}"
                    )
                with results.open("a") as out:
                    line = {
                        "context": context,
                        "prompt": number,
                        "method": name,
                        "length": len(ids),
                        **given,
                    }
                    print(json.dumps(line), file=out)
    for session in sessions.values():
        session.close()


def row(found: Sequence[dict[str, Any]]) -> list[str]:
    """Of one context: tokens of prompts, a plain call, and each method's tokens a call, step and speed over plain."""
    costs, lengths = (
        defaultdict[tuple[str, int], list[float]](list),
        [each["length"] for each in found],
    )
    for each in found:
        for rows, ms in zip(each["rows"], each["ms"], strict=True):
            costs[each["method"], rows].append(ms)
    cost = {key: float(np.quantile(times, 0.25)) for key, times in costs.items()}
    plain = cost[PLAIN, 1]
    cells = [f"{sum(lengths) / len(lengths):.0f}", f"{plain:.1f}"]
    for name in (LOOKUP, DRAFTED):
        mine = [each for each in found if each["method"] == name]
        tokens, calls = (
            sum(len(each["tokens"]) - 1 for each in mine),
            [n for each in mine for n in each["rows"]],
        )
        step = cost.get((name, max(calls)), 0.0)
        faster = plain * tokens / sum(cost[name, n] for n in calls)
        stepping = sum(n > 1 for n in calls) / len(calls)
        cells += [f"{tokens / len(calls):.2f}", f"{stepping:.0%}", f"{step:.1f}", f"{faster:.2f}x"]
    return cells


def main(words: Sequence[str] | None = None) -> None:
    """Answer what is missing, and print a row for each context."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    for name in ("--adapter", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--contexts", default="128,512,1024,2048")
    parser.add_argument("--tree", default="chain:2")
    parser.add_argument("--quant", default="int4")
    for name, default in {"prompts": 6, "max-tokens": 48}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args(words)
    contexts = [int(n) for n in args.contexts.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    export(args, max(contexts) + args.max_tokens + 16)
    answer(args, contexts)
    found = list(lines(args.out / "results.jsonl"))
    of_each = ["tokens a call", "calls that step", "a step, ms", "over plain"]
    named = [f"{name}: {what}" for name in ("lookup", "streams") for what in of_each]
    head = ["context", "tokens of prompts", "plain, ms", *named]
    rows = [[str(n), *row([each for each in found if each["context"] == n])] for n in contexts]
    print("\n".join(report.table(head, *rows)).strip())


if __name__ == "__main__":
    main()
