"""The samples of a training run: rows of the data, or what the model writes itself.

Without data the model also writes the user's turns. Given its chat template up to the point where the user's text
begins, an instruct model continues with a typical prompt. Its greedy answers to such prompts are what its streams learn
to predict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.config import Mode
from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.model.backbone import Backbone
from ssdevice.model.lora import merge_lora
from ssdevice.text.stream import special_ids
from ssdevice.text.tokenizer import Sample
from ssdevice.train.batches import tokenize
from ssdevice.train.decoding import Decoding, sampling
from ssdevice.train.distill import own_completions, written
from ssdevice.train.job import Job
from ssdevice.train.options import ANSWER_TOKENS

FILE = "self_prompts.jsonl"
TEMPERATURE, TOP_P = 0.8, 0.95  # of prompts
PROMPT_TOKENS = 160
"""Longer user turns are dropped: they rarely end at all."""
ATTEMPTS = 4
"""Attempts per prompt before the model is considered unable to write prompts."""
LEAST_WORDS = 3
LEAST_VARIETY = 0.4
"""Smallest share of distinct words; a text below it repeats itself."""


def read_samples(job: Job, hf: Any, init: AdapterFolder | None, examples: list[Example]) -> list[Sample]:
    """The samples: completions of the data or the model's own ones, to prompts of the data or the model's own ones.

    The model that answers is ``hf``, in shared mode with the LoRA of ``init`` if it has one.
    """
    options, place, tokenizer = job.options, job.place, job.tokenizer
    own = options.self_prompt
    teacher = None
    if options.self_distill or own is not None:
        lora = init.folder if init is not None and init.has_lora and options.streams.mode is Mode.SHARED else None
        answering = merge_lora(loading.load_hf(job.folder), lora) if lora is not None else hf
        teacher = loading.build(answering, None, options.max_length).backbone.to(place.device)
    if own is not None:
        assert teacher is not None
        prompts = self_prompts(job, teacher, own)
        longest = options.max_length // 2
        prompts = [p for p in prompts if len(tokenizer.prompt_ids(p, instruction=options.instruction)) <= longest]
        examples = [Example(prompt, " ") for prompt in prompts]
    samples, dropped = tokenize(examples, tokenizer, options.instruction, options.max_length)
    if dropped:
        job.report("data", len(samples), len(examples), f"{dropped} longer than {options.max_length} tokens left out")
    if len(samples) < place.world:
        raise InputError(f"{len(samples)} examples are too few for {place.world} processes")
    if teacher is None:
        return samples
    in_data = ANSWER_TOKENS if own is not None else max(len(s.ids) - s.prompt for s in samples)
    longest = options.answer_tokens or in_data
    most = [max(1, min(longest, options.max_length - sample.prompt)) for sample in samples]
    samples = own_completions(job, teacher, samples, most, "distill")
    if own is not None and place.main:
        write_rows(job, prompts, samples)
    return samples


def self_prompts(job: Job, backbone: Backbone, wanted: int) -> list[str]:
    """``wanted`` distinct prompts, each sampled as a user's turn (after the app's instruction, if it has one).

    They depend only on the options and the seed. Raises ConfigError for a chat template that does not end a user's
    turn with a special token, InputError if the model repeats itself or never ends its turns.
    """
    tokenizer = job.tokenizer
    opening, end = tokenizer.user_opening(job.options.instruction)
    choose = sampling(job.options.seed, TEMPERATURE, TOP_P)
    special = special_ids(tokenizer.tokenizer) - {end}

    def write(keys: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        stop = {end, *tokenizer.stop_ids}
        yield from Decoding(backbone, [opening] * len(keys), stop, [PROMPT_TOKENS] * len(keys), choose, names=keys)

    attempts = 0
    while True:
        found = written(job, range(attempts), write, "prompts") if attempts else {}
        whole = [ids for ids in map(found.__getitem__, range(attempts)) if ids[-1] == end and not special & set(ids)]
        prompts = distinct(tokenizer.decode(ids[:-1]) for ids in whole)
        if len(prompts) >= wanted:
            return prompts[:wanted]
        if attempts >= ATTEMPTS * wanted + 64:
            raise InputError(
                f"of {attempts} prompts that the model wrote, {len(prompts)} are distinct and complete: ask for fewer "
                "with --self-prompt, or give --data with --self-distill"
            )
        # The size of a round is fixed, so that a resumed run makes the same attempts.
        attempts += wanted - len(prompts) + 16


def distinct(texts: Iterable[str]) -> list[str]:
    """Texts that can serve as prompts, each once, ignoring spaces and case."""
    kept: dict[str, str] = {}
    for text in texts:
        text = text.strip()
        words = re.findall(r"\w+", text.casefold())
        if len(words) < LEAST_WORDS or len(set(words)) < LEAST_VARIETY * len(words) or "\ufffd" in text:
            continue
        kept.setdefault(" ".join(words), text)
    return list(kept.values())


def write_rows(job: Job, prompts: Sequence[str], samples: Sequence[Sample]) -> None:
    """Write prompts and answers to the output folder, as JSON Lines for ``--data``; empty answers are left out."""
    with (job.options.out / FILE).open("w", encoding="utf-8") as file:
        for prompt, sample in zip(prompts, samples, strict=True):
            answer = job.tokenizer.decode(sample.ids[sample.prompt :])
            if answer.strip():
                file.write(json.dumps({"prompt": prompt, "completion": answer}, ensure_ascii=False) + "\n")
