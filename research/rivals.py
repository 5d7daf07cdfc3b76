"""Trains the drafters of other papers beside ours, on one frozen base and the same rows, and counts β.

    python -m research.rivals --base models/base-7m --data train.jsonl.gz --dev dev.jsonl.gz --out OUT \
        --instruction "Write the SQL query." --limit 3000 --steps 300

BPD, Medusa-1, Hydra, Hydra++, EAGLE (``trained.py``) and Mixture of Attentions (``mixture.py``) read the same main
rows, which run once a batch; ``streams`` and ``draft layers`` are ``ssdevice train --mode lossless`` on the same
batches. Every one has the same seed, optimizer, schedule, learning rate and number of steps. Then the base answers the
prompts of ``--dev`` greedily, and drafts are counted along its answers, as speculative decoding would take them; their
ranks stay in ``--out`` for ``own_trees.py``. A run that was stopped goes on; what is finished is not run again. On the
CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import process_time
from typing import Any

import torch

from research import trained
from research.answers import answered, mean_losses
from research.mixture import MIXTURES
from research.trained import Base, Drafter, losses
from ssdevice import cli
from ssdevice.adapters.settings import SETTINGS
from ssdevice.bench import report
from ssdevice.commands.opening import prepare_frameworks
from ssdevice.data import read_examples
from ssdevice.model import loading
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import BatchOrder, collate, tokenize
from ssdevice.train.evaluation import dev_prompts, ranks_of, stream_ranks
from ssdevice.train.job import has_bf16
from ssdevice.train.loss import IGNORE, completion_rows
from ssdevice.train.optimization import Run
from ssdevice.train.options import UNFINISHED
from ssdevice.train.trainer import draft_ids
from ssdevice.tree import Tree, tokens_per_step

RIVALS = {**trained.RIVALS, **MIXTURES}
OURS = {"streams": (), "draft layers": ("--draft-layers", "1")}
"""Options of ``ssdevice train --mode lossless`` for our own."""
SAVE = 20
"""Steps between checkpoints."""
RANKS = "ranks.json"
"""In a method's folder: what ``counted`` found along the dev answers."""
Found = tuple[list[list[list[int]]], list[float]]
"""For each sample the ranks of its guesses (see AnswerRanks), and the mean loss of each guess in nats."""


def train(
    base: Base, names: Sequence[str], samples: Sequence[Sample], pad: int, args: argparse.Namespace
) -> None:
    """Train these drafters side by side, each into its folder of ``--out``, from where they were."""
    runs = {name: Run(new(name, base, args.seed), args, args.steps) for name in names}
    for name, run in runs.items():
        (folder(args, name) / UNFINISHED).mkdir(parents=True, exist_ok=True)
        run.resume(folder(args, name))
    first = min((run.step for run in runs.values()), default=args.steps)
    batches = BatchOrder(samples, args.batch_size, args.seed).from_position(first)
    bf16 = args.precision == "bf16" or (args.precision == "auto" and has_bf16(torch.device("cpu")))
    for step in range(first, args.steps):
        batch = collate(next(batches), pad)
        began = process_time()
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            main_rows = base.main(batch.tokens)
        shared = process_time() - began
        for name, run in runs.items():
            if run.step > step:
                continue
            began, random = process_time(), torch.Generator().manual_seed((args.seed << 32) + step)
            with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
                loss = run.loss.loss(batch, main_rows, random)
            loss.backward()
            run.update([loss.item(), shared])
            run.history[-1].append(process_time() - began)
            if run.step % SAVE == 0 or run.step == args.steps:
                run.save(folder(args, name))
        if (step + 1) % SAVE == 0:
            print(
                f"step {step + 1} of {args.steps}",
                *(f"{r.history[-1][1]:.3f}" for r in runs.values()),
                file=sys.stderr,
            )


def new(name: str, base: Base, seed: int) -> Drafter:
    """A drafter before training."""
    torch.manual_seed(seed)
    return RIVALS[name](base)


def folder(args: argparse.Namespace, name: str) -> Path:
    """Where a method's weights are."""
    return Path(args.out) / name.lower().replace(" ", "-")


