"""The training run: from a base and a fresh adapter to an adapter folder.

It can be resumed at any moment.
"""

import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ssdevice.adapters.settings import (
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    AdapterFolder,
    AdapterSettings,
    BaseIdentity,
)
from ssdevice.config import Mode
from ssdevice.data import Example, read_examples
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.model.adapter import load_streams, write_streams
from ssdevice.model.lora import merge_lora, open_lora
from ssdevice.model.step import StreamModel
from ssdevice.model.streams import Streams
from ssdevice.model.tokenizer import FILES, check_vocabulary, open_tokenizer, tokenizer_folder
from ssdevice.progress import Report
from ssdevice.runtime.notice import say_once
from ssdevice.text.chat_template import PLAIN_PROMPT
from ssdevice.text.tokenizer import ChatTokenizer, Sample
from ssdevice.train import checkpoint
from ssdevice.train.batches import BatchOrder
from ssdevice.train.evaluation import DEV_LIMIT, DevResult, dev_prompts, evaluate
from ssdevice.train.job import Job, Place
from ssdevice.train.loss import StreamingLoss
from ssdevice.train.optimization import History, optimize
from ssdevice.train.options import UNFINISHED, Objective, TrainOptions
from ssdevice.train.samples import read_samples
from ssdevice.train.start import scale_follow

ADDED = {"token_rank": "token", "follow_rank": "follow"}
"""Ranks of terms that begin as zero, so that they can be added to trained streams."""
DRAFT_VOCABULARY = 8192
"""Default number of tokens that streams choose among."""
LEAST_FACTOR = 4
"""A vocabulary smaller than this many times DRAFT_VOCABULARY is used whole: little can be saved."""


def train(options: TrainOptions, report: Report) -> DevResult | None:
    """Train one app's adapter into ``options.out``.

    The dev result is None without dev data or streams. Under ``accelerate launch`` or ``torchrun``
    every process trains on its share of each batch; only the first writes the files and returns a
    dev result.
    """
    folder = loading.resolve_folder(options.model)
    tokenizer = open_tokenizer(folder, options.init)
    if options.self_prompt is not None:
        # It raises if no user's turn can be opened: here, before weights are loaded.
        tokenizer.user_opening(options.instruction)
    dev_examples = read_examples(options.dev, limit=DEV_LIMIT) if options.dev is not None else []
    dev = dev_prompts(options, dev_examples, tokenizer)
    examples = read_examples(options.data, limit=options.limit) if options.data else []
    place = Place.find(options.precision)
    half = options.base_precision == "bf16"
    if half and not place.bf16:
        raise InputError(
            "a base in bf16 needs products in bf16, which this hardware lacks: "
            "omit --base-precision"
        )
    if place.main:
        _say_notes(tokenizer, dev_examples, dev)
    hf = loading.load_hf(folder, torch.bfloat16 if half else torch.float32)
    identity = BaseIdentity.of(folder, hf.config)
    check_vocabulary(tokenizer, identity.vocab, options.init or folder)
    init = AdapterFolder.open(options.init, identity) if options.init is not None else None
    options = _with_vocabulary(options, identity, init)
    if options.objective is Objective.STREAMING:
        options.streams.check_layers(identity.layers)
    tuned: Path | None = None  # an adapter whose LoRA the frozen main rows have
    if init is not None:
        _check_init(options, init)
        if init.has_lora and options.streams.mode is Mode.LOSSLESS:
            tuned = init.folder
            hf = merge_lora(hf, tuned)
    job = Job(options, place, folder, tokenizer, report if place.main else _silent)
    fingerprint = options.fingerprint(identity.sha256, place.world, examples)
    with checkpoint.claimed(options.out, fingerprint) if place.main else nullcontext():
        samples = read_samples(job, hf, init, examples)
        torch.manual_seed(options.seed)
        wrapped, model = _prepare(hf, options, init)
        fresh = init is None or init.settings is None
        _choose_vocabulary(job, model, fresh, samples)
        loss = StreamingLoss(model, options.weights, options.nodes).to(place.device)
        order = BatchOrder(samples, options.batch_size * place.world, options.seed)
        history = optimize(job, loss, order, fresh)
        if place.main:
            _keep_files(options, folder, tuned)
            _save(options, wrapped, model.cpu().streams, identity, len(samples), history)
    del hf, wrapped, model, loss
    place.wait()
    result = evaluate(job, dev) if dev else None
    if place.main:
        shutil.rmtree(options.out / UNFINISHED, ignore_errors=True)
    place.leave()
    return result


