"""``ssdevice train``: train an app's adapter from prompt/completion pairs."""

import argparse
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.bundle.manifest import NAME
from ssdevice.bundle.staging import check_writable, disk_errors
from ssdevice.commands.opening import (
    add_threads,
    positive,
    prepare_frameworks,
    refuse_ignored,
    whole,
)
from ssdevice.commands.progress import Progress
from ssdevice.config import STREAM_TERMS, Mode, StreamConfig, StreamMLP, load_strict, to_json
from ssdevice.errors import InputError, needs_extra
from ssdevice.rules import check_rule
from ssdevice.train.options import FIXED, UNFINISHED, Objective, Recipe, TrainOptions

OF_STREAMS = (
    "--recipe",
    "--gamma",
    "--msa-layers",
    "--init-rank",
    "--token-rank",
    "--follow-rank",
    "--adapter-rank",
    "--stream-mlp",
    "--draft-layers",
    "--draft-vocabulary",
    "--alpha-stream",
    "--by-reach",
    "--soft-labels",
    "--segment",
)
TOKEN_RANK = 256
"""Default of ``--token-rank`` for new streams: they draft before they are trained
(docs/training.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face folder or hub id of the base")
    add(
        "--data",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="JSON Lines of prompt/completion (.gz too)",
    )
    add("--app", required=True, metavar="NAME", help="name of the app")
    add("--out", required=True, type=Path, metavar="ADAPTER", help="adapter folder to write")
    add("--mode", choices=[m.value for m in Mode], help="shared (default) or lossless")
    add(
        "--instruction",
        default="",
        help="line put before every prompt of this app; stored with the adapter",
    )
    add(
        "--dev",
        type=Path,
        metavar="FILE",
        help="held-out data, for tokens per step on its first 100 prompts",
    )
    add(
        "--init",
        type=Path,
        metavar="ADAPTER",
        help="continue from this adapter: ours, or PEFT's LoRA without streams",
    )
    add(
        "--freeze-lora",
        action="store_true",
        help="shared mode with --init: train only what streams have of their own; answers stay "
        "the same",
    )
    add("--limit", type=positive, metavar="N", help="use only the first N rows")
    add = parser.add_argument_group("self-distillation").add_argument
    add(
        "--self-distill",
        action="store_true",
        help="train on the model's own greedy completions of the data's prompts",
    )
    add(
        "--self-prompt",
        type=positive,
        metavar="N",
        help="no data: the model writes N prompts and its greedy answers, kept as "
        "OUT/self_prompts.jsonl",
    )
    add(
        "--answer-tokens",
        type=positive,
        metavar="N",
        help="longest generated answer (default: that of the longest completion; 192 without data)",
    )
    stream = parser.add_argument_group(
        "streams", "Defaults; with --init those of the adapter, if it has streams."
    )
    add = stream.add_argument
    add("--gamma", type=int, help="γ, number of streams (default 4)")
    add(
        "--msa-layers",
        type=int,
        metavar="N_s",
        help="top layers with streams (default 4); 0: heads instead",
    )
    add("--init-rank", type=int, help="rank of f in eq. 3 (default 0: the identity)")
    add(
        "--token-rank",
        type=int,
        metavar="RANK",
        help="streams also see the token just chosen, through factors of this rank (default "
        f"{TOKEN_RANK}; 0, the paper's: no)",
    )
    add(
        "--follow-rank",
        type=int,
        metavar="RANK",
        help="a draft also sees the one before it, by a term of this rank (default 0, the "
        "paper's: no)",
    )
    add("--lora-rank", type=int, help="LoRA rank in shared mode (default 32)")
    add("--adapter-rank", type=int, help="stream adapter rank in lossless mode (default 8)")
    add(
        "--stream-mlp",
        choices=[m.value for m in StreamMLP],
        help="MLP of stream rows in lossless mode (default base+adapter)",
    )
    add(
        "--draft-layers",
        type=int,
        metavar="N",
        help="N layers of its own that draft one token after the other, in lossless mode, instead "
        "of streams in the top layers (default 0)",
    )
    add(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="streams choose among the N most used tokens; 0: all (default: 8192 for a large "
        "vocabulary)",
    )
    add = parser.add_argument_group("recipe").add_argument
    add(
        "--recipe",
        choices=[r.value for r in Recipe],
        help="ours (default); paper: the successor's lossless streams and loss; paper-v1: "
        "2402.11131's",
    )
    add(
        "--objective",
        choices=["streaming", "next-token"],
        default="streaming",
        help="streaming (default), or next-token LoRA as a baseline",
    )
    add("--steps", type=positive, help="optimizer steps (default: five passes over the data)")
    add(
        "--batch-size", type=positive, default=32, help="rows per step in each process (default 32)"
    )
    add(
        "--lr",
        type=float,
        default=5e-4,
        help="peak learning rate of AdamW, falling linearly (default 5e-4)",
    )
    add(
        "--alpha-stream",
        type=float,
        metavar="αj",
        help="weight of a stream's loss (default 0.1; 1 if answers stay)",
    )
    add(
        "--by-reach",
        action=argparse.BooleanOptionalAction,
        help="a guess counts by how likely the streams before it are right (default if answers "
        "stay, as in lossless mode and with --freeze-lora; else all count alike)",
    )
    add(
        "--soft-labels",
        type=float,
        metavar="SHARE",
        help="share of a stream's loss that learns the model's own probabilities, not the next "
        "token (default 0)",
    )
    add(
        "--max-length",
        type=whole(2),
        default=512,
        metavar="TOKENS",
        help="longer rows are left out (default 512)",
    )
    add(
        "--segment",
        type=positive,
        metavar="TOKENS",
        help="streams of so many tokens per row of a batch run in one pass (default 64)",
    )
    add(
        "--precision",
        choices=["auto", "bf16", "fp32"],
        default="auto",
        help="of matrix products; auto (default): bf16 if the hardware has it",
    )
    add(
        "--base-precision",
        choices=["bf16", "fp32"],
        default="fp32",
        help="of the frozen base in memory",
    )
    add("--seed", type=whole(0, (1 << 63) - 1), default=0)
    add_threads(parser)


def run(args: argparse.Namespace) -> int:
    """Train, then print a JSON object with the tokens per step on the dev rows."""
    with needs_extra("train"):
        from ssdevice.train.trainer import train
    check_rule("--app", args.app, NAME)
    # An empty folder is filled, an unfinished run is continued.
    empty = args.out.is_dir() and not any(args.out.iterdir())
    if args.out.exists() and not empty and not (args.out / UNFINISHED).is_dir():
        raise InputError(f"--out {args.out} exists; choose a new folder or delete it")
    check_writable(args.out, "--out")
    for name, value in FIXED[Recipe(args.recipe or Recipe.OURS)].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    options = _options(args)
    _check_effect(args, options)
    # torchrun starts several processes, and only the first prints.
    worker = int(os.environ.get("RANK", "0")) > 0
    prepare_frameworks(args.threads)
    try:
        with disk_errors(args.out), Progress(args.quiet or worker) as progress:
            result = train(options, progress.report)
    except KeyboardInterrupt:
        if (args.out / UNFINISHED).is_dir() and not worker:
            print("ssdevice: the same command goes on where this one was", file=sys.stderr)
        raise
    if worker:
        return 0
    if result is not None:
        beta = {f"chain:{options.streams.gamma}": round(result.tokens_per_step, 3)}
        print(json.dumps({"app": args.app, "dev_prompts": result.prompts, "tokens_per_step": beta}))
    else:
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _options(args: argparse.Namespace) -> TrainOptions:
    given: dict[str, Any] = {}
    for each in fields(TrainOptions):
        value = getattr(args, each.name, None)
        if value is not None:
            given[each.name] = value
    given["data"] = tuple(args.data)
    given["streams"] = _streams(args)
    given["objective"] = Objective(args.objective)
    given["recipe"] = Recipe(args.recipe or Recipe.OURS)
    return TrainOptions(**given)


def _check_effect(args: argparse.Namespace, options: TrainOptions) -> None:
    """Raise InputError for an option that this run would not heed."""
    lossless = options.streams.mode is Mode.LOSSLESS
    layers = options.streams.msa_layers
    if options.objective is Objective.NEXT_TOKEN:
        refuse_ignored(args, "next-token training has no streams", *OF_STREAMS)
    if lossless:
        refuse_ignored(
            args, "in lossless mode main rows have no LoRA of this training", "--lora-rank"
        )
    elif layers:
        refuse_ignored(args, "streams have adapters in lossless mode", "--adapter-rank")
    if not lossless or not layers:
        refuse_ignored(args, "MSA layers have adapters in lossless mode", "--stream-mlp")
    if options.self_prompt is not None:
        refuse_ignored(args, "there are no rows of --data", "--limit")
    elif not options.self_distill:
        refuse_ignored(args, "it goes with --self-distill or --self-prompt", "--answer-tokens")


def _streams(args: argparse.Namespace) -> StreamConfig:
    """The stream options as given; the others are those of ``--init``, if it has streams, or the
    defaults.
    """
    settings = AdapterFolder.open(args.init).settings if args.init is not None else None
    start = settings.streams if settings is not None else StreamConfig()
    given = {name: getattr(args, name) for name in vars(start) if getattr(args, name) is not None}
    if settings is None and given.get("draft_layers"):
        given = {"mode": Mode.LOSSLESS.value, **dict.fromkeys(STREAM_TERMS, 0), **given}
    if given.get("mode", start.mode) == Mode.LOSSLESS:
        given["lora_rank"] = 0
    if settings is None and given.get("msa_layers", start.msa_layers):
        given.setdefault("token_rank", TOKEN_RANK)
    return load_strict(StreamConfig, {**to_json(start), **given}, "stream options")