@torch.no_grad()
def counted(base: Base, drafters: Sequence[Drafter], samples: Sequence[Sample]) -> list[Found]:
    """The ranks and losses of each drafter's guesses along the samples' completions."""
    ranks: list[list[list[list[int]]]] = [[] for _ in drafters]
    total = torch.zeros(len(drafters), 2, base.gamma)
    for group in (samples[at : at + 4] for at in range(0, len(samples), 4)):
        batch = collate(group, 0)
        nodes = completion_rows(batch.prompts, batch.lengths)
        ahead, main_rows = base.ahead(batch, nodes), base.main(batch.tokens)
        for own, sums, drafter in zip(ranks, total, drafters, strict=True):
            logits = drafter.guesses(batch.tokens, main_rows, nodes.clamp(min=0)).float()
            sums += torch.stack([losses(logits, ahead).sum((0, 1)), (ahead != IGNORE).sum((0, 1))])
            rows = zip(ranks_of(ahead, logits).tolist(), group, strict=True)
            own += [row[: len(sample.ids) - sample.prompt] for row, sample in rows]
    nats = (total[:, 0] / total[:, 1].clamp(min=1)).tolist()
    return list(zip(ranks, nats, strict=True))


@torch.no_grad()
def counted_ours(
    adapter: Path, samples: Sequence[Sample], args: argparse.Namespace
) -> tuple[int, Found]:
    """The parameters of our streams or layers, and what ``counted`` gives, by the product's own code."""
    model = loading.load(Path(args.base), adapter, args.max_length).model
    assert model.streams is not None
    found = stream_ranks(model, samples), mean_losses(model, samples)[1:]
    return sum(p.numel() for p in model.streams.parameters()), found


def train_ours(name: str, args: argparse.Namespace, more: Sequence[str] = ()) -> None:
    """Train ours with the product's command and ``more`` options of it, unless it is done."""
    out = folder(args, name)
    if (out / SETTINGS).is_file() and not (out / UNFINISHED).is_dir():
        return
    same = {
        "batch-size": args.batch_size,
        "instruction": args.instruction,
        "max-length": args.max_length,
    }
    same |= {
        key: getattr(args, key)
        for key in ("limit", "steps", "lr", "seed", "gamma", "precision", "threads")
    }
    same |= {
        "draft-vocabulary": args.draft_vocabulary,
        "model": args.base,
        "app": "rivals",
        "out": out,
    }
    options = [part for key, value in same.items() for part in (f"--{key}", str(value))]
    if cli.main(["train", "--quiet", "--mode", "lossless", "--data", *args.data, *more, *options]):
        raise SystemExit(f"{name}: training failed")


def answers(base: Base, args: argparse.Namespace, tokenizer: Any) -> list[Sample]:
    """The base's greedy answers to the prompts of ``--dev`` that leave half of ``--max-length`` to them, which is the
    longest unless ``--answer-tokens`` says less."""
    examples = read_examples(args.dev, args.dev_limit, require_completion=False)
    prompts = [sample.ids for sample in dev_prompts(args, examples, tokenizer)]
    most = [
        min(args.answer_tokens or args.max_length, args.max_length - len(ids)) for ids in prompts
    ]
    return answered(base.backbone, tokenizer.stop_ids, prompts, most)


