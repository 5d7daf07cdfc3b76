"""The model's own greedy completions as training targets: in lossless mode streams must guess what *it* says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ssdevice.train.batches import Sample


def own_completions(
    hf: Any,
    samples: Sequence[Sample],
    stop: Sequence[int],
    pad: int,
    max_new: int,
    store: Path,
    progress: Callable[[int, int], None],
    batch: int = 128,
) -> list[Sample]:
    """Samples with their completions replaced by greedy ones of at most ``max_new`` tokens.

    ``store``: JSON Lines of what was generated so far, in order; an interrupted run goes on from there. Prompts are
    batched by length, padded on the left.
    """
    order = sorted(range(len(samples)), key=lambda i: samples[i].prompt)
    done = _read(store)
    store.parent.mkdir(parents=True, exist_ok=True)
    with store.open("a", encoding="utf-8") as out:
        for start in range(len(done), len(order), batch):
            group = [samples[i].ids[: samples[i].prompt] for i in order[start : start + batch]]
            completions = _generate(hf, group, stop, pad, max_new)
            out.write("".join(json.dumps(c) + "\n" for c in completions))
            out.flush()
            done += completions
            progress(len(done), len(order))
    result: list[Sample] = list(samples)
    for i, completion in zip(order, done, strict=False):
        prompt = samples[i].ids[: samples[i].prompt]
        result[i] = Sample((*prompt, *completion), len(prompt))
    return result


@torch.no_grad()
def _generate(
    hf: Any, prompts: Sequence[Sequence[int]], stop: Sequence[int], pad: int, max_new: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), pad, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
    seen = torch.arange(width) >= width - torch.tensor([len(p) for p in prompts])[:, None]
    out = hf.generate(
        tokens,
        attention_mask=seen.long(),
        max_new_tokens=max_new,
        do_sample=False,
        eos_token_id=list(stop),
        pad_token_id=pad,
    )
    completions = []
    for row in out[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
        completions.append(row[:end])
    return completions


def _read(store: Path) -> list[list[int]]:
    """What a former run finished; a line cut by a kill is dropped."""
    if not store.is_file():
        return []
    text = store.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        store.write_text(whole, "utf-8")
    return [json.loads(line) for line in whole.splitlines()]
