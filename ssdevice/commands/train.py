"""``ssdevice train``: train an app's adapter from prompt/completion pairs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssdevice.bundle.staging import check_writable
from ssdevice.commands.opening import add_threads, refuse_ignored, use_threads
from ssdevice.commands.quiet import quiet_frameworks
from ssdevice.config import Mode, StreamConfig, StreamMLP, load_strict, to_json
from ssdevice.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from ssdevice.train.options import TrainOptions

OF_STREAMS = (
    "--gamma", "--msa-layers", "--init-rank", "--token-rank", "--follow-rank", "--adapter-rank", "--stream-mlp",
    "--draft-vocabulary", "--alpha-main", "--alpha-stream", "--by-reach", "--soft-labels", "--segment",
)  # fmt: skip
TOKEN_RANK = 256
"""Default of ``--token-rank`` for new streams: they draft before they are trained (docs/training.md)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command. Their defaults are the recipe of the papers."""
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="Hugging Face folder or hub id of the base")
    add("--data", nargs="+", type=Path, default=[], metavar="FILE", help="JSON Lines of prompt/completion (.gz too)")
    add("--app", required=True, metavar="NAME", help="name of the app")
    add("--out", required=True, type=Path, metavar="ADAPTER", help="adapter folder to write")
    add("--mode", choices=[m.value for m in Mode], help="shared (default) or lossless")
    add("--instruction", default="", help="line put before every prompt of this app; stored with the adapter")
    add("--dev", type=Path, metavar="FILE", help="held-out data: tokens per step are reported at the end")
    add("--dev-limit", type=int, metavar="N", help="dev prompts to decode (default 100)")
    add("--init", type=Path, metavar="ADAPTER", help="continue from this adapter: ours, or PEFT's LoRA without streams")
    add("--freeze-lora", action="store_true",
        help="shared mode with --init: train only what streams have of their own; answers stay the same")  # fmt: skip
    add("--limit", type=int, metavar="N", help="use only the first N rows")
    own = parser.add_argument_group("self-distillation")
    add = own.add_argument
    add("--self-distill", action="store_true", help="train on the model's own greedy completions of the data's prompts")
    add("--self-prompt", type=int, metavar="N",
        help="no data: the model writes N prompts and its greedy answers, kept as OUT/self_prompts.jsonl")  # fmt: skip
    add("--temperature", type=float, help="of sampled prompts (default 0.8)")
    add("--top-p", type=float, help="of sampled prompts (default 0.95)")
    add("--answer-tokens", type=int, metavar="N",
        help="longest generated answer (default: that of the longest completion; 192 without data)")  # fmt: skip
    stream = parser.add_argument_group("streams", "Defaults; with --init those of the adapter, if it has streams.")
    add = stream.add_argument
    add("--gamma", type=int, help="γ, number of streams (default 4)")
    add("--msa-layers", type=int, metavar="N_s", help="top layers with streams (default 4); 0: Medusa's heads instead")
    add("--init-rank", type=int, help="rank of f in eq. 3 (default 0: identity)")
    add("--token-rank", type=int, metavar="RANK",
        help=f"streams also see the token just chosen, through factors of this rank (default {TOKEN_RANK}; 0, the "
             "paper's: no)")  # fmt: skip
    add("--follow-rank", type=int, metavar="RANK",
        help="a draft also sees the one before it, by a term of this rank (default 0, the paper's: no)")  # fmt: skip
    add("--lora-rank", type=int, help="LoRA rank in shared mode (default 32)")
    add("--adapter-rank", type=int, help="stream adapter rank in lossless mode (default 8)")
    add("--stream-mlp", choices=[m.value for m in StreamMLP],
        help="MLP of stream rows in lossless mode (default base+adapter)")  # fmt: skip
    add("--draft-vocabulary", type=int, metavar="N",
        help="streams choose among the N most used tokens; 0: all (default: 8192 for a large vocabulary)")  # fmt: skip
    recipe = parser.add_argument_group("recipe")
    add = recipe.add_argument
    add("--objective", choices=["streaming", "next-token"], default="streaming",
        help="streaming (default), or next-token LoRA as a baseline")  # fmt: skip
    add("--epochs", type=float, help="passes over the data (default 5)")
    add("--steps", type=int, help="optimizer steps instead of epochs")
    add("--batch-size", type=int, default=32, help="rows per batch in each process (default 32)")
    add("--accumulate", type=int, default=1, metavar="N", help="batches per optimizer step")
    add("--lr", type=float, default=5e-4, help="peak learning rate of AdamW, falling linearly (default 5e-4)")
    add("--warmup", type=int, default=50, metavar="STEPS",
        help="steps in which the learning rate rises, a tenth of all at most (default 50)")  # fmt: skip
    add("--weight-decay", type=float, default=0.0)
    add("--alpha-main", type=float, metavar="α0", help="weight of the next-token loss (default 1; 0 if answers stay)")
    add("--alpha-stream", type=float, metavar="αj", help="weight of a stream's loss (default 0.1; 1 if answers stay)")
    add("--by-reach", action=argparse.BooleanOptionalAction,
        help="a guess counts by how likely the streams before it are right (default if answers stay, as in lossless "
             "mode and with --freeze-lora; else all count alike)")  # fmt: skip
    add("--soft-labels", type=float, metavar="SHARE",
        help="share of a stream's loss that learns the model's own probabilities, not the next token "
             "(default 0)")  # fmt: skip
    add("--max-length", type=int, default=512, metavar="TOKENS", help="longer rows are left out (default 512)")
    add("--segment", type=int, metavar="TOKENS",
        help="streams of so many tokens per row of a batch run in one pass (default 64)")  # fmt: skip
    add("--precision", choices=["auto", "bf16", "fp32"], default="auto",
        help="of matrix products; auto (default): bf16 if the hardware has it")  # fmt: skip
    add("--base-precision", choices=["bf16", "fp32"], default="fp32", help="of the frozen base in memory")
    add("--keep-gb", type=float, metavar="GB",
        help="memory for the main rows that lossless training on a CPU keeps between epochs (default 4)")  # fmt: skip
    add("--gradient-checkpointing", action="store_true", help="take less memory and a third more time")
    add("--seed", type=int, default=0)
    add_threads(parser)
    add("--checkpoint-seconds", type=float, default=120.0, metavar="S", help="time between checkpoints (default 120)")


def run(args: argparse.Namespace) -> int:
    """Train, then print a JSON object with the tokens per step on the dev rows."""
    try:
        from ssdevice.train import checkpoint
        from ssdevice.train.trainer import train
    except ModuleNotFoundError as error:
        raise MissingExtraError("train", error.name or "torch") from error
    from ssdevice.bundle.integrity import check_rule
    from ssdevice.bundle.manifest import NAME
    from ssdevice.bundle.staging import disk_errors
    from ssdevice.commands.progress import Progress

    check_rule("--app", args.app, NAME)
    # An empty folder is filled, an unfinished run is continued.
    if args.out.exists() and not (
        args.out.is_dir() and (not any(args.out.iterdir()) or (args.out / checkpoint.FOLDER).is_dir())
    ):
        raise InputError(f"--out {args.out} exists; choose a new folder or delete it")
    check_writable(args.out, "--out")
    use_threads(args.threads)
    options = _options(args)
    _check_effect(args, options)
    worker = int(os.environ.get("RANK", "0")) > 0  # torchrun starts several processes, and only the first prints
    quiet_frameworks()
    try:
        with disk_errors(args.out), Progress(args.quiet or worker) as progress:
            result = train(options, progress.report)
    except KeyboardInterrupt:
        if (args.out / checkpoint.FOLDER).is_dir() and not worker:
            print("ssdevice: the same command goes on where this one was", file=sys.stderr)
        raise
    if worker:
        return 0
    if result is not None:
        summary = {
            "app": args.app,
            "dev_prompts": result.prompts,
            "tokens_per_step": {
                f"chain:{options.streams.gamma}": round(result.chain, 3),
                **{f"T={size}": round(beta, 3) for size, (beta, _) in result.trees.items()},
            },
            "trees": {f"T={size}": tree.to_json() for size, (_, tree) in result.trees.items()},
        }
        print(json.dumps(summary))
    else:
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _options(args: argparse.Namespace) -> TrainOptions:
    from ssdevice.train.options import Objective, SelfPrompt, TrainOptions

    own = SelfPrompt(args.self_prompt, **_given(args, "temperature", "top_p")) if args.self_prompt is not None else None
    with_defaults = _given(args, "dev_limit", "epochs", "soft_labels", "segment", "keep_gb")
    return TrainOptions(
        model=args.model, data=tuple(args.data), app=args.app, out=args.out, streams=_streams(args),
        objective=Objective(args.objective), instruction=args.instruction, dev=args.dev,
        limit=args.limit, init=args.init, freeze_lora=args.freeze_lora, steps=args.steps,
        batch_size=args.batch_size, accumulate=args.accumulate, lr=args.lr, warmup=args.warmup,
        weight_decay=args.weight_decay,
        alpha_main=args.alpha_main, alpha_stream=args.alpha_stream, by_reach=args.by_reach,
        max_length=args.max_length, precision=args.precision,
        base_precision=args.base_precision, recompute=args.gradient_checkpointing,
        draft_vocabulary=args.draft_vocabulary, self_prompt=own, answer_tokens=args.answer_tokens,
        seed=args.seed, self_distill=args.self_distill, checkpoint_seconds=args.checkpoint_seconds,
        **with_defaults,
    )  # fmt: skip


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options of these names that were given; the others have their defaults in the dataclass."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _check_effect(args: argparse.Namespace, options: TrainOptions) -> None:
    """Raise InputError for an option that would have no effect."""
    from ssdevice.train.options import Objective

    lossless, layers = options.streams.mode is Mode.LOSSLESS, options.streams.msa_layers
    writes = options.self_distill or options.self_prompt is not None
    for ignored, why, names in (
        (options.objective is Objective.NEXT_TOKEN, "next-token training has no streams", OF_STREAMS),
        (lossless, "in lossless mode main rows have no LoRA of this training", ("--lora-rank",)),
        (not lossless and layers, "streams have adapters in lossless mode", ("--adapter-rank",)),
        (not lossless or not layers, "MSA layers have adapters in lossless mode", ("--stream-mlp",)),
        (options.frozen, "main rows stay as they are", ("--alpha-main",)),
        (not options.frozen, "main rows change, so they are not kept", ("--keep-gb",)),
        (options.self_prompt is None, "it goes with --self-prompt", ("--temperature", "--top-p")),
        (options.self_prompt is not None, "there are no rows of --data", ("--limit",)),
        (not writes, "it goes with --self-distill or --self-prompt", ("--answer-tokens",)),
        (options.dev is None, "it goes with --dev", ("--dev-limit",)),
        (options.steps is not None, "--steps says how long", ("--epochs",)),
    ):
        if ignored:
            refuse_ignored(args, why, *names)


def _streams(args: argparse.Namespace) -> StreamConfig:
    """The stream options as given; the others are those of ``--init``, if it has streams, or the defaults."""
    from ssdevice.adapters.settings import AdapterFolder

    settings = AdapterFolder.open(args.init).settings if args.init is not None else None
    start = settings.streams if settings is not None else StreamConfig()
    given = {name: getattr(args, name) for name in vars(start) if getattr(args, name) is not None}
    if given.get("mode", start.mode) == Mode.LOSSLESS:
        given["lora_rank"] = 0
    if settings is None and given.get("msa_layers", start.msa_layers):
        given.setdefault("token_rank", TOKEN_RANK)
    return load_strict(StreamConfig, {**to_json(start), **given}, "stream options")