def _silent(stage: str, done: int, parts: int, note: str) -> None:
    """A Report that shows nothing."""


def _say_notes(tokenizer: ChatTokenizer, examples: list[Example], dev: list[Sample]) -> None:
    """Say what a user may not expect: prompts without a template, dev prompts left out."""
    if tokenizer.plain:
        say_once(f"ssdevice: {PLAIN_PROMPT}")
    left_out = len(examples) - len(dev)
    if left_out:
        say_once(
            f"ssdevice: {left_out} of {len(examples)} dev prompts exceed half of --max-length: "
            "left out"
        )


def _with_vocabulary(
    options: TrainOptions, identity: BaseIdentity, init: AdapterFolder | None
) -> TrainOptions:
    """The options with the size of the draft vocabulary: given, from ``init``, or the default."""
    size = options.draft_vocabulary
    if size is None and init is not None and init.settings is not None:
        size = init.settings.streams.draft_vocabulary
    if size is None:
        size = 0
        large = identity.vocab >= LEAST_FACTOR * DRAFT_VOCABULARY
        if large and options.objective is Objective.STREAMING:
            size = DRAFT_VOCABULARY
    if size > identity.vocab:
        raise InputError(f"--draft-vocabulary {size}: the model has {identity.vocab} tokens")
    streams = replace(options.streams, draft_vocabulary=size)
    return replace(options, draft_vocabulary=size, streams=streams)


def _check_init(options: TrainOptions, init: AdapterFolder) -> None:
    """Raise InputError for an adapter that does not have the requested streams.

    It is called before answers are generated, which takes long.
    """
    if init.has_lora and options.streams.mode is Mode.SHARED and not options.streams.lora_rank:
        raise InputError(
            f"--init {init.folder} has a LoRA to go on with: "
            "omit --lora-rank 0, or use --mode lossless"
        )
    if options.freeze_lora and not init.has_lora:
        raise InputError(f"--freeze-lora: --init {init.folder} has no LoRA")
    if init.settings is None or options.objective is Objective.NEXT_TOKEN:
        return
    wanted = vars(options.streams)
    differing = [
        f"--{name.replace('_', '-')} {value}, not {wanted[name]}"
        for name, value in vars(init.settings.streams).items()
        if value != wanted[name] and (value or name not in ADDED)
    ]
    if differing:
        raise InputError(f"--init {init.folder} was trained with {'; '.join(differing)}")


def _choose_vocabulary(job: Job, model: StreamModel, fresh: bool, samples: list[Sample]) -> None:
    """Set the tokens that streams choose among, unless they are not ``fresh`` and have them."""
    streams = model.streams
    if streams is None or not streams.config.draft_vocabulary:
        return
    if fresh:
        size = streams.config.draft_vocabulary
        ids = draft_ids(samples, job.tokenizer.stop_ids, size, streams.vocab)
        streams.draft_ids.copy_(torch.tensor(ids))
    model.take_draft_rows()
    share = covered(samples, streams.draft_ids.tolist())
    note = f"streams choose among {len(streams.draft_ids)} tokens, {share:.2%} of all completions"
    job.report("vocabulary", 1, 1, note)


def draft_ids(samples: Sequence[Sample], always: Iterable[int], size: int, vocab: int) -> list[int]:
    """``size`` ascending ids out of a vocabulary of ``vocab``.

    First those of ``always``, then the most frequent ones in completions, then those in prompts,
    then the lowest. Answers repeat words of their prompts, and low ids are frequent if tokens were
    merged by frequency.
    """
    completions = Counter[int]()
    prompts = Counter[int]()
    for sample in samples:
        completions.update(sample.ids[sample.prompt :])
        prompts.update(sample.ids[: sample.prompt])
    first = set(always)

    def place(token: int) -> tuple[bool, int, int]:
        in_prompts = 0 if completions[token] else prompts[token]
        return token not in first, -completions[token], -in_prompts

    best = sorted(range(vocab), key=place)
    return sorted(best[:size])


