"""Bundles of one model that differ only in the tree of a step, so that each method has its own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ssdevice import cli
from ssdevice.bundle.folder import Bundle
from ssdevice.export.plan import ExportOptions, Quant, make_plan
from ssdevice.export.stages import export_plan
from ssdevice.export.target import exporter
from ssdevice.tree import Tree

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export(
    model: str, adapter: Path | None, quant: str, context: int, tree: Tree, out: Path
) -> Bundle:
    """An ONNX bundle with that tree, whose drafts the host writes, and with functions for a host that chooses.

    ``adapter``: a PEFT folder whose LoRA is merged; its streams are left out. ``ssdevice export`` refuses such trees,
    because its own drafts without streams, which repeat the text, are chains. The parity gate is left out: methods.py
    compares every answer.
    """
    with TemporaryDirectory() as folder:
        copied = (
            [shutil.copy(adapter / name, folder) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
            if adapter
            else ()
        )
        options = ExportOptions(
            model, target="onnx", quant=Quant(quant), out=out, tree=Tree.chain(1), context=context, choose=True,
            cross_check=False, adapters=(("lora", Path(folder)),) if copied else (),
        )  # fmt: skip
        target = exporter(options)
        target.gate = lambda job, folder, result: {}  # type: ignore[method-assign]
        plan = make_plan(options, target)
        geometry = replace(plan.geometry, tree=tree, gamma=tree.depth, k=tree.width)
        return export_plan(replace(plan, geometry=geometry), target, lambda *_: None)


def export_streams(
    model: str, adapter: str, quant: str, context: int, tree: str, out: Path, *more: str
) -> None:
    """The bundle of ``ssdevice export`` with the streams of ``adapter``, NAME=DIR; raises SystemExit if it fails."""
    words = [
        "--model",
        model,
        "--adapter",
        adapter,
        "--target",
        "onnx",
        "--quant",
        quant,
        "--tree",
        tree,
    ]
    if cli.main(["export", *words, "--context", str(context), "--out", str(out), *more]):
        raise SystemExit(f"{adapter}: the export failed")
