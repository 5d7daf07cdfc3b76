"""The samples of a training run: rows of the data, or what the model writes itself.

Without data the model also writes the prompts: given its chat template up to the user's text, an
instruct model continues with a typical one. Its greedy answers are what its streams learn to
predict.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.config import Mode
from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.model.backbone import Backbone
from ssdevice.model.decoding import Decoding, sampling
from ssdevice.model.lora import merge_lora
from ssdevice.text.stream import special_ids
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import tokenize
from ssdevice.train.job import Job
from ssdevice.train.options import ANSWER_TOKENS, UNFINISHED

FILE = "self_prompts.jsonl"
TEMPERATURE = 0.8
"""Of the prompts that the model writes."""
TOP_P = 0.95
"""The same."""
PROMPT_TOKENS = 160
"""Longer user turns are dropped: they rarely end at all."""
ATTEMPTS = 4
"""Attempts per prompt before the model is considered unable to write prompts."""
LEAST_WORDS = 3
LEAST_VARIETY = 0.4
"""Smallest share of distinct words; a text below it repeats itself."""
Key = TypeVar("Key", bound=int | tuple[int, ...])
"""The key of an answer: the number of an attempt, or the ids of its prompt."""


def read_samples(
    job: Job, hf: Any, init: AdapterFolder | None, examples: list[Example]
) -> list[Sample]:
    """The samples of a run: prompts and completions, each of the data or the model's own.

    The model that answers is ``hf``, in shared mode with the LoRA of ``init`` if it has one.
    """
    options = job.options
    if options.self_prompt is None and not options.self_distill:
        return _tokenized(job, examples)
    teacher = _teacher(job, hf, init)
    if options.self_prompt is None:
        samples = _tokenized(job, examples)
        longest = max(len(sample.ids) - sample.prompt for sample in samples)
        return _answered(job, teacher, samples, longest)
    half = options.max_length // 2
    prompts = list[str]()
    for prompt in self_prompts(job, teacher, options.self_prompt):
        if len(job.tokenizer.prompt_ids(prompt, instruction=options.instruction)) <= half:
            prompts.append(prompt)
    samples = _tokenized(job, [Example(prompt, " ") for prompt in prompts])
    samples = _answered(job, teacher, samples, ANSWER_TOKENS)
    if job.place.main:
        write_rows(job, prompts, samples)
    return samples


def _teacher(job: Job, hf: Any, init: AdapterFolder | None) -> Backbone:
    """The model whose answers are learned, see ``read_samples``."""
    answering = hf
    if init is not None and init.has_lora and job.options.streams.mode is Mode.SHARED:
        answering = merge_lora(loading.load_hf(job.folder), init.folder)
    model = loading.build(answering, None, job.options.max_length)
    return model.backbone.to(job.place.device)


def _tokenized(job: Job, examples: list[Example]) -> list[Sample]:
    """The examples that are short enough; raises InputError if they are too few."""
    options = job.options
    samples, dropped = tokenize(examples, job.tokenizer, options.instruction, options.max_length)
    if dropped:
        note = f"{dropped} longer than {options.max_length} tokens left out"
        job.report("data", len(samples), len(examples), note)
    if len(samples) < job.place.world:
        raise InputError(f"{len(samples)} examples are too few for {job.place.world} processes")
    return samples


def _answered(job: Job, teacher: Backbone, samples: list[Sample], longest: int) -> list[Sample]:
    """The samples with the teacher's answers, of ``longest`` tokens if no option says otherwise."""
    options = job.options
    longest = options.answer_tokens or longest
    most = [max(1, min(longest, options.max_length - sample.prompt)) for sample in samples]
    return own_completions(job, teacher, samples, most, "distill")


def self_prompts(job: Job, backbone: Backbone, wanted: int) -> list[str]:
    """``wanted`` distinct prompts, each sampled as a user's turn after the app's instruction.

    They depend only on the options and the seed.

    Raises ConfigError for a chat template that does not end a user's turn with a special token,
    InputError if the model repeats itself or never ends its turns.
    """
    tokenizer = job.tokenizer
    opening, end = tokenizer.user_opening(job.options.instruction)
    choose = sampling(job.options.seed, TEMPERATURE, TOP_P)
    special = special_ids(tokenizer.tokenizer) - {end}

    def write(keys: Sequence[int]) -> Decoding:
        stop = {end, *tokenizer.stop_ids}
        most = [PROMPT_TOKENS] * len(keys)
        return Decoding(backbone, [opening] * len(keys), stop, most, choose, names=keys)

    attempts = 0
    prompts = list[str]()
    while True:
        # The size of a round is fixed, so that a resumed run makes the same attempts.
        attempts += wanted - len(prompts) + 16
        found = written(job, range(attempts), write, "prompts")
        texts = list[str]()
        for attempt in range(attempts):
            ids = found[attempt]
            whole = ids[-1] == end and not special & set(ids)
            if whole:
                texts.append(tokenizer.decode(ids[:-1]))
        prompts = distinct(texts)
        if len(prompts) >= wanted:
            return prompts[:wanted]
        if attempts >= ATTEMPTS * wanted + 64:
            raise InputError(
                f"of {attempts} prompts that the model wrote, {len(prompts)} are distinct and "
                "complete: ask for fewer with --self-prompt, or give --data with --self-distill"
            )


