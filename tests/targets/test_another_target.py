"""What CONTRIBUTING says of a new target, followed: a package of two modules is a target of every
command.

``tests/targets/numpy_target`` is that package. Nothing of the product names it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssdevice import targets
from ssdevice.bundle.folder import Bundle
from ssdevice.cli import main
from ssdevice.errors import BundleError, ConfigError
from ssdevice.runtime.engine import EngineOptions, open_engine
from tests.conformance.engine_driver import OracleDriver
from tests.conformance.oracle import check, drive
from tests.export.models import write_adapter, write_base

ENTRY_POINT = "[ssdevice.targets]\nnumpy = tests.targets.numpy_target\n"
PROMPT = [7, 21, 3, 44, 9, 30, 12]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The toy as pip would have installed it: its metadata lies on the path."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "numpy_target-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy-target\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setattr(targets, "_registered", dict(targets._registered))
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def bundle(installed: None, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("toy")
    adapter = write_adapter(folder / "adapter", base)
    out = folder / "bundle"
    asked = [
        "--adapter",
        f"sql={adapter}",
        "--target",
        "numpy",
        "--quant",
        "fp32",
        "--tree",
        "full:k=2,depth=2",
    ]
    assert (
        main(
            [
                "export",
                "--model",
                str(base),
                *asked,
                "--context",
                "48",
                "--chunk",
                "8",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    return Bundle.open(out)


def test_the_gate_was_passed_at_every_count(bundle: Bundle) -> None:
    assert (
        bundle.manifest.target == "numpy"
        and bundle.manifest.parity["counts"] == bundle.geometry.tree.emitted
    )


def test_speculative_output_is_plain_output(bundle: Bundle) -> None:
    driver = OracleDriver(open_engine(bundle, None, EngineOptions()))
    check(drive(driver, PROMPT, seed=1), driver, 1e-4)


def test_commands_know_it(bundle: Bundle, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for how in ([], ["--no-speculate"]):
        assert (
            main(
                [
                    "run",
                    str(bundle.folder),
                    "--prompt",
                    "a b c",
                    "--max-tokens",
                    "12",
                    "--json",
                    *how,
                ]
            )
            == 0
        )
        answers.append(json.loads(capsys.readouterr().out)["tokens"])
    assert answers[0] == answers[1] and len(answers[0]) > 1
    adapter = str(bundle.folder.parent / "adapter")
    compared = ["--model", str(base), "--adapter", adapter, "--max-tokens", "10"]
    assert main(["verify", str(bundle.folder), *compared]) == 0
    assert "torch reference" in capsys.readouterr().out
    assert main(["inspect", str(bundle.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "numpy"


def test_options_that_it_does_not_heed_are_told_once(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert (
            main(
                [
                    "run",
                    str(bundle.folder),
                    "--prompt",
                    "a",
                    "--max-tokens",
                    "2",
                    "--quiet",
                    "--no-spinning",
                ]
            )
            == 0
        )
    assert (
        capsys.readouterr().err == "ssdevice: the option spinning has no effect on numpy bundles\n"
    )


def test_it_takes_no_apps_unless_it_says_how(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bundle", "add-app", str(bundle.folder), "other=nowhere"]) == 2
    assert "numpy bundle, which takes no more apps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--quant", "int8"], "target numpy has no int8 form; it offers fp32"),
        (
            ["--quant", "fp32", "--kv-write", "mask"],
            "--deployment-target are Core ML's, not numpy's",
        ),
        (
            ["--quant", "fp32", "--delegate", "coreml"],
            "--delegate and --logits are ExecuTorch's, not numpy's",
        ),
        (["--quant", "fp32", "--slots"], "--slots: one merged adapter per numpy bundle"),
    ],
)
def test_options_of_other_targets_are_refused(
    installed: None,
    base: Path,
    tmp_path: Path,
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = [
        "export",
        "--model",
        str(base),
        "--target",
        "numpy",
        "--out",
        str(tmp_path / "out"),
        *options,
    ]
    assert main(asked) == 2
    assert said in capsys.readouterr().err


def test_a_bundle_of_a_target_that_is_not_installed_is_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        targets, "_registered", {name: targets.find(name) for name in targets.BUILT_IN}
    )
    monkeypatch.setattr(targets, "_read_entry_points", lambda: None)
    with pytest.raises(BundleError, match="'numpy' is not one of onnx, coreml, executorch"):
        Bundle.open(bundle.folder)


def test_a_name_is_one_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_registered", dict(targets._registered))
    targets.register("toy", "toy.export", "toy.runtime")
    targets.register("toy", "toy.export", "toy.runtime")
    with pytest.raises(ConfigError, match="target 'onnx' is registered twice"):
        targets.register("onnx", "toy.export", "toy.runtime")


@pytest.mark.parametrize(
    "content", ["raise RuntimeError('out of order')", "import missing_package", "TARGETS = 1"]
)
def test_a_target_that_cannot_be_loaded_is_named_in_one_line(
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_target.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_target", raising=False)
    monkeypatch.setattr(targets, "_registered", dict(targets._registered))
    targets.register("broken", "broken_target", "broken_target")
    assert main(["export", "--help"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("ssdevice: error: broken_target cannot be loaded (")
        and said.count("\n") == 1
    )
