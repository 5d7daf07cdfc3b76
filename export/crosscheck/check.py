"""An export beside what its user would run instead: transformers' tokenizer and model, and PEFT's adapter.

The parity gate compares the written files with our model in torch; this compares our model with one that ssdevice has
no part in. Otherwise a setting that we drop would be missing on both sides of the gate.
"""

from __future__ import annotations

from pathlib import Path

from ssdevice.errors import ConfigError, InputError
from ssdevice.export.crosscheck.generation import generation_config, generation_notes
from ssdevice.export.crosscheck.logits import compare_logits
from ssdevice.export.crosscheck.prompts import compare_prompts
from ssdevice.export.crosscheck.theirs import expected_of
from ssdevice.export.exporter import ExportJob
from ssdevice.text.tokenizer import ChatTokenizer

SKIPPED = "not compared with transformers (--no-cross-check): prompt ids, logits and answers may differ from its own"
"""The note in a bundle that was not compared."""
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "CREATE TABLE orders (id, city, total)\nHow many orders came from Berlin?",
    "Was heißt „Überraschung“ auf Japanisch? 日本語で 😀",
)


def check_settings(tokenizer: ChatTokenizer, folder: Path) -> tuple[str, ...]:
    """Notes on what ``generate`` would do otherwise; raises InputError for a token that ends its answers only."""
    config = generation_config(folder)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for end in ends:
        if end is not None and end not in tokenizer.stop_ids:
            raise InputError(f"{folder}: token {end} ends answers of generate(), the bundle's end at others")
    return generation_notes(config)


def prompt_ids(tokenizer: ChatTokenizer, vocab: int) -> list[list[int]]:
    """Ids of the ``PROMPTS``. Raises InputError for a tokenizer with more tokens than the model has."""
    prompts = [tokenizer.prompt_ids(prompt) for prompt in PROMPTS]
    largest = max(max(ids) for ids in prompts)
    if largest >= vocab:
        raise ConfigError(f"the tokenizer gives token {largest}, the model has {vocab}: they are not of one model")
    return prompts


def check_export(job: ExportJob, tokenizer: ChatTokenizer) -> None:
    """Compare the models of a job's apps. Raises ParityError, InputError for prompts that have other ids."""
    plan = job.plan
    compare_prompts(tokenizer, plan.folder)
    # Main rows without a LoRA are the base's, which those with a LoRA need as well.
    apps = [app for app in plan.apps if app.has_lora] or plan.apps[:1]
    prompts = prompt_ids(tokenizer, plan.geometry.vocab)
    folders = [app.folder if app.has_lora else None for app in apps]
    expected = expected_of(plan.folder, folders, prompts, plan.geometry.context, plan.options.out.parent)
    for number, (app, texts) in enumerate(zip(apps, expected, strict=True)):
        job.report("compare", number, len(apps), app.name)
        model = (job if app is plan.apps[0] else job.for_app(app)).loaded.model
        for text in texts:
            compare_logits(model, text, str(app.folder if app.has_lora else plan.folder))
