"""The training run: base and fresh adapter in, adapter folder out, resumable at any moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssdevice.config import Mode, Schedule
from ssdevice.data import read_examples
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.model.adapter import AdapterSettings, BaseIdentity, load_streams, write_streams
from ssdevice.model.lora import merge_lora, open_lora
from ssdevice.model.reference import Reference
from ssdevice.model.step import StreamModel
from ssdevice.progress import Report
from ssdevice.ranks import count_paths, tokens_per_step
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.train import checkpoint
from ssdevice.train.batches import BatchOrder, Sample, tokenize
from ssdevice.train.distill import own_completions
from ssdevice.train.loss import LossWeights, StreamingLoss
from ssdevice.train.options import Objective, TrainOptions
from ssdevice.train.ranks import stream_ranks
from ssdevice.tree import Tree

"""Called with (stage, done, total, detail)."""
TREE_SIZES = (5, 8, 12, 16)
TREE_WIDTH = 8


@dataclass(frozen=True)
class DevResult:
    """β on the dev rows for chain:γ and for the best trees of TREE_SIZES nodes, with the trees.

    Trees are chosen on train rows and measured on dev rows, along the model's own greedy completions.
    """

    prompts: int
    chain: float
    trees: dict[int, tuple[float, Tree]]


def train(options: TrainOptions, report: Report) -> DevResult | None:
    """Train one app's adapter into ``options.out``; the dev result is None without dev data or streams."""
    folder = loading.resolve_folder(options.model)
    hf = loading.load_hf(folder)
    identity = BaseIdentity.of(folder, hf.config)
    tokenizer = ChatTokenizer.open(folder)
    examples = read_examples(options.data, limit=options.limit or None)
    samples, dropped = tokenize(examples, tokenizer, options.instruction, options.max_length)
    if dropped:
        report("data", len(samples), len(examples), f"{dropped} longer than {options.max_length} tokens left out")
    stop = tuple(tokenizer.stop_ids)
    pad = stop[0]
    if options.self_distill:
        samples = _distill(options, folder, samples, stop, pad, report)

    torch.manual_seed(options.seed)
    wrapped, model = _prepare(hf, options, identity)
    loss = StreamingLoss(model, LossWeights(*options.alphas), options.segment)
    history = _optimize(loss, options, identity, BatchOrder(samples, options.batch_size, options.seed, pad), report)
    _save(options, wrapped, model, identity, len(samples), history)
    checkpoint.remove(options.out)
    if options.dev is None or options.objective is Objective.NEXT_TOKEN:
        return None
    return evaluate(options, folder, samples, tokenizer, report)


def _prepare(hf: Any, options: TrainOptions, identity: BaseIdentity) -> tuple[Any, StreamModel]:
    """The PEFT model (None in lossless mode) and the StreamModel around the same layers; only adapters learn."""
    hf.requires_grad_(False)
    wrapped = None
    init = loading.open_adapter(options.init, identity) if options.init is not None else None
    if init is not None and init.has_lora and not options.streams.lora_rank:
        raise InputError(f"--init {options.init} has a LoRA: main rows would change, which lossless mode rules out")
    if options.streams.mode is Mode.SHARED and options.streams.lora_rank:
        from peft import LoraConfig, get_peft_model

        if init is not None and init.has_lora:
            wrapped = open_lora(hf, init.folder, trainable=True)
        else:
            lora = LoraConfig(
                r=options.streams.lora_rank,
                lora_alpha=2 * options.streams.lora_rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
                base_model_name_or_path=Path(options.model).name,
            )
            wrapped = get_peft_model(hf, lora)
        hf = wrapped.base_model.model
    config = None if options.objective is Objective.NEXT_TOKEN else options.streams
    model = loading.build(hf, config, options.max_length)
    if init is not None and init.settings is not None and model.streams is not None:
        if init.settings.streams != config:
            raise InputError(f"--init {options.init}: its streams are {init.settings.streams}, asked for is {config}")
        load_streams(init.folder, model.streams)
    return wrapped, model.train()


