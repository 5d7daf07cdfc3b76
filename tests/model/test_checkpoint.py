"""The shipped checkpoint and adapters on real prompts: the tokens of transformers, with and without
drafting.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssdevice.adapters.settings import SETTINGS, read_settings
from ssdevice.config import Schedule
from ssdevice.data import read_examples
from ssdevice.model.loading import load, load_hf
from ssdevice.model.tokenizer import open_tokenizer
from ssdevice.tree import Tree
from tests.model.reference import Reference

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "models" / "base-7m"
ADAPTERS = sorted(path.parent.name for path in (ROOT / "models" / "adapters").glob(f"*/{SETTINGS}"))
CONTEXT = 512
PROMPTS = 4
NEW = 32

pytestmark = pytest.mark.skipif(not BASE.is_dir(), reason="the tree holds no models/base-7m")


def prompts(data: Path, app: str, instruction: str) -> list[list[int]]:
    tokenizer = open_tokenizer(BASE)
    examples = read_examples(data / app / "dev.jsonl.gz", PROMPTS)
    return [tokenizer.prompt_ids(example.prompt, instruction=instruction) for example in examples]


def test_the_base_decodes_as_transformers_does(shared_data: Path) -> None:
    stop = open_tokenizer(BASE).stop_ids
    plain = Reference(
        load(BASE, None, CONTEXT).model, Tree.root_only(), 1, Schedule.DEFERRED, CONTEXT
    )
    hf = load_hf(BASE)
    for prompt in prompts(shared_data, "sql", "Write the SQL query."):
        expected = hf.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=list(stop),
            pad_token_id=0,
        )
        assert plain.plain(prompt, NEW, stop).tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(
    "adapter",
    [pytest.param(a, marks=pytest.mark.slow if "gsm8k" in a else ()) for a in ADAPTERS]
    or [pytest.param("none", marks=pytest.mark.skip("no adapters shipped"))],
)
def test_an_adapter_drafts_what_its_model_says(
    shared_data: Path, adapter: str, schedule: Schedule
) -> None:
    folder = ROOT / "models" / "adapters" / adapter
    settings = read_settings(folder)
    app = settings.app.split("-")[0]
    if not (shared_data / app).is_dir():
        pytest.skip(f"no data for {settings.app}")
    model = load(BASE, folder, CONTEXT).model
    reference = Reference(model, Tree.chain(model.gamma), 1, schedule, CONTEXT)
    stop = open_tokenizer(BASE).stop_ids
    emitted = steps = 0
    for prompt in prompts(shared_data, app, settings.instruction):
        result = reference.speculative(prompt, NEW, stop)
        assert result.tokens == reference.plain(prompt, NEW, stop).tokens
        emitted, steps = emitted + sum(result.steps), steps + len(result.steps)
    assert emitted / steps > 1.3
