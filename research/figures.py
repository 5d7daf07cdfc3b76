"""What streams know, and what they teach: the successor's figures 5 and 6, for a trained adapter along held rows.

    python -m research.figures --model MODEL --adapter ADAPTER --data dev.jsonl.gz --out FOLDER

Stream j of node t stands for the main row of position t + j, and guesses the token after it. Before and after each MSA
layer: the cosine of the two states (figure 5), and how often the LM head's likeliest token of each is the right one.
Beside them the cosines of the row that the stream started from, of a row it does not stand for, and of both states
without their common mean. Then the norms of the gradients that the loss of the next token and of each stream give to
what is trained in each layer (figure 6), and the cosine of the first with the others, for the adapter and for a fresh
one. Writes ``figures.json`` and a plot of each.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from ssdevice.adapters.settings import AdapterFolder
from ssdevice.data import read_examples
from ssdevice.model import loading
from ssdevice.model.adapter import load_streams
from ssdevice.model.lora import open_lora
from ssdevice.model.step import StreamModel
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.train.batches import Batch, collate, tokenize
from ssdevice.train.loss import IGNORE, LossWeights, StreamingLoss, completion_rows, targets

LONGEST = 512
"""Tokens of a row; longer ones are left out."""
Levels = list[list[float]]
"""By level (0: where streams start, i: after MSA layer i), then by stream."""


@contextmanager
def recorded(model: StreamModel) -> Iterator[list[Tensor]]:
    """The states ``[B, R, D]`` that enter the first MSA layer and leave each, as they run in this context."""
    seen: list[Tensor] = []
    layers = list(model.backbone.layers)[slice(*model.drafting)]

    def left(_: object, given: object, out: Any) -> None:
        seen.append(out[0] if isinstance(out, tuple) else out)

    hooks = [layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))]
    hooks += [layer.register_forward_hook(left) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def similarities(model: StreamModel, batch: Batch) -> dict[str, Levels]:
    """Figure 5's cosine with its controls, and shares of right tokens, over the streams of all completion tokens."""
    probe = StreamingLoss(model, LossWeights(0.0, 1.0))
    nodes = completion_rows(batch.prompts, batch.lengths)
    with recorded(model) as main:
        read, _, rows = probe.run_main(batch.tokens)
    with recorded(model) as streams:
        probe.run_streams(read, nodes, batch.tokens, rows)
    wanted = probe.ahead(batch.tokens, nodes, batch.lengths)
    row, place, stream = (wanted != IGNORE).nonzero(as_tuple=True)
    node, token = nodes[row, place], wanted[row, place, stream]
    found: dict[str, Levels] = {}
    for m, s in zip(main, streams, strict=True):
        mine = s.reshape(*wanted.shape, -1)[row, place, stream]
        true = m[row, node + stream + 1]
        measured = {
            **cosines(mine, m[row, node], true),
            "right tokens": chosen(model, mine) == token,
            "right tokens of the main row": chosen(model, true) == token,
        }
        for name, values in measured.items():
            found.setdefault(name, []).append(
                [values[stream == j].float().mean().item() for j in range(model.gamma)]
            )
    return found


