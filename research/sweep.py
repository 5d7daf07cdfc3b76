"""Sweeps N_s, γ, k, the rank of adapters and that of f in short runs: the papers' figures 5, 6, 10 and 11.

    python -m research.sweep --model MODEL --data train.jsonl.gz --dev dev.jsonl.gz --out OUT --msa-layers 2,4,6

``ssdevice train`` trains each point with a recipe of the papers; one number differs from the centre, which is the first
of each list. Then the model answers the dev prompts: β of chains and of trees of k candidates along its answers, how
many equal their target, and the losses along the targets. Each finished point is a JSON file in OUT, and is not run
again; an unfinished one goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from research.answers import answered, mean_losses
from ssdevice.adapters.settings import SETTINGS
from ssdevice.bench import report
from ssdevice.bench.quality import METRICS, choose_metric
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.config import Mode, StreamConfig, StreamMLP
from ssdevice.data import Example, read_examples
from ssdevice.model import loading
from ssdevice.model.step import StreamModel
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import Sample
from ssdevice.train.evaluation import stream_ranks
from ssdevice.train.options import UNFINISHED, Recipe, TrainOptions
from ssdevice.train.trainer import train
from ssdevice.tree import Tree, tokens_per_step

SWEPT = {"msa_layers": [4], "gamma": [4], "rank": [32], "init_rank": [0]}
"""The options with several values, and the papers' value of each."""
BRANCHES = (1, 2, 3)
"""k: candidates of each stream."""
Answer = Callable[[StreamModel, Sequence[int], Sequence[Sequence[int]], int], list[Sample]]
"""A model's greedy answers to prompts; the integers are its stop tokens and the most tokens of an answer."""


def plainly(
    model: StreamModel, stop: Sequence[int], prompts: Sequence[Sequence[int]], most: int
) -> list[Sample]:
    """The answers of a model whose main rows see main rows only."""
    return answered(model.backbone, stop, prompts, [most] * len(prompts))


def points(lists: dict[str, list[int]]) -> dict[str, dict[str, int]]:
    """The centre, and each point that differs from it in one number, by name."""
    centre = {name: values[0] for name, values in lists.items()}
    found = {"centre": centre}
    found |= {
        f"{name}={value}": {**centre, name: value} for name in lists for value in lists[name][1:]
    }
    return found


def options(args: argparse.Namespace, out: Path, point: dict[str, int]) -> TrainOptions:
    """Those of a training run in ``out``; ``rank``: the LoRA's in shared mode, the adapters' in lossless mode."""
    recipe, size = Recipe(args.recipe), dict(point)
    rank = size.pop("rank")
    if recipe is Recipe.PAPER_V1:
        streams = StreamConfig(mode=Mode.SHARED, lora_rank=rank, **size)
    else:
        only = StreamMLP.ADAPTER_ONLY
        streams = StreamConfig(
            mode=Mode.LOSSLESS, lora_rank=0, adapter_rank=rank, stream_mlp=only, **size
        )
    return TrainOptions(
        str(args.model), tuple(args.data), "sweep", out, streams, recipe, instruction=args.instruction,
        limit=args.limit, steps=args.steps, batch_size=args.batch_size, lr=args.lr, draft_vocabulary=0,
        precision=args.precision, seed=args.seed, by_reach=False, init=args.init,
    )  # fmt: skip


def finished(
    args: argparse.Namespace,
    name: str,
    point: dict[str, int],
    arm: AbstractContextManager[Any] | None = None,
    answer: Answer = plainly,
) -> dict[str, Any]:
    """The numbers of a point, which is trained and measured inside ``arm`` unless its file is there."""
    file, out = args.out / f"{name}.json", args.out / name
    if file.is_file():
        return dict(json.loads(file.read_text()))
    with arm or nullcontext():
        if not (out / SETTINGS).is_file() or (out / UNFINISHED).is_dir():
            train(options(args, out, point), lambda *_: None)
        model = loading.load(args.model, out, args.max_length).model
        found = {"name": name, **point, "steps": args.steps, **measured(model, out, args, answer)}
    file.write_text(json.dumps(found) + "\n")
    print(f"{name}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


@torch.no_grad()
def measured(
    model: StreamModel, adapter: Path, args: argparse.Namespace, answer: Answer = plainly
) -> dict[str, Any]:
    """β by tree, quality, and the mean losses of the next token and the streams along the targets."""
    tokenizer = open_tokenizer(args.model, adapter)
    examples: list[Example] = read_examples(args.dev, args.dev_limit)
    every = [tokenizer.sample(example, args.instruction) for example in examples]
    prompts = [s.ids[: s.prompt] for s in every]
    samples = answer(model, tokenizer.stop_ids, prompts, args.answer_tokens)
    texts = [tokenizer.decode(s.ids[s.prompt :]) for s in samples]
    metric = choose_metric(examples)
    assert metric is not None
    ranks = stream_ranks(model, samples)
    return {
        "beta": {
            f"chain:{d}": tokens_per_step(ranks, Tree.chain(d)) for d in range(1, model.gamma + 1)
        },
        "beta by k": {k: tokens_per_step(ranks, Tree.full(k, model.gamma)) for k in BRANCHES},
        "quality": {name: sum(v) / len(v) for name, v in METRICS[metric](texts, examples).items()},
        "losses": mean_losses(model, every),
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """A row for each point."""
    by_k = [f"k = {k}" for k in BRANCHES[1:]]
    head = ["point", "β, chain of γ", *by_k, *found[0]["quality"], "next token", "streams"]
    rows = [
        [
            each["name"], f"{list(each['beta'].values())[-1]:.2f}",
            *(f"{value:.2f}" for value in list(each["beta by k"].values())[1:]),
            *(f"{value:.3f}" for value in each["quality"].values()),
            f"{each['losses'][0]:.3f}", ", ".join(f"{loss:.2f}" for loss in each["losses"][1:]),
        ]
        for each in found
    ]  # fmt: skip
    return "\n".join(report.table(head, *rows)).strip()


def numbers_of(text: str) -> list[int]:
    """``2,4`` as a list."""
    return [int(part) for part in text.split(",")]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a training run, but for those that are swept."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--dev", "--out"):
        found.add_argument(name, type=Path, required=True)
    found.add_argument("--data", type=Path, nargs="+", required=True)
    found.add_argument("--instruction", default="")
    found.add_argument("--recipe", choices=["paper-v1", "paper"], default="paper-v1")
    numbers = {
        "limit": 3000,
        "dev-limit": 100,
        "steps": 100,
        "batch-size": 8,
        "seed": 0,
        "max-length": 512,
    }
    for name, default in {**numbers, "answer-tokens": 96, "threads": 1}.items():
        found.add_argument(f"--{name}", type=int, default=default)
    found.add_argument("--lr", type=float, default=2e-3)
    found.add_argument(
        "--init", type=Path, help="an adapter to go on with, whose numbers every point must have"
    )
    found.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    for name, values in SWEPT.items():
        found.add_argument(f"--{name.replace('_', '-')}", type=numbers_of, default=values)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Run what is not there yet, and print the table."""
    args = parser(__doc__).parse_args(words)
    prepare_frameworks(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    lists = {name: getattr(args, name) for name in SWEPT}
    print(table([finished(args, name, point) for name, point in points(lists).items()]))


if __name__ == "__main__":
    main()