def _optimize(
    loss: StreamingLoss, options: TrainOptions, identity: BaseIdentity, order: BatchOrder, report: Report
) -> list[list[float]]:
    """AdamW with a linear schedule from the last checkpoint to the end; the history of (step, α-sum, streams...)."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        mixed_precision="bf16" if options.precision == "bf16" else "no",
    )
    learned = {name: p for name, p in loss.named_parameters() if p.requires_grad}
    if not learned:
        raise InputError("nothing to train: the LoRA rank is 0 and there are no streams")
    steps = options.steps or max(1, int(options.epochs * order.per_epoch / options.accumulate))
    optimizer = torch.optim.AdamW(learned.values(), lr=options.lr, weight_decay=options.weight_decay)
    warmup = min(options.warmup, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / (warmup + 1), max(0.0, (steps - i) / max(1, steps - warmup)))
    )
    fingerprint = options.fingerprint(identity.sha256)
    start, history = 0, list[list[float]]()
    found = checkpoint.load(options.out, fingerprint)
    if found is not None:
        loss.load_state_dict(found.weights, strict=False)
        optimizer.load_state_dict(found.optimizer)
        scheduler.load_state_dict(found.scheduler)
        start, history = found.step, found.history
    loss_model, optimizer, scheduler = accelerator.prepare(loss, optimizer, scheduler)

    # Each process takes every n-th batch; the position in the data is the number of batches all have taken.
    rank, world = accelerator.process_index, accelerator.num_processes
    batches = order.from_position(start * options.accumulate * world)
    saved = time.monotonic()

    def save(step: int) -> None:
        if accelerator.is_main_process:
            weights = {name: p.detach().cpu() for name, p in learned.items()}
            state = (fingerprint, weights, optimizer.state_dict(), scheduler.state_dict(), history)
            checkpoint.save(options.out, checkpoint.Checkpoint(step, *state))

    step = start
    try:
        while step < steps:
            running: Tensor | None = None
            for _ in range(options.accumulate):
                group = [next(batches) for _ in range(world)]
                batch = group[rank]
                with accelerator.accumulate(loss_model):
                    with accelerator.autocast():
                        total, per_stream = loss_model(
                            *(t.to(accelerator.device) for t in (batch.tokens, batch.prompts, batch.lengths))
                        )
                    accelerator.backward(total)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(list(learned.values()), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                running = per_stream if running is None else running + per_stream
            assert running is not None
            step += 1
            losses = [round(x, 4) for x in (running / options.accumulate).tolist()]
            history.append([step, *losses])
            report("train", step, steps, " ".join(f"{x:.3f}" for x in losses))
            if time.monotonic() - saved > options.checkpoint_seconds:
                save(step)
                saved = time.monotonic()
    except KeyboardInterrupt:
        save(step)
        raise
    return history


def _distill(
    options: TrainOptions, folder: Path, samples: list[Sample], stop: tuple[int, ...], pad: int, report: Report
) -> list[Sample]:
    longest = max(len(s.ids) - s.prompt for s in samples)
    teacher = loading.load_hf(folder)
    if (
        options.init is not None
        and loading.open_adapter(options.init, BaseIdentity.of(folder, teacher.config)).has_lora
    ):
        teacher = merge_lora(teacher, options.init)
    teacher = teacher.to(torch.bfloat16 if options.precision == "bf16" else torch.float32)
    store = options.out / checkpoint.FOLDER / "completions.jsonl"
    return own_completions(
        teacher, samples, stop, pad, longest, store, lambda done, total: report("distill", done, total, "")
    )


def _save(
    options: TrainOptions, wrapped: Any, model: nn.Module, identity: BaseIdentity, rows: int, history: list[list[float]]
) -> None:
    """Write PEFT's files (LoRA in float16) and the streams (float32)."""
    options.out.mkdir(parents=True, exist_ok=True)
    if wrapped is not None:
        for name, p in wrapped.named_parameters():
            if "lora_" in name:
                p.data = p.data.half()
        wrapped.save_pretrained(str(options.out))
        (options.out / "README.md").unlink(missing_ok=True)
    streams = model.streams if isinstance(model, StreamModel) else None
    if streams is None:
        return
    tail = history[-50:]
    training = {
        "rows": rows,
        "steps": len(history),
        "batch_size": options.batch_size * options.accumulate,
        "lr": options.lr,
        "alphas": list(options.alphas),
        "self_distill": options.self_distill,
        "final_loss": [round(sum(h[i] for h in tail) / len(tail), 4) for i in range(1, len(tail[0]))],
    }
    write_streams(
        options.out, streams, AdapterSettings(options.app, options.streams, identity, options.instruction, training)
    )


def evaluate(
    options: TrainOptions, folder: Path, train_samples: list[Sample], tokenizer: ChatTokenizer, report: Report
) -> DevResult:
    """Tokens per step of the saved adapter: trees chosen on train rows, β reported on dev rows."""
    assert options.dev is not None
    loaded = loading.load(folder, options.out, options.max_length)
    dev_examples = read_examples(options.dev, limit=options.dev_limit)
    dev, _ = tokenize(dev_examples, tokenizer, options.instruction, options.max_length // 2)
    chosen = [s for s in train_samples if s.prompt <= options.max_length // 2][: 2 * options.dev_limit]
    stop = tuple(tokenizer.stop_ids)
    reference = Reference(loaded.model, Tree.root_only(), 1, Schedule.DEFERRED, options.max_length)

    def own(samples: list[Sample], name: str) -> list[list[list[int]]]:
        continued = []
        for i, sample in enumerate(samples):
            prompt = sample.ids[: sample.prompt]
            room = options.max_length - len(prompt)
            continued.append(replace(sample, ids=(*prompt, *reference.plain(prompt, room, stop).tokens)))
            report(name, i + 1, len(samples), "")
        return stream_ranks(loaded.model, continued)

    paths = count_paths(own(chosen, "choose trees"), TREE_WIDTH)
    ranks = own(dev, "dev")
    trees = {size: Tree.from_counts(paths, size) for size in TREE_SIZES}
    return DevResult(
        prompts=len(dev),
        chain=tokens_per_step(ranks, Tree.chain(loaded.model.gamma)),
        trees={size: (tokens_per_step(ranks, tree), tree) for size, tree in trees.items()},
    )
