"""The export side: weights by name, and a gate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ssdevice.bundle.manifest import Precision
from ssdevice.config import Schedule
from ssdevice.contract import CacheForm
from ssdevice.errors import UnsupportedModelError
from ssdevice.export.exporter import Exporter, ExportJob, TargetResult
from ssdevice.export.plan import ExportOptions
from ssdevice.export.target import ExportTarget

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "input_layernorm",
    "post_attention_layernorm",
)


class NumPyExporter(Exporter):
    """Writes ``weights.npz``."""

    bits = {Precision.FP32: 32.0}  # noqa: RUF012
    schedule = Schedule.DEFERRED

    def export(self, job: ExportJob, folder: Path) -> TargetResult:
        backbone = job.loaded.model.backbone
        streams = job.loaded.model.streams
        family = job.plan.identity.model_type
        if family != "llama" or (
            streams is not None and (len(streams.adapters) or streams.f is not None)
        ):
            raise UnsupportedModelError(
                f"{family}: the numpy target takes llamas whose streams only have identifiers"
            )
        weights = {
            "embed": backbone.embed_tokens.weight,
            "head": backbone.lm_head.weight,
            "norm": backbone.norm.weight,
        }
        weights |= {"cos": backbone.rope_cos_, "sin": backbone.rope_sin_}
        for number, layer in enumerate(backbone.layers):
            weights |= {
                f"{number}.{name.split('.')[-1]}": layer.get_submodule(name).weight
                for name in LINEARS
            }
        if streams is not None:
            weights["identifiers"] = streams.identifiers[: job.plan.geometry.gamma]
        arrays = {name: value.detach().numpy() for name, value in weights.items()}
        arrays |= {"epsilon": backbone.config.rms_norm_eps, "first_msa": job.loaded.model.first_msa}
        np.savez(folder / "weights.npz", **arrays)
        return TargetResult(
            {"weights": "weights.npz"}, CacheForm.INTERNAL, "float32", tools=("numpy",)
        )

    def gate(self, job: ExportJob, folder: Path, result: TargetResult) -> Mapping[str, float]:
        from ssdevice.export.driver import EngineDriver
        from ssdevice.export.parity.gate import FLOAT_JITTER, check
        from tests.targets.numpy_target.runtime import NumPyEngine

        engine = NumPyEngine(folder / "weights.npz", job.plan.geometry, job.plan.function_names)
        return check(job, EngineDriver(engine), FLOAT_JITTER)


class NumPyExport(ExportTarget):
    name = "numpy"
    extra = "export"

    def exporter(self, options: ExportOptions) -> Exporter:
        return NumPyExporter()


TARGET = NumPyExport()
