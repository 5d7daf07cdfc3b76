"""An export beside what its user would run instead: transformers' tokenizer and model, and PEFT's adapter.

The parity gate compares the written files with our model in torch; this compares our model with one that ssdevice has
no part in. Otherwise a setting that we drop would be missing on both sides of the gate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.export.crosscheck.generation import check_settings
from ssdevice.export.crosscheck.logits import compare_logits
from ssdevice.export.crosscheck.prompts import compare_prompts
from ssdevice.export.crosscheck.theirs import MAPPED, expected_of
from ssdevice.export.exporter import ExportJob
from ssdevice.model.step import StreamModel
from ssdevice.model.tokenizer import tokenizer_folder
from ssdevice.text.tokenizer import ChatTokenizer

SKIPPED = "not compared with transformers (--no-cross-check): prompt ids, logits and answers may differ from its own"
"""The note in a bundle that was not compared."""
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "CREATE TABLE orders (id, city, total)\nHow many orders came from Berlin?",
    "Was heißt „Überraschung“ auf Japanisch? 日本語で 😀",
)


def check_export(job: ExportJob) -> tuple[str, ...]:
    """Compare the models of a job's apps. Returns notes; raises InputError for other prompt ids, ParityError."""
    plan = job.plan
    notes = compare_prompts(plan.tokenizer, plan.tokenizer_folder)
    # Main rows without a LoRA are the base's, which those with a LoRA need as well.
    apps = [app for app in plan.apps if app.has_lora] or plan.apps[:1]
    loras = [app.folder if app.has_lora else None for app in apps]
    scratch = plan.options.out.parent if 4 * sum(plan.parameters.values()) > MAPPED else None
    expected = expected_of(plan.folder, loras, _prompts(plan.tokenizer), plan.geometry.context, scratch)
    for app, lora, texts in zip(apps, loras, expected, strict=True):
        model = (job if app is plan.apps[0] else job.for_app(app)).loaded.model
        for text in texts:
            compare_logits(model, text, str(lora or plan.folder))
    return notes


def check_model(
    folder: Path,
    adapter: Path | None,
    tokenizer: ChatTokenizer,
    context: int,
    choose: bool,
    model: Callable[[], StreamModel],
) -> tuple[str, ...]:
    """Compare the base in ``folder`` with an adapter as an export does; returns its notes and raises its errors.

    ``choose``: the host can choose tokens. ``model``: loads ours, when that of transformers is gone from memory.
    """
    notes = (*compare_prompts(tokenizer, tokenizer_folder(folder, adapter)), *check_settings(tokenizer, folder, choose))
    lora = adapter if adapter is not None and AdapterFolder.open(adapter).has_lora else None
    (expected,) = expected_of(folder, [lora], _prompts(tokenizer), context, None)
    for text in expected:
        compare_logits(model(), text, str(lora or folder))
    return notes


def _prompts(tokenizer: ChatTokenizer) -> list[list[int]]:
    return [tokenizer.prompt_ids(prompt) for prompt in PROMPTS]
