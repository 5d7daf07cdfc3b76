"""Tokens per step of a trained adapter: trees chosen on train rows, β reported on dev rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ssdevice.data import Example
from ssdevice.errors import InputError
from ssdevice.model import loading
from ssdevice.progress import Report
from ssdevice.ranks import count_paths, tokens_per_step
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.train import checkpoint
from ssdevice.train.batches import Sample
from ssdevice.train.distill import own_completions
from ssdevice.train.options import TrainOptions
from ssdevice.train.place import Place
from ssdevice.train.ranks import stream_ranks
from ssdevice.tree import Tree

TREE_SIZES = (5, 8, 12, 16)
TREE_WIDTH = 8


@dataclass(frozen=True)
class DevResult:
    """β on the dev rows for chain:γ and for the best trees of TREE_SIZES nodes, with the trees.

    Trees are chosen on train rows and measured on dev rows, along the model's own greedy completions.
    """

    prompts: int
    chain: float
    trees: dict[int, tuple[float, Tree]]


def dev_prompts(options: TrainOptions, examples: list[Example], tokenizer: ChatTokenizer) -> list[Sample]:
    """The dev prompts that leave half of ``max_length`` to the answer; raises InputError if there is none."""
    longest = options.max_length // 2
    prompts = [tokenizer.prompt_ids(e.prompt, instruction=options.instruction, system=e.system) for e in examples]
    fitting = [Sample(tuple(ids), len(ids)) for ids in prompts if len(ids) <= longest]
    if examples and not fitting:
        raise InputError(
            f"--dev {options.dev}: none of the {len(examples)} prompts has {longest} tokens or fewer, half of "
            f"--max-length; the shortest has {min(map(len, prompts))}"
        )
    return fitting


def evaluate(
    options: TrainOptions,
    place: Place,
    folder: Path,
    dev: list[Sample],
    train_samples: list[Sample],
    tokenizer: ChatTokenizer,
    report: Report,
) -> DevResult | None:
    """The DevResult of the saved adapter; None in processes other than the first, which only help to decode."""
    loaded = loading.load(folder, options.out, options.max_length)
    model = loaded.model.to(place.device)
    chosen = [s for s in train_samples if s.prompt <= options.max_length // 2][: 2 * options.dev_limit]

    def own(samples: list[Sample], name: str) -> list[Sample]:
        store = options.out / checkpoint.FOLDER / f"{name.replace(' ', '_')}.jsonl"
        room = [options.max_length - sample.prompt for sample in samples]
        return own_completions(place, model.backbone, samples, tokenizer.stop_ids, room, store, report, name)

    chosen, dev = own(chosen, "choose trees"), own(dev, "dev")
    if not place.main:
        return None
    with place.autocast():
        paths = count_paths(stream_ranks(model, chosen), TREE_WIDTH)
        ranks = stream_ranks(model, dev)
    trees = {size: Tree.from_counts(paths, size) for size in TREE_SIZES}
    return DevResult(
        prompts=len(dev),
        chain=tokens_per_step(ranks, Tree.chain(model.gamma)),
        trees={size: (tokens_per_step(ranks, tree), tree) for size, tree in trees.items()},
    )
