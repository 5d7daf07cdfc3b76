"""What a change touches: CONTRIBUTING.md names every file, and a family is one entry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ssdevice.config import Schedule
from ssdevice.errors import UnsupportedModelError
from ssdevice.model.families import FAMILIES, Family
from ssdevice.model.loading import build, load_hf
from ssdevice.tree import Tree
from tests.conformance.oracle import check, drive
from tests.documents import ROOT
from tests.model.torch_driver import TorchDriver

SOURCES = {".py", ".cpp", ".h", ".js", ".json", ".swift"}
WRITTEN = "manifest.schema.json"
"""A file that is written from the code."""
EXAMPLES = {
    "a family": r"cohere2",
    "a target": r"coreai",
    "a precision": r"(?i:palette4)",
    "a sampler option": r"min_p",
    "a host": r"cpp_host|ios_demo",
}
"""One that exists of each kind: the files that name it are those that adding it touched."""
PROMPT = [7, 21, 3, 44, 9, 30, 12]
CONTEXT = 40
ROWS = 2e-5
"""See ``tests.model.test_families``."""
OWN_FOLDERS = {
    "a target": ("ssdevice/export/coreai/", "ssdevice/runtime/coreai/"),
    "a host": ("apps/cpp_host/", "apps/ios_demo/"),
}
"""The folders that are the thing itself."""


def rows() -> dict[str, str]:
    """What is added -> the row of CONTRIBUTING.md that says what it touches."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [table] = re.findall(r"^\| to add \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    found = {}
    for row in table.splitlines():
        _, kind, *_ = (cell.strip() for cell in row.split("|"))
        found[kind] = row
    return found


def naming(pattern: str) -> Iterator[str]:
    """The files of the product that name something."""
    word = re.compile(rf"\b(?:{pattern})\b")
    for folder in ("ssdevice", "apps"):
        for file in sorted((ROOT / folder).rglob("*")):
            path = file.relative_to(ROOT).as_posix()
            built = {".build", "node_modules", "__pycache__"} & set(file.parts)
            if file.suffix not in SOURCES or file.name == WRITTEN or built:
                continue
            if word.search(file.read_text("utf-8")):
                yield path


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_table_names_every_file_that_an_addition_touches(kind: str) -> None:
    listed = re.findall(r"`([\w.]+/[\w./]+)`", rows()[kind])
    assert all((ROOT / path).exists() for path in listed)
    listed += OWN_FOLDERS.get(kind, ())
    for path in naming(EXAMPLES[kind]):
        assert path.startswith(tuple(listed)), f"{path} is not in the row of {kind}"


class NewcomerConfig(LlamaConfig):
    model_type = "newcomer"


class Newcomer(LlamaForCausalLM):
    config_class = NewcomerConfig


def test_a_family_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that only this test knows is refused; with an entry its steps decode as it does."""
    AutoConfig.register("newcomer", NewcomerConfig, exist_ok=True)
    AutoModelForCausalLM.register(NewcomerConfig, Newcomer, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 60}
    layout = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    Newcomer(NewcomerConfig(**sizes, **layout, max_position_embeddings=64)).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModelError, match="model family 'newcomer' is not supported"):
        load_hf(tmp_path)

    monkeypatch.setitem(FAMILIES, "newcomer", Family())
    hf = load_hf(tmp_path)
    more = CONTEXT - len(PROMPT)
    answered = hf.generate(
        torch.tensor([PROMPT]), max_new_tokens=more, do_sample=False, eos_token_id=None
    )
    model = build(hf, None, CONTEXT, gamma=2).eval()
    driver = TorchDriver(model, Tree.of([(0,), (1,), (0, 0)]), 2, Schedule.DEFERRED, CONTEXT, 5)
    facts = drive(driver, PROMPT)
    check(facts, driver, ROWS * facts.row_size)
    assert facts.plain[:more] == answered[0, len(PROMPT) :].tolist()