def distinct(texts: Iterable[str]) -> list[str]:
    """Texts that can serve as prompts, each once, ignoring spaces and case."""
    kept: dict[str, str] = {}
    for text in texts:
        text = text.strip()
        words = re.findall(r"\w+", text.casefold())
        repeats_itself = len(set(words)) < LEAST_VARIETY * len(words)
        is_damaged = "\ufffd" in text
        if len(words) >= LEAST_WORDS and not repeats_itself and not is_damaged:
            kept.setdefault(" ".join(words), text)
    return list(kept.values())


def write_rows(job: Job, prompts: Sequence[str], samples: Sequence[Sample]) -> None:
    """Write prompts and answers to the output folder, as JSON Lines for ``--data``.

    Empty answers are left out.
    """
    with (job.options.out / FILE).open("w", encoding="utf-8") as file:
        for prompt, sample in zip(prompts, samples, strict=True):
            answer = job.tokenizer.decode(sample.ids[sample.prompt :])
            if answer.strip():
                row = {"prompt": prompt, "completion": answer}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def own_completions(
    job: Job, backbone: Backbone, samples: Sequence[Sample], most: Sequence[int], stage: str
) -> list[Sample]:
    """The samples' prompts with the model's greedy completions of at most ``most[i]`` tokens.

    A prompt that occurs twice is answered once. ``stage``: see ``written``.
    """
    prompts = [sample.ids[: sample.prompt] for sample in samples]
    room = dict(zip(prompts, most, strict=True))
    stop = set(job.tokenizer.stop_ids)

    def write(keys: Sequence[tuple[int, ...]]) -> Decoding:
        return Decoding(backbone, keys, stop, [room[ids] for ids in keys])

    found = written(job, prompts, write, stage)
    return [Sample((*prompt, *found[prompt]), len(prompt)) for prompt in prompts]


def written(
    job: Job, keys: Sequence[Key], write: Callable[[Sequence[Key]], Decoding], stage: str
) -> dict[Key, list[int]]:
    """The ids for every key: from the stores of ``stage``, or else from ``write``.

    Each process appends its share, line by line, to a store of its own, and all processes read all
    stores. The next run, with any number of processes, uses whatever a kill has left.
    """
    place = job.place
    folder = job.options.out / UNFINISHED
    done = _read(folder, stage)
    place.wait()  # nobody writes before all have read
    missing = place.share([key for key in dict.fromkeys(keys) if key not in done])
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        store = folder / f"{stage}.{place.rank}.jsonl"
        with place.autocast(), store.open("a", encoding="utf-8") as out:
            out.write("\n")  # ends a line that a kill cut short
            for count, (i, ids) in enumerate(write(missing), 1):
                out.write(_line(missing[i], ids))
                out.flush()
                job.report(stage, count, len(missing), "")
    place.wait()
    return _read(folder, stage)


def _line(key: int | tuple[int, ...], ids: list[int]) -> str:
    """A line of a store, with a checksum of what it says."""
    row: dict[str, Any] = {"of": key, "ids": ids}
    row["crc32"] = zlib.crc32(json.dumps(row).encode())
    return json.dumps(row) + "\n"


def _read(folder: Path, stage: str) -> dict[Any, list[int]]:
    """The stored ids by key, without lines that a kill cut short or a disk has changed.

    What these said is written again.
    """
    found: dict[Any, list[int]] = {}
    for store in sorted(folder.glob(f"{stage}.*.jsonl")):
        for line in store.read_bytes().splitlines(keepends=True):
            try:
                row = json.loads(line)
                key = tuple(row["of"]) if isinstance(row["of"], list) else row["of"]
                if _line(key, row["ids"]).encode() == line:
                    found[key] = row["ids"]
            except (ValueError, KeyError, TypeError):
                continue
    return found
