"""golden.json: the integers that a correct host gets step by step, in whatever language it is
written.

Each case is a conversation of one app: prefill calls, then steps with their drafts, which are
forced so that steps end at different depths, as in the parity gate. The numbers come from the saved
package, run in float16 by the interpreter. A device may differ if two tokens are nearly as likely.
``margin`` tells when: it is the smallest distance between the two largest logits of any row that
decided a token of the step, in the float32 reference with the package's weights. ``texts`` are for
the host's tokenizer: texts with their ids; special tokens are parsed.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    ROOT,
    TOKENS,
    VALID,
    Geometry,
)
from ssdevice.export.driver import EngineDriver
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity.reference import Drafts, TorchDriver, force_drafts
from ssdevice.export.plan import ExportPlan
from ssdevice.text.messages import Chat

SCHEMA_VERSION = 1
CASES = 2
TEXTS = (
    "List the names of all customers.",
    "SELECT name FROM table_12 WHERE price >= 3.50 AND city = 'Zürich'",
    "  two  spaces, a\ttab\nand a line; it's don't we'll",
    "日本語 и кириллица 🙂",
)
MAX_STEPS = 6


def cases(job: ExportJob, driver: EngineDriver) -> list[dict[str, Any]]:
    """The cases of a job's only app; its model has the package's weights."""
    (app,) = job.plan.apps
    reference = TorchDriver(job)
    return [
        {"app": app.name, **_case(driver, reference, job.plan.geometry, seed)}
        for seed in range(CASES)
    ]


def write_golden(plan: ExportPlan, every: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write the cases of all apps, and texts with their tokens."""
    tokenizer = plan.tokenizer
    prompts = [tokenizer.chat_text(Chat().asked(TEXTS[0]), app.instruction) for app in plan.apps]
    texts = [
        {"text": text, "ids": tokenizer.encode(text)} for text in (*TEXTS, *dict.fromkeys(prompts))
    ]
    golden = {"schema_version": SCHEMA_VERSION, "texts": texts, "cases": every}
    file.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _case(driver: EngineDriver, reference: TorchDriver, g: Geometry, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    depth = g.tree.depth
    size = max(1, min(g.chunk + 1 if seed else 5, g.context - MAX_STEPS * (depth + 1) - 1))
    prompt = [int(i) for i in draw.integers(min(3, g.vocab - 1), g.vocab, size)]
    prefills: list[dict[str, Any]] = []
    length = 0
    root = 0
    drafts: Drafts = []
    for at in range(0, size, g.chunk):
        chunk = prompt[at : at + g.chunk]
        root, drafts = driver.prefill(chunk, at)
        reference.prefill(chunk, at)
        prefills.append(
            {CHUNK: chunk, VALID: len(chunk), LENGTH: at, NEXT_ROOT: root, NEXT_DRAFTS: drafts}
        )
        length = at + len(chunk)
    case: dict[str, Any] = {"prompt": prompt, "prefill": prefills}
    truth = [root]
    for i in range(min(depth + 1 + sum(_ends(depth)), g.context - length)):
        truth.append(driver.plain(truth[-1], length + i))
    case["plain"] = truth
    if not g.gamma:
        return case
    # they overwrite the rows of plain decoding, which are masked
    steps = []
    done = 0
    for number in range(MAX_STEPS):
        # The first step uses the package's own drafts, the others end at depth 0, 1, 2, ..
        if number:
            node = g.tree.depths.index(
                min(_ends(depth)[number - 1] - 1, max(0, len(truth) - done - 2))
            )
            drafts = force_drafts(g, node, truth[done + 1 :], draw)
        if done >= len(truth):
            break
        given = {ROOT: truth[done], DRAFTS: drafts, LENGTH: length + done}
        out = driver.step(truth[done], drafts, length + done)
        made = {TOKENS: out.tokens, COUNT: len(out.tokens), NEXT_DRAFTS: out.drafts}
        steps.append(
            {**given, **made, "margin": _margin(reference, truth[done], drafts, length + done)}
        )
        if out.tokens != truth[done + 1 : done + 1 + len(out.tokens)]:
            break
        done += len(out.tokens)
        drafts = out.drafts
    case["steps"] = steps
    return case


def _ends(depth: int) -> list[int]:
    """The numbers of tokens that the steps after the first one should emit."""
    return [number % (depth + 1) + 1 for number in range(MAX_STEPS - 1)]


def _margin(reference: TorchDriver, root: int, drafts: list[list[int]], length: int) -> float:
    """The smallest top-2 distance of the rows that decided the step's tokens.

    The reference takes the step too.
    """
    out = reference.step(root, drafts, length)
    best = np.sort(reference.main if len(out.tokens) > 1 else reference.main[:1], axis=-1)
    return round(float((best[:, -1] - best[:, -2]).min()), 4)
