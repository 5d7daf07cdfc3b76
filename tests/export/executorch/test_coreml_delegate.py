"""ExecuTorch programs with Core ML delegates: the very file, run instruction by instruction, is
plain decoding.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch")
pytest.importorskip("coremltools", reason="needs the coreml extra")

from ssdevice.bundle.folder import Bundle
from ssdevice.config import Mode, Schedule
from ssdevice.errors import BundleError, ConfigError, ParityError
from ssdevice.export.executorch.target import Delegate, ExecutorchOptions
from ssdevice.export.exporter import ExportJob, TargetResult
from ssdevice.export.mlprogram.options import CoreMLOptions, KVWrite
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.stages import export_bundle
from ssdevice.export.target import exporter
from ssdevice.mil.reader import Package
from ssdevice.model.loading import load
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.executorch.coreml_delegate import open_delegates
from ssdevice.runtime.executorch.engine import PROGRAM
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.export.executorch import programs
from tests.once import made_once

pytestmark = pytest.mark.lowering

PROMPT = [7, 21, 3, 44, 9, 30, 12]
DELEGATE = ExecutorchOptions(Delegate.COREML)
QUICK = (Quant.INT8, Mode.SHARED, Schedule.FUSED)


def options(quant: Quant, mode: Mode, schedule: Schedule, out: Path) -> ExportOptions:
    return replace(programs.options(quant, mode, schedule, out), target_options=(DELEGATE,))


@cache
def bundle(quant: Quant, mode: Mode, schedule: Schedule) -> Bundle:
    def export(out: Path) -> None:
        export_bundle(options(quant, mode, schedule, out), lambda *_: None)

    return Bundle.open(made_once(f"executorch/coreml-{quant}-{mode}-{schedule}", export))


@pytest.mark.parametrize(
    "combination",
    [
        combination if combination == QUICK else pytest.param(combination, marks=pytest.mark.slow)
        for combination in itertools.product(
            (Quant.FP16, Quant.INT8, Quant.INT4, Quant.PALETTE4),
            (Mode.SHARED, Mode.LOSSLESS),
            (Schedule.DEFERRED, Schedule.FUSED),
        )
    ],
    ids="-".join,
)
def test_speculative_output_is_plain_output(combination: tuple[Quant, Mode, Schedule]) -> None:
    made = bundle(*combination)
    engine = open_engine(made, None, EngineOptions())
    driver = OracleDriver(engine)
    facts = drive(driver, PROMPT, seed=1)
    assert made.manifest.parity["counts"] == made.geometry.tree.emitted
    assert made.manifest.parity["products"] > 100
    # Sums in the interpreter do not depend on the order of their terms, so not a bit may differ.
    check(facts, driver, 0.0, perturbation_tolerance=0.0)
    engine.close()


def test_every_method_is_one_delegate_and_writes_of_the_cache() -> None:
    made = bundle(*QUICK)
    methods, _ = open_delegates(made.file(PROGRAM))
    assert set(methods) == set(made.functions)
    for name, method in methods.items():
        assert method.function == name and len(method.writes) == 2 * made.geometry.layers


def test_methods_share_one_package_that_goes_with_its_interpreter() -> None:
    methods, interpreter = open_delegates(bundle(*QUICK).file(PROGRAM))
    assert set(interpreter.package.functions) == set(methods)
    folder = interpreter.package.path
    assert Package.open(folder).specification_version == interpreter.package.specification_version
    del interpreter, methods
    assert not folder.exists()


def test_conversations_keep_their_rows() -> None:
    engine = open_engine(bundle(*QUICK), None, EngineOptions())
    answers = []
    for tokens in ([7, 21, 3], [44, 9]):
        alone = engine.new_conversation()
        root = alone.prefill(tokens)
        alone.length = len(tokens)
        answers.append([root, alone.step_plain(root)])
    first = engine.new_conversation()
    second = engine.new_conversation()
    roots = first.prefill([7, 21, 3]), second.prefill([44, 9])
    first.length = 3
    second.length = 2
    assert [
        [roots[0], first.step_plain(roots[0])],
        [roots[1], second.step_plain(roots[1])],
    ] == answers
    engine.close()


def test_the_gate_finds_a_program_of_other_weights(tmp_path: Path) -> None:
    wanted = options(*QUICK, tmp_path / "bundle")
    target = exporter(wanted)
    plan = make_plan(wanted, target)
    job = ExportJob(
        plan,
        load(plan.folder, plan.adapter, programs.CONTEXT, plan.geometry.gamma),
        lambda *_: None,
    )
    shutil.copy(bundle(*QUICK).file(PROGRAM), tmp_path / "model.pte")
    made = TargetResult({}, bundle(*QUICK).manifest.cache, "float32")
    assert target.gate(job, tmp_path, made)["counts"] == plan.geometry.tree.emitted
    other = ExportJob(
        plan,
        load(plan.folder, plan.adapter, programs.CONTEXT, plan.geometry.gamma),
        lambda *_: None,
    )
    weight = next(
        p for name, p in other.loaded.model.named_parameters() if name.endswith("down_proj.weight")
    )
    with torch.no_grad():
        weight.copy_(weight.roll(1, 0))
    with pytest.raises(ParityError, match="down_proj"):
        target.gate(other, tmp_path, made)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            b'"functionName": "prefill"',
            b'"functionName": "step",  ',
            "not a whole ExecuTorch program",
        ),
        (
            b'"functionName": "prefill"',
            b'"functionName": "another"',
            "not a whole ExecuTorch program",
        ),
        # The folder of the package is written backwards.
        (b'"weight.bin":1'[::-1], b'"../ght.bin":1'[::-1], "a folder with an entry"),
        (b'"weight.bin":1'[::-1], b'"weight.bin":2'[::-1], "not a whole ExecuTorch program"),
        (b'"name":"Manifest.json"'[::-1], b'"name":"Manifest.json"'[::-1], ""),
        (
            b'"rootModelIdentifier"',
            b'"ROOTModelIdentifier"',
            "model.pte/model.mlpackage/Manifest.json",
        ),
        (
            b"aten::index_put_\0",
            b"aten::index_PUT_\0",
            "calls aten::index_PUT_ outside its delegates",
        ),
    ],
)
def test_a_damaged_program_is_refused(
    tmp_path: Path, before: bytes, after: bytes, said: str
) -> None:
    file = tmp_path / "model.pte"
    data = bundle(*QUICK).file(PROGRAM).read_bytes()
    assert before in data and len(before) == len(after)
    file.write_bytes(data.replace(before, after))
    if not said:
        open_delegates(file)
        return
    with pytest.raises(BundleError, match=said) as caught:
        open_delegates(file)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"target": "onnx"}, "--delegate and --logits are ExecuTorch's"),
        (
            {"target_options": (DELEGATE, CoreMLOptions(kv_write=KVWrite.MASK))},
            "--kv-write belongs to the coreml",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(options(*QUICK, tmp_path), **change)  # type: ignore[arg-type]


def test_precisions_are_those_of_core_ml(tmp_path: Path) -> None:
    wanted = options(Quant.FP32, Mode.SHARED, Schedule.FUSED, tmp_path)
    with pytest.raises(ConfigError, match="fp16, int8, int4, palette4"):
        make_plan(wanted, exporter(wanted))