def cosines(mine: Tensor, origin: Tensor, true: Tensor) -> dict[str, Tensor]:
    """Those of guessed states ``[n, D]`` with the true ones, and of the rows that they were made from."""
    mean = true.mean(0)
    return {
        "cosine": cosine_similarity(mine, true, dim=-1),
        "cosine of the row it started from": cosine_similarity(origin, true, dim=-1),
        "cosine with another row": cosine_similarity(mine, true.roll(len(true) // 3, 0), dim=-1),
        "cosine without the mean": cosine_similarity(mine - mine.mean(0), true - mean, dim=-1),
        "the same of the row it started from": cosine_similarity(
            origin - origin.mean(0), true - mean, dim=-1
        ),
    }


def chosen(model: StreamModel, states: Tensor) -> Tensor:
    """The likeliest of what streams choose among, ``[n]``, for states ``[n, D]`` of any layer."""
    return torch.cat(
        [model.draft_logits(model.finish(part)).argmax(-1) for part in states.split(2048)]
    )


def trainable(folder: Path, adapter: Path, fresh: bool) -> StreamModel:
    """The model of which what training changes has gradients; ``fresh``: as training begins, of the same sizes."""
    settings = AdapterFolder.open(adapter).settings
    assert settings is not None
    if settings.streams.trains_lora:
        hf = open_lora(loading.load_hf(folder), adapter, trainable=True).base_model.model
        model = loading.build(hf, settings.streams, LONGEST)
        assert model.streams is not None
        load_streams(adapter, model.streams)
        model.take_draft_rows()
    else:
        model = loading.load(folder, adapter, LONGEST).model
    assert model.streams is not None
    own = set(model.streams.parameters())
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or p in own)
        if fresh and p.requires_grad:
            with torch.no_grad():
                if "lora_B" in name or ".up." in name:
                    p.zero_()
                elif p.ndim == 2 and "identifiers" not in name:
                    nn.init.kaiming_uniform_(p, a=5**0.5)
    return model


def gradients(model: StreamModel, batch: Batch) -> dict[str, Any]:
    """Norms by layer of the gradients of the losses of the next token and streams 1..γ, and cosines with the first.

    Norms are those of an MLP's adapters, as figure 6 has them; cosines those of a layer's or of all adapters. Only
    parameters that train have gradients; in lossless mode the next token gives none.
    """
    probe = StreamingLoss(model, LossWeights(1.0, 1.0))
    nodes = completion_rows(batch.prompts, batch.lengths)
    read, final, rows = probe.run_main(batch.tokens)
    s = probe.run_streams(read, nodes, batch.tokens, rows)
    wanted = probe.ahead(batch.tokens, nodes, batch.lengths)
    logits = model.draft_logits(model.finish(s)).reshape(*wanted.shape, -1)
    here = torch.arange(len(nodes))[:, None], nodes.clamp(min=0)
    next_token = targets(batch.tokens, nodes, batch.lengths, 1)
    losses = [
        cross_entropy(
            model.backbone.head(final[here]).flatten(0, 1),
            next_token.flatten(),
            ignore_index=IGNORE,
        )
    ]
    losses += [
        cross_entropy(logits[:, :, j].flatten(0, 1), wanted[:, :, j].flatten(), ignore_index=IGNORE)
        for j in range(model.gamma)
    ]
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [
        torch.autograd.grad(
            loss,
            list(learned.values()),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        if loss.requires_grad
        else [torch.zeros_like(p) for p in learned.values()]
        for loss in losses
    ]

    def flat(pattern: str) -> list[Tensor]:
        picked = [i for i, name in enumerate(learned) if re.search(pattern, name)]
        return [
            torch.cat([grads[i].flatten() for i in picked] or [torch.zeros(1)]) for grads in each
        ]

    def agreement(pattern: str) -> list[float]:
        first, *others = flat(pattern)
        return [cosine_similarity(first, other, dim=0).item() for other in others]

    layers = [rf"layers\.{i}\." for i in range(model.backbone.num_layers)]
    return {
        "losses": [loss.item() for loss in losses],
        "norms of MLPs": [[g.norm().item() for g in flat(layer + r".*mlp")] for layer in layers],
        "norm of all": [g.norm().item() for g in flat(r"layers\.\d")],
        "cosines": [agreement(layer) for layer in layers],
        "cosine of all": agreement(r"layers\.\d"),
    }


COLORS = "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b"


def plot(
    title: str, lines: Mapping[str, Sequence[float]], marks: Sequence[object] | None = None
) -> str:
    """An SVG of lines over 0, 1, .., or over points with other ``marks``."""
    width, height, left = 640, 320, 48
    low, high = min(0.0, *map(min, lines.values())), max(map(max, lines.values()))
    points = max(map(len, lines.values()))

    def x(i: float) -> str:
        return f"{left + i / max(1, points - 1) * (width - 240):.1f}"

    def y(value: float) -> str:
        return f"{height - 30 - (value - low) / (high - low or 1) * (height - 70):.1f}"

    parts = [f'<text x="{left}" y="18" font-size="14">{title}</text>']
    for value in (low, (low + high) / 2, high):
        parts.append(
            f'<line x1="{left}" x2="{x(points - 1)}" y1="{y(value)}" y2="{y(value)}" stroke="#ddd"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{y(value)}" text-anchor="end">{value:.2g}</text>')
    parts += [
        f'<text x="{x(i)}" y="{height - 10}">{mark}</text>'
        for i, mark in enumerate(marks or range(points))
    ]
    for number, (name, values) in enumerate(lines.items()):
        color, dash = (
            COLORS[number % len(COLORS)],
            "" if number < len(COLORS) else ' stroke-dasharray="4"',
        )
        for (i, a), (k, b) in pairwise(enumerate(values)):
            parts.append(
                f'<line x1="{x(i)}" y1="{y(a)}" x2="{x(k)}" y2="{y(b)}" stroke="{color}"{dash}/>'
            )
        parts.append(f'<text x="{width - 180}" y="{40 + 16 * number}" fill="{color}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    return f'{head} font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'


def plots(found: Mapping[str, Any]) -> dict[str, str]:
    """File names and SVGs of the numbers that ``measure`` gives."""

    def of(levels: Levels, names: str) -> dict[str, list[float]]:
        return {
            f"{names} {j + 1}": list(values) for j, values in enumerate(zip(*levels, strict=True))
        }

    similar = found["similarities"]
    right = of(similar["right tokens"], "stream")
    right["main row"] = [row[0] for row in similar["right tokens of the main row"]]
    made = {
        "cosine.svg": plot(
            "Cosine with the true row, after MSA layer", of(similar["cosine"], "stream")
        ),
        "tokens.svg": plot("Right tokens, after MSA layer", right),
    }
    for name in ("fresh", "trained"):
        norms = found["gradients"][name]["norms of MLPs"]
        lines = {
            "next token": [row[0] for row in norms],
            **of([row[1:] for row in norms], "stream"),
        }
        made[f"gradients-{name}.svg"] = plot(
            f"Norms of gradients of MLP adapters by layer, {name}", lines, range(1, len(norms) + 1)
        )
    return made


def measure(
    folder: Path, adapter: Path, data: Path, rows: int, gradient_rows: int
) -> dict[str, Any]:
    """All numbers; ``rows`` of the data for similarities, the first ``gradient_rows`` of them for gradients."""
    settings = AdapterFolder.open(adapter).settings
    assert settings is not None and settings.streams.msa_layers, "streams in MSA layers"
    tokenizer = open_tokenizer(folder, adapter)
    samples, _ = tokenize(read_examples(data, rows), tokenizer, settings.instruction, LONGEST)
    few = collate(samples[:gradient_rows], tokenizer.stop_ids[0])
    similar = similarities(
        loading.load(folder, adapter, LONGEST).model, collate(samples, tokenizer.stop_ids[0])
    )
    slopes = {
        name: gradients(trainable(folder, adapter, name == "fresh"), few)
        for name in ("fresh", "trained")
    }
    return {"rows": len(samples), "similarities": similar, "gradients": slopes}


def main(words: Sequence[str] | None = None) -> None:
    """Write the numbers and plots, and print the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--adapter", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--gradient-rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    found = measure(args.model, args.adapter, args.data, args.rows, args.gradient_rows)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, text in plots(found).items():
        (args.out / name).write_text(text)
    tables = {**found["similarities"]}
    for when, slopes in found["gradients"].items():
        tables |= {f"gradients, {when}: {name}": value for name, value in slopes.items()}
    for name, value in tables.items():
        print(name)
        for row in value if isinstance(value[0], list) else [value]:
            print("   ", *(f"{number:7.3f}" for number in row))


if __name__ == "__main__":
    main()
