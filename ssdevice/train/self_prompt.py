"""Training without data: the model also writes the user's turns.

Given its chat template up to the point where the user's text begins, an instruct model continues with a typical prompt.
Its greedy answers to such prompts are what its streams learn to predict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ssdevice.errors import ConfigError, InputError
from ssdevice.model.backbone import Backbone
from ssdevice.progress import Report
from ssdevice.text.stream import special_ids
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.train.batches import Sample
from ssdevice.train.decoding import decode, sampling
from ssdevice.train.distill import written
from ssdevice.train.options import SelfPrompt
from ssdevice.train.place import Place

FILE = "self_prompts.jsonl"
PROMPT_TOKENS = 160
"""Longer user turns are dropped: they rarely end at all."""
ATTEMPTS = 4
"""Attempts per prompt before the model is considered unable to write prompts."""
LEAST_WORDS = 3
LEAST_VARIETY = 0.4
"""Smallest share of distinct words; a text below it repeats itself."""


def self_prompts(
    place: Place,
    backbone: Backbone,
    tokenizer: ChatTokenizer,
    instruction: str,
    options: SelfPrompt,
    seed: int,
    store: Path,
    report: Report,
) -> list[str]:
    """``options.prompts`` distinct prompts, each sampled as a user's turn (after ``instruction``, if there is one).

    They depend only on the options and the seed. Raises ConfigError for a chat template that does not end a user's
    turn with a special token, InputError if the model repeats itself or never ends its turns.
    """
    opening, end = tokenizer.user_opening(instruction)
    choose = sampling(seed, options.temperature, options.top_p)
    special = special_ids(tokenizer.tokenizer) - {end}

    def write(keys: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        stop = {end, *tokenizer.stop_ids}
        return decode(backbone, [opening] * len(keys), stop, [PROMPT_TOKENS] * len(keys), choose, names=keys)

    attempts = 0
    while True:
        found = written(place, store, range(attempts), write, report, "prompts") if attempts else {}
        whole = [ids for ids in map(found.__getitem__, range(attempts)) if ids[-1] == end and not special & set(ids)]
        prompts = distinct(tokenizer.decode(ids[:-1]) for ids in whole)
        if len(prompts) >= options.prompts:
            return prompts[: options.prompts]
        if attempts >= ATTEMPTS * options.prompts + 64:
            raise InputError(
                f"of {attempts} prompts that the model wrote, {len(prompts)} are distinct and complete: ask for fewer "
                "with --self-prompt, raise --temperature, or give --data with --self-distill"
            )
        # The size of a round is fixed, so that a resumed run makes the same attempts.
        attempts += options.prompts - len(prompts) + 16


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


def write_rows(
    out: Path, prompts: Sequence[str], samples: Sequence[Sample], decoded: Callable[[Sequence[int]], str]
) -> None:
    """Write prompts and answers to the output folder, as JSON Lines for ``--data``; empty answers are left out."""
    with (out / FILE).open("w", encoding="utf-8") as file:
        for prompt, sample in zip(prompts, samples, strict=True):
            answer = decoded(sample.ids[sample.prompt :])
            if answer.strip():
                file.write(json.dumps({"prompt": prompt, "completion": answer}, ensure_ascii=False) + "\n")


def check_template(tokenizer: ChatTokenizer, instruction: str) -> None:
    """Raise ConfigError, before weights are loaded, for a model that cannot write its own prompts."""
    try:
        tokenizer.user_opening(instruction)
    except ConfigError as error:
        raise ConfigError(f"--self-prompt: {error}; give --data with --self-distill instead") from error