def covered(samples: Sequence[Sample], ids: Sequence[int]) -> float:
    """The share of the tokens of all completions that are among ``ids``."""
    known = set(ids)
    tokens = [token for sample in samples for token in sample.ids[sample.prompt :]]
    return sum(token in known for token in tokens) / max(1, len(tokens))


def _prepare(hf: Any, options: TrainOptions, init: AdapterFolder | None) -> tuple[Any, StreamModel]:
    """The PEFT model (None without a LoRA) and the StreamModel around the same layers.

    Only adapters are trained.
    """
    hf.requires_grad_(False)
    wrapped = None
    if options.streams.trains_lora:
        from peft import LoraConfig, get_peft_model

        if init is not None and init.has_lora:
            wrapped = open_lora(hf, init.folder, trainable=not options.freeze_lora)
        else:
            rank = options.streams.lora_rank
            lora = LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
            )
            wrapped = get_peft_model(hf, lora)
        hf = wrapped.base_model.model
    config = None if options.objective is Objective.NEXT_TOKEN else options.streams
    model = loading.build(hf, config, options.max_length)
    if model.streams is not None:
        _load_streams(model, model.streams, init)
    return wrapped, model.train()


def _load_streams(model: StreamModel, streams: Streams, init: AdapterFolder | None) -> None:
    """Give streams the weights of ``init``, if it has any; terms that they add begin as zero."""
    before = init.settings.streams if init is not None and init.settings is not None else None
    added = tuple(
        term
        for rank, term in ADDED.items()
        if getattr(streams.config, rank) and not getattr(before, rank, 0)
    )
    if init is not None and before is not None:
        load_streams(init.folder, streams, added)
    if "follow" in added:
        scale_follow(model)


def _save(
    options: TrainOptions,
    wrapped: Any,
    streams: Streams | None,
    identity: BaseIdentity,
    rows: int,
    history: History,
) -> None:
    """Write PEFT's files (LoRA in float16) and the streams."""
    options.out.mkdir(parents=True, exist_ok=True)
    if wrapped is not None:
        for name, p in wrapped.named_parameters():
            if "lora_" in name:
                p.data = p.data.half()
        for config in wrapped.peft_config.values():
            # PEFT notes where the base lay on this machine.
            config.base_model_name_or_path = Path(options.model).name
        # The default, "auto", asks the hub.
        wrapped.save_pretrained(str(options.out), save_embedding_layers=False)
        (options.out / "README.md").unlink(missing_ok=True)
    if streams is not None:
        training = {
            "recipe": options.recipe.value,
            "rows": rows,
            "steps": len(history),
            "batch_size": options.batch_size,
            "lr": options.lr,
            "alphas": [options.weights.main, options.weights.stream],
            "self_distill": options.self_distill or options.self_prompt is not None,
            "self_prompt": options.self_prompt or 0,
            "final_loss": _final_losses(history),
        }
        settings = AdapterSettings(
            options.app, options.streams, identity, options.instruction, training
        )
        write_streams(options.out, streams, settings)
    # The library lets only their owner read them.
    for file in options.out.glob("*.safetensors"):
        file.chmod(stat.S_IMODE(options.out.stat().st_mode) & 0o666)


def _final_losses(history: History) -> list[float]:
    """The means over the last 50 steps of the loss of main rows and of every stream."""
    tail = history[-50:]
    means = list[float]()
    _, *columns = zip(*tail, strict=True)  # the first is the number of the step
    for losses in columns:
        means.append(round(sum(losses) / len(tail), 4))
    return means


def _keep_files(options: TrainOptions, base: Path, tuned: Path | None) -> None:
    """Copy what belongs to the streams that are written next: they fit no other LoRA or tokenizer.

    ``tuned``: the adapter whose LoRA the main rows have. A tokenizer is copied if ``--init`` brings
    one.
    """
    if tuned is not None:
        _keep(tuned, (PEFT_CONFIG, PEFT_WEIGHTS), options.out)
    tokenizer = tokenizer_folder(base, options.init)
    if tokenizer != base:
        own = [name for name in FILES if (tokenizer / name).is_file()]
        _keep(tokenizer, own, options.out)


def _keep(init: Path, names: Iterable[str], out: Path) -> None:
    """Copy files of ``--init`` to the output folder."""
    out.mkdir(parents=True, exist_ok=True)
    if not out.samefile(init):
        for name in names:
            shutil.copyfile(init / name, out / name)
