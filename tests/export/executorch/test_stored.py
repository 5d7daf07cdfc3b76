"""What a program's delegates multiply with is read from its file: a wrong weight is found, whatever
its size.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch

pytest.importorskip("executorch")

from ssdevice.config import Mode, Schedule
from ssdevice.contract import PREFILL, CacheForm
from ssdevice.errors import ParityError
from ssdevice.export.executorch.exporter import PROGRAM_FILE
from ssdevice.export.executorch.lowering import constants_of, lower, partitioner, trace
from ssdevice.export.executorch.quantization import quantized
from ssdevice.export.executorch.speed import quick
from ssdevice.export.executorch.stored import check_stored
from ssdevice.export.parity.traced import Recorder
from ssdevice.export.plan import Quant
from ssdevice.model.step import StreamModel
from ssdevice.runtime.executorch.engine import CACHE_DTYPE
from tests.export.executorch import programs


def scale_off(model: StreamModel) -> None:
    layer(model, 0).self_attn.o_proj.weight.scale.mul_(1.02)


def one_scale_off(model: StreamModel) -> None:
    layer(model, 1).mlp.up_proj.weight.scale.view(-1)[3] *= 1.02


def one_code_off(model: StreamModel) -> None:
    layer(model, 1).mlp.down_proj.weight.qdata[5, 7] ^= 1


def transposed(model: StreamModel) -> None:
    codes = layer(model, 0).self_attn.q_proj.weight.qdata
    codes.copy_(codes.clone().T)


FAULTS: dict[Callable[[StreamModel], None], str] = {
    scale_off: "layers.0.self_attn.o_proj",
    one_scale_off: "layers.1.mlp.up_proj",
    one_code_off: "layers.1.mlp.down_proj",
    transposed: "layers.0.self_attn.q_proj",
}


def layer(model: StreamModel, number: int) -> torch.nn.Module:
    return model.backbone.layers[number]


pytestmark = pytest.mark.lowering

Program = tuple[Path, StreamModel, dict[str, list[str]]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The prefill alone, lowered as an export lowers it, its model, and the weights it multiplies
    with.

    The check reads every function in the same way.
    """
    folder = tmp_path_factory.mktemp("stored")
    job = programs.job(Quant.INT8, Mode.SHARED, Schedule.DEFERRED, folder)
    model = quantized(job.loaded.model, Quant.INT8)[0]
    right = deepcopy(model)
    file = folder / PROGRAM_FILE
    spec = job.plan.functions(CacheForm.INTERNAL, CACHE_DTYPE)[PREFILL]
    with quick():
        made = trace(PREFILL, spec, model, job.plan)
        products = {PREFILL: [name for name, *_ in Recorder(made).linears]}
        lower(
            {PREFILL: made},
            partitioner(),
            constants_of(job.plan.geometry, ()),
            file,
            lambda *_: None,
        )
    return file, right, products


def test_graphs_that_were_compared_are_not_remembered(program: Program) -> None:
    from executorch.exir.backend import utils

    assert utils.is_same_node.cache_info().currsize == 0


def test_the_weights_of_a_right_program_are_the_models(program: Program) -> None:
    check_stored(*program)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_weight_is_refused_with_its_name(
    program: Program, fault: Callable[[StreamModel], None]
) -> None:
    file, model, products = program
    model = deepcopy(model)
    with torch.no_grad():
        fault(model)
        with pytest.raises(ParityError, match=FAULTS[fault]):
            check_stored(file, model, products)