def line(
    args: argparse.Namespace, name: str, parameters: int, seconds: float, found: Found
) -> dict[str, Any]:
    """What ``results.jsonl`` keeps of a method, with β of chains of 1 to γ; its ranks go into its folder."""
    ranks, nats = found
    (folder(args, name) / RANKS).write_text(json.dumps(ranks))
    beta = [tokens_per_step(ranks, Tree.chain(depth)) for depth in range(1, len(nats) + 1)]
    return {
        "method": name,
        "parameters": parameters,
        "seconds": seconds,
        "beta": beta,
        "losses": nats,
    }


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train and count every method that has no line yet, and yield their lines."""
    tokenizer = open_tokenizer(Path(args.base))
    samples, _ = tokenize(
        read_examples(args.data, args.limit), tokenizer, args.instruction, args.max_length
    )
    backbone = loading.build(loading.load_hf(Path(args.base)), None, args.max_length).backbone
    vocab = int(backbone.config.vocab_size)
    ids = (
        draft_ids(samples, tokenizer.stop_ids, args.draft_vocabulary, vocab)
        if args.draft_vocabulary
        else None
    )
    base = Base(backbone, args.gamma, torch.tensor(ids) if ids else None)
    dev = answers(base, args, tokenizer)
    rivals = [name for name in args.methods if name in RIVALS]
    train(base, rivals, samples, tokenizer.stop_ids[0], args)
    ended = {name: Run(new(name, base, args.seed), args, args.steps) for name in rivals}
    for name, each in ended.items():
        each.resume(folder(args, name))
    for (name, each), found in zip(
        ended.items(), counted(base, [e.loss for e in ended.values()], dev), strict=True
    ):
        seconds = sum(shared + own for _, _, shared, own in each.history)
        yield line(args, name, sum(p.numel() for p in each.learned.values()), seconds, found)
    for name in (name for name in args.methods if name in OURS):
        began = process_time()
        train_ours(name, args, OURS[name])
        seconds = process_time() - began
        parameters, found = counted_ours(folder(args, name), dev, args)
        yield line(args, name, parameters, seconds, found)


def table(found: Sequence[dict[str, Any]]) -> str:
    """A row for each method."""
    gamma = len(found[0]["beta"])
    head = [
        "method",
        "parameters added",
        "CPU s",
        f"β, chain:1 to {gamma}",
        f"loss of guesses 1 to {gamma}, nats",
    ]
    rows = [
        [
            each["method"], f"{each['parameters']:,}", f"{each['seconds']:.0f}",
            ", ".join(f"{beta:.2f}" for beta in each["beta"]), ", ".join(f"{loss:.2f}" for loss in each["losses"]),
        ]
        for each in found
    ]  # fmt: skip
    return "\n".join(report.table(head, *rows)).strip()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of what is trained and counted."""
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--base", "--dev", "--out"):
        found.add_argument(name, required=True)
    found.add_argument("--data", nargs="+", required=True)
    found.add_argument("--instruction", default="")
    numbers = {
        "limit": 3000,
        "dev-limit": 100,
        "steps": 300,
        "batch-size": 8,
        "gamma": 4,
        "seed": 0,
        "max-length": 512,
    }
    for name, default in {
        **numbers,
        "answer-tokens": 0,
        "draft-vocabulary": 0,
        "threads": 1,
    }.items():
        found.add_argument(f"--{name}", type=int, default=default)
    found.add_argument("--lr", type=float, default=2e-3)
    found.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    return found


def begin(args: argparse.Namespace, *free: str) -> None:
    """Make ``--out``; raises SystemExit if it was made with other options, but for those that are ``free``."""
    kept = Path(args.out) / "options.json"
    options = json.dumps(
        {name: value for name, value in vars(args).items() if name not in ("out", *free)}
    )
    if kept.is_file() and kept.read_text() != options:
        raise SystemExit(f"{args.out} was made with other options: {kept}; choose another --out")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(options)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """The options; raises SystemExit for unknown methods and as ``begin`` does."""
    options = parser(__doc__)
    every = [*RIVALS, *OURS]
    options.add_argument(
        "--methods", type=lambda text: text.split(","), default=every, help="some, by commas"
    )
    args = options.parse_args(words)
    if unknown := set(args.methods) - set(every):
        raise SystemExit(
            f"--methods: there are {', '.join(every)}, not {', '.join(sorted(unknown))}"
        )
    begin(args, "methods")
    return args


def main(words: Sequence[str] | None = None) -> None:
    """Train, count, and print the table of all methods that are done."""
    args = parse(words)
    prepare_frameworks(args.threads)
    results = Path(args.out) / "results.jsonl"
    done = (
        [json.loads(text) for text in results.read_text().splitlines()] if results.is_file() else []
    )
    known = {each["method"] for each in done}
    args.methods = [name for name in args.methods if name not in known]
    with results.open("a") as file:
        for each in run(args) if args.methods else ():
            file.write(json.dumps(each) + "\n")
            file.flush()
            done.append(each)
    print(table(done))


if __name__ == "__main__":
    main()
