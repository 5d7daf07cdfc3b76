"""A measurement with made-up times, and the report that Python writes of it."""

from __future__ import annotations

from dataclasses import asdict
from random import Random
from typing import Any

from ssdevice.bench.machine import Load
from ssdevice.bench.report import as_json
from ssdevice.bench.runner import Acceptance, BenchOptions, BenchResult, Measured
from ssdevice.data import Example
from ssdevice.runtime.generation import Generation
from ssdevice.runtime.loop import ADAPTIVE, SPECULATIVE
from ssdevice.tree import Tree
from tests.runtime.scripted import make_geometry

MODES = ("plain", "plain_step", SPECULATIVE, ADAPTIVE)
GAMMA = 2
K = 2
PROMPTS = 5
ROUNDS = 4


def record() -> dict[str, Any]:
    """The setting, the answers by mode, round and prompt, and the report."""
    rng = Random(0)
    geometry = make_geometry(Tree.parse("full:k=2,depth=2"), k=K, vocab=5)
    size = 12345678
    setting = {
        "bundle": "a.bundle",
        "app": "sql",
        "target": "coreml",
        "precision": "int8",
        "schedule": "tail",
        "mode": "lossless",
        "parameters": 7000000,
        "threads": 0,
        "kernels": False,
        "data": "some.jsonl",
        "app_bytes": 0,
        "model_mb": round(size / 1e6, 3),
        "versions": {},
    }
    options = BenchOptions(rounds=ROUNDS, max_tokens=40)
    acceptance = Acceptance()
    modes = {}
    answers = {}
    texts = []
    for _ in range(PROMPTS):
        texts.append([rng.randrange(5) for _ in range(rng.randint(1, 40))])
    for name in MODES:
        modes[name] = Measured(name)
        for number in range(ROUNDS):
            for at, text in enumerate(texts):
                # One answer of one mode is another one.
                tokens = text if (name, at) != ("plain_step", 2) else [4, *text[1:], 0]
                answer, drafts = _answer(rng, name, tokens)
                modes[name].add(number, answer)
                answers.setdefault(name, []).append({**asdict(answer), "drafts": drafts})
                if number == 0 and name == SPECULATIVE:
                    acceptance.add(
                        tokens,
                        list(zip([_rows(d) for d in drafts if d], answer.accepted, strict=True)),
                    )
    result = BenchResult(
        [Example("")] * PROMPTS, modes, acceptance, Load(0.0, (1, 2, 3), (1, 2, 3)), 2
    )
    report = as_json(setting, geometry, options, result, {}, {})
    given = {
        "setting": {**report, "model_bytes": size},
        "skipped": 2,
        "prompts": PROMPTS,
        "modes": [{"mode": name, "answers": answers[name]} for name in MODES],
    }
    return {"given": given, "report": report}


def _answer(rng: Random, mode: str, tokens: list[int]) -> tuple[Generation, list[list[int] | None]]:
    answer = Generation(rng.randint(1, 60), prefill_seconds=rng.random())
    drafts = list[list[int] | None]()
    answer.tokens = tokens
    while sum(answer.accepted) < len(tokens) - 1:
        stepped = mode == SPECULATIVE or (mode == ADAPTIVE and rng.random() < 0.5)
        left = len(tokens) - 1 - sum(answer.accepted)
        answer.accepted.append(min(left, rng.randint(1, 3) if stepped else 1))
        drafts.append([rng.randrange(5) for _ in range(GAMMA * K)] if stepped else None)
    answer.native_seconds = rng.random() * len(answer.accepted)
    answer.decode_seconds = answer.native_seconds * 1.1
    return answer, drafts


def _rows(draft: list[int]) -> list[list[int]]:
    return [draft[at : at + K] for at in range(0, len(draft), K)]
