"""Training without data: the model also writes the user's turns.

Given its chat template up to the point where the user's text begins, an instruct model continues with a typical prompt.
Its greedy answers to such prompts are what its streams learn to predict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from ssdevice.errors import ConfigError, InputError
from ssdevice.model.backbone import Backbone
from ssdevice.text.stream import special_ids
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.train.batches import Sample
from ssdevice.train.decoding import Decoding, sampling
from ssdevice.train.distill import written
from ssdevice.train.job import Job
from ssdevice.train.options import SelfPrompt

FILE = "self_prompts.jsonl"
PROMPT_TOKENS = 160
"""Longer user turns are dropped: they rarely end at all."""
ATTEMPTS = 4
"""Attempts per prompt before the model is considered unable to write prompts."""
LEAST_WORDS = 3
LEAST_VARIETY = 0.4
"""Smallest share of distinct words; a text below it repeats itself."""


def self_prompts(job: Job, backbone: Backbone, wanted: SelfPrompt) -> list[str]:
    """``wanted.prompts`` distinct prompts, each sampled as a user's turn (after the app's instruction, if it has one).

    They depend only on the options and the seed. Raises ConfigError for a chat template that does not end a user's
    turn with a special token, InputError if the model repeats itself or never ends its turns.
    """
    tokenizer = job.tokenizer
    opening, end = tokenizer.user_opening(job.options.instruction)
    choose = sampling(job.options.seed, wanted.temperature, wanted.top_p)
    special = special_ids(tokenizer.tokenizer) - {end}

    def write(keys: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        stop = {end, *tokenizer.stop_ids}
        yield from Decoding(backbone, [opening] * len(keys), stop, [PROMPT_TOKENS] * len(keys), choose, names=keys)

    attempts = 0
    while True:
        found = written(job, range(attempts), write, "prompts") if attempts else {}
        whole = [ids for ids in map(found.__getitem__, range(attempts)) if ids[-1] == end and not special & set(ids)]
        prompts = distinct(tokenizer.decode(ids[:-1]) for ids in whole)
        if len(prompts) >= wanted.prompts:
            return prompts[: wanted.prompts]
        if attempts >= ATTEMPTS * wanted.prompts + 64:
            raise InputError(
                f"of {attempts} prompts that the model wrote, {len(prompts)} are distinct and complete: ask for fewer "
                "with --self-prompt, raise --temperature, or give --data with --self-distill"
            )
        # The size of a round is fixed, so that a resumed run makes the same attempts.
        attempts += wanted.prompts - len(prompts) + 16


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


def check_template(tokenizer: ChatTokenizer, instruction: str) -> None:
    """Raise ConfigError, before weights are loaded, for a model that cannot write its own prompts."""
    try:
        tokenizer.user_opening(instruction)
    except ConfigError as error:
        raise ConfigError(f"--self-prompt: {error}; give --data with --self-distill instead") from error
