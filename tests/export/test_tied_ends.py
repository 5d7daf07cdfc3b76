"""A LoRA on one end of tied embeddings changes only that end, as PEFT does without merging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from ssdevice.export.plan import ExportOptions, Quant
from ssdevice.export.stages import export_bundle
from ssdevice.runtime.session import Session
from tests.export.models import write_lora

NEW = 24


def export(base: Path, end: str, out: Path, target: str, quant: Quant) -> tuple[Path, Path]:
    lora = write_lora(out / "lora", base, target_modules=[end, "q_proj"])
    options = ExportOptions(str(base), target, quant, out / "b", (("app", lora),), context=96)
    return lora, export_bundle(options, lambda *_: None).folder


@pytest.mark.parametrize("end", ["lm_head", pytest.param("embed_tokens", marks=pytest.mark.slow)])
def test_answers_are_those_of_an_adapter_that_is_not_merged(
    base: Path, end: str, tmp_path: Path
) -> None:
    lora, bundle = export(base, end, tmp_path, "onnx", Quant.FP32)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(lora)).eval()
    with Session.open(bundle) as session:
        ids = session.prompt_ids("a b c d a b c")
        given = torch.tensor([ids])
        expected = model.generate(input_ids=given, do_sample=False, max_new_tokens=NEW)[
            0, len(ids) :
        ].tolist()
        for speculate in (True, False):
            for _ in session.runs(ids, max_tokens=NEW, mode=session.mode(speculate=speculate)):
                pass
            assert session.last.tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize(
    ("target", "quant"), [("onnx", Quant.INT8), ("coreml", Quant.INT4), ("executorch", Quant.INT8)]
)
def test_every_target_stores_both_ends(
    base: Path, end: str, target: str, quant: Quant, tmp_path: Path
) -> None:
    export(base, end, tmp_path, target, quant)
