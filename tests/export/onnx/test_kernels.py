"""Kernels of our own: the same bits as NumPy for any number of rows, on any CPU, and bundles that
run without them.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from ssdevice.adapters.storage import int8_factors
from ssdevice.bundle.folder import Bundle
from ssdevice.cli import main
from ssdevice.export.onnx import fused, quantization
from ssdevice.export.onnx.editor import CONTRIB, OPSET
from ssdevice.export.onnx.functions import add_functions, attention_form
from ssdevice.export.onnx.graphs import parts_of, show_regions
from ssdevice.export.onnx.quantization import INT4, Layout, int4_layout
from ssdevice.export.plan import Quant
from ssdevice.runtime.engine import EngineOptions, open_engine
from ssdevice.runtime.loop import prefill
from ssdevice.runtime.onnx import kernels
from ssdevice.runtime.onnx.cache import LANES
from ssdevice.runtime.onnx.engine import OnnxCache, app_graphs
from ssdevice.runtime.session import Session
from tests.compiled_kernels import COMPILER, KINDS, NO_COMPILER, WARNINGS, built, compiled_objects
from tests.export.onnx import forms
from tests.export.onnx.test_export import compared_along_a_chain, export
from tests.once import made_once

pytestmark = pytest.mark.skipif(COMPILER is None, reason=NO_COMPILER)
SHAPES = [(576, 960), (1536, 48), (100, 171), (32, 521), (7, 3000)]
"""Inputs and outputs; blocks and groups of columns that are not full among them."""
ROWS = (1, 2, 3, 4, 5, 7, 8, 10, 11, 17)


@pytest.fixture(
    params=[
        kind if kind == "native" else pytest.param(kind, marks=pytest.mark.wide) for kind in KINDS
    ]
)
def library(request: pytest.FixtureRequest) -> Path:
    """The compiled kernels, of each kind in turn."""
    return built(request.param)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which engines find the kernels."""
    file = built("native")
    monkeypatch.setenv(kernels.FOLDER, str(file.parent))
    return file.parent


def session(model: bytes, library: Path | None, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def int4_linear(x: np.ndarray, layout: Layout) -> np.ndarray:
    """What int4.cpp says at its top, in NumPy: ``x [R, K]`` -> ``[R, N]``."""
    packed, scale = layout
    blocks = scale.shape[1]
    padded = np.zeros((len(x), blocks * 32), np.float32)
    padded[:, : x.shape[1]] = x
    grouped = padded.reshape(len(x), blocks, 32)
    peak = np.abs(grouped).max(axis=2)
    inverse = np.float32(127) / np.where(peak > 1e-35, peak, np.float32(np.inf))
    codes = np.rint(grouped * inverse[..., None]).astype(np.int32)
    scales = peak * np.float32(1 / 127)
    values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*scale.shape, 32)
    y = np.zeros((len(x), len(packed)), np.float32)
    for b in range(blocks):
        sums = codes[:, b] @ (values[:, b].astype(np.int32) - 8).T
        y += sums.astype(np.float32) * (scale[None, :, b] * scales[:, b, None])
    return y


@pytest.mark.parametrize("bits", ["bfloat16", "float32"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_every_row_has_numpys_bits_among_any_number_of_rows(
    library: Path,
    inputs: int,
    outputs: int,
    threads: int,
    bits: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(inputs)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    weight[0] = 0
    x = (
        rng.standard_normal((max(ROWS), inputs)) * 10 ** rng.uniform(-4, 4, (max(ROWS), 1))
    ).astype(np.float32)
    x[1], x[2], x[4] = 0, 1e-38, np.sign(x[4])
    codes, scale = int4_layout(INT4.rounds(torch.from_numpy(weight)))
    assert not (scale.view(np.uint32) & 0xFFFF).any()
    if bits == "float32":  # as in bundles of earlier versions
        scale = scale * np.float32(1.001)
        monkeypatch.setattr(quantization, "int4_layout", lambda _: (codes, scale))
    expected = int4_linear(x, (codes, scale))
    for rows in ROWS:
        model = forms.linears_model(rows, [weight], Quant.INT4)
        (found,) = session(model, library, threads).run(None, {"x": x[None, :rows]})
        np.testing.assert_array_equal(found[0], expected[:rows])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_crew_gives_two_sessions_at_once_the_bits_of_their_own_threads(threads: int) -> None:
    rng = np.random.default_rng(threads)
    weight = rng.standard_normal((3000, 100)).astype(np.float32)
    x = rng.standard_normal((1, 5, 100)).astype(np.float32)
    model = forms.linears_model(5, [weight], Quant.INT4)
    (expected,) = session(model, built("native")).run(None, {"x": x})
    with kernels.crew(built("native"), threads):
        opened = [session(model, built("native")) for _ in range(3)]

    def differing(one: ort.InferenceSession) -> int:
        count = 0
        for i in range(300):
            if i % 50 == 0:
                time.sleep(0.005)  # longer than a thread of the crew stays awake
            count += not np.array_equal(one.run(None, {"x": x})[0], expected)
        return count

    with ThreadPoolExecutor(len(opened)) as callers:
        assert list(callers.map(differing, opened)) == [0] * len(opened)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int8_rows_have_the_bits_of_integers_among_any_number_of_rows(
    library: Path, inputs: int, outputs: int, threads: int
) -> None:
    rng = np.random.default_rng(outputs)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    weight[0] = 0
    x = (
        rng.standard_normal((max(ROWS), inputs)) * 10 ** rng.uniform(-4, 4, (max(ROWS), 1))
    ).astype(np.float32)
    x[1], x[4] = 0, np.sign(x[4])
    expected = forms.int8_product(x, weight.T)
    for rows in ROWS:
        model = forms.linears_model(rows, [weight], Quant.INT8)
        assert [node.op_type for node in onnx.load_from_string(model).graph.node] == [
            kernels.INT8_LINEAR
        ]
        for file in (library, None):
            (found,) = session(model, file, threads).run(None, {"x": x[None, :rows]})
            np.testing.assert_array_equal(found[0], expected[:rows])


def test_an_embedding_and_its_tied_head_have_the_bits_of_integers(library: Path) -> None:
    rng = np.random.default_rng(3)
    table = rng.standard_normal((521, 100)).astype(np.float32)
    ids = rng.integers(0, 521, (1, 6))
    model = forms.tied_model(6, table, Quant.INT8)
    graph = onnx.load_from_string(model).graph
    assert {kernels.INT8_EMBEDDING, kernels.INT8_LINEAR} <= {node.op_type for node in graph.node}
    expected = forms.int8_product(forms.embedded(ids, table), np.ascontiguousarray(table.T))
    for file in (library, None):
        opened = session(model, file)
        np.testing.assert_array_equal(
            opened.run(None, {opened.get_inputs()[0].name: ids})[0], expected
        )
    opened = session(model, library)
    with pytest.raises(Exception, match="none of the vocabulary"):
        opened.run(None, {opened.get_inputs()[0].name: ids + 521})


def head_model(rows: int, weight: np.ndarray, kind: str) -> bytes:
    """``Int8Argmax`` or ``Int8Linear`` of ``x [1, rows, K]`` with a head ``[V, K]``."""
    values, scale = int8_factors(np.ascontiguousarray(weight.T))
    x = forms.value("x", (1, rows, weight.shape[1]))
    zero = np.full((1, rows, 1), 128, np.uint8)
    inputs = [
        x,
        *(
            forms.stored(name, array)
            for name, array in (("codes", values), ("scales", scale), ("zero", zero))
        ),
    ]
    for given, dtype in zip(
        inputs[1:], (ir.DataType.INT8, ir.DataType.FLOAT, ir.DataType.UINT8), strict=True
    ):
        given.type = ir.TensorType(dtype)
    form = {"axes": [-1], "keep": 1, "axis": 2, "block": weight.shape[1]}
    node = ir.node(kind, inputs, form, domain=kernels.DOMAIN)
    out = node.outputs[0]
    out.name = "y"
    out.type = ir.TensorType(
        ir.DataType.INT64 if kind == kernels.INT8_ARGMAX else ir.DataType.FLOAT
    )
    graph = ir.Graph(
        [x], [out], nodes=[node], initializers=inputs[1:], opset_imports={"": OPSET, CONTRIB: 1}
    )
    model = ir.Model(graph, ir_version=11)
    add_functions(model)
    content: bytes = ir.serde.serialize_model(model).SerializeToString()
    return content


def heads() -> dict[str, np.ndarray]:
    """Heads ``[V, K]``, from many tokens to such in which the lower bits of weights matter."""
    rng = np.random.default_rng(5)
    drawn = {
        shape: rng.standard_normal(shape).astype(np.float32)
        for shape in ((9001, 576), (521, 100), (40, 32))
    }
    twice = np.concatenate([drawn[521, 100]] * 3)
    levels = np.round(rng.uniform(-1, 1, (700, 64))).astype(np.float32)
    one = np.zeros((300, 192), np.float32)
    one[np.arange(300), rng.integers(0, 192, 300)] = rng.standard_normal(300)
    return {
        "large": drawn[9001, 576],
        "twice": twice,
        "small": drawn[40, 32],
        "levels": levels,
        "one weight": one,
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("head", heads())
def test_the_best_column_is_that_of_the_whole_product(
    library: Path, head: str, threads: int
) -> None:
    weight = heads()[head]
    rng = np.random.default_rng(len(weight))
    x = rng.standard_normal((max(ROWS), weight.shape[1])).astype(np.float32)
    x[:, :3] *= 30  # as in hidden states, where few channels are much larger than the others
    x[1] = 0
    x[2] = weight[7] / np.abs(weight[7]).max()
    expected = forms.int8_product(x, weight.T).argmax(-1)
    for rows in ROWS:
        model = head_model(rows, weight, kernels.INT8_ARGMAX)
        for file in (library, None):
            (found,) = session(model, file, threads).run(None, {"x": x[None, :rows]})
            np.testing.assert_array_equal(found[0, :, 0], expected[:rows])


@pytest.mark.wide
def test_a_head_of_which_the_best_column_is_wanted_is_read_by_halves_and_its_embedding_too(
    base: Path, adapter: Path, tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared_along_a_chain(base, adapter, tmp_path / "whole", "int4")
    monkeypatch.setattr(fused, "LARGE", 1)
    halves = compared_along_a_chain(base, adapter, tmp_path / "halves", "int4")
    assert whole.differences == halves.differences == [] and halves.largest_change == 0
    for name, file in app_graphs(Bundle.open(tmp_path / "halves"), None)[0].items():
        model = onnx.load(str(file), load_external_data=False)
        show_regions(model)
        kinds = {node.op_type for node in model.graph.node}
        assert {kernels.INT8_ARGMAX, kernels.TIED_EMBEDDING} <= kinds
        assert not kinds & {kernels.INT8_LINEAR, kernels.INT8_EMBEDDING, "TopK"}, name
    texts = {
        "".join(
            Session.open(tmp_path / folder, options=EngineOptions(kernels=ours)).generate(
                "a b c", max_tokens=40
            )
        )
        for folder in ("whole", "halves")
        for ours in (True, False)
    }
    assert len(texts) == 1
    assert set(parts_of(tmp_path / "halves" / "step.onnx").values()) == forms.PARTS


ARM_GCC = "aarch64-linux-gnu-g++"
ARM = ("qemu-aarch64", "-cpu", "max")
on_arm = pytest.mark.skipif(
    shutil.which(ARM_GCC) is None or shutil.which(ARM[0]) is None,
    reason=f"needs {ARM_GCC} and {ARM[0]} "
    "(Debian: apt-get install g++-aarch64-linux-gnu qemu-user)",
)
CLANG_NAMES = [f"clang++-{number}" for number in range(22, 16, -1)]
CLANG = next((name for name in CLANG_NAMES if shutil.which(name)), None)
"""One that compiles single functions for the dot product, as Android's does."""
ARM_COMPILERS = [[ARM_GCC, "-O1"], pytest.param([ARM_GCC], marks=pytest.mark.slow)]
"""As fast to compile as instructions that the sources name allow, and as users get them."""
if CLANG:
    ARM_COMPILERS.append([CLANG, "--target=aarch64-linux-gnu"])


def says(
    source: str,
    folder: Path,
    *options: str,
    compiler: Sequence[str] = (str(COMPILER),),
    under: Sequence[str] = (),
    beside: Sequence[str] = (),
) -> tuple[int, str]:
    """What a program beside this file returns and prints, ``under`` an emulator; ``beside``:
    sources of kernels.
    """
    flags = [*(flag for flag in kernels.FLAGS if flag != "-shared"), *WARNINGS, *options]
    sources = [Path(__file__).with_name(source), *(kernels.SOURCES / name for name in beside)]
    objects = compiled_objects(sources, [*compiler], flags)
    subprocess.run([*compiler, *flags, "-o", str(folder / "program"), *objects], check=True)
    done = subprocess.run([*under, str(folder / "program")], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.wide
@on_arm
@pytest.mark.parametrize("compiler", ARM_COMPILERS, ids=lambda compiler: compiler[0])
@pytest.mark.parametrize("kind", ["INT4", "INT4_WHOLE", "INT8", "ARGMAX"])
def test_products_of_arm_processors_have_the_bits_of_integers(
    kind: str, compiler: Sequence[str], tmp_path: Path
) -> None:
    """There is no ONNX Runtime to call them, so a program in products.cpp does."""
    sources = ("int4.cpp", "int4_products.cpp", "int8.cpp", "argmax.cpp")
    found = says(
        "products.cpp",
        tmp_path,
        "-static",
        f"-D{kind}",
        compiler=compiler,
        under=ARM,
        beside=sources,
    )
    count = 99 if kind == "ARGMAX" else 5973
    assert found == (0, f"0 of {count} differ\n")


LINEARS = ("half_linear.cpp", "int4.cpp", "int4_products.cpp", "int8.cpp", "low_rank.cpp")
OPERATORS = ("attention.cpp", *LINEARS, "rows.cpp")


@pytest.mark.wide
@on_arm
@pytest.mark.parametrize("compiler", ARM_COMPILERS, ids=lambda compiler: compiler[0])
def test_operators_have_the_same_bits_on_arm_processors(
    compiler: Sequence[str], tmp_path: Path
) -> None:
    here = says("bits.cpp", tmp_path, beside=OPERATORS)
    assert here == says(
        "bits.cpp", tmp_path, "-static", compiler=compiler, under=ARM, beside=OPERATORS
    )
    old = subprocess.run(
        ["qemu-aarch64", "-cpu", "cortex-a53", str(tmp_path / "program")],
        capture_output=True,
        text=True,
    )
    assert here == (old.returncode, old.stdout)
    assert len(here[1].splitlines()) == 36


@pytest.mark.wide
@pytest.mark.parametrize("options", [(), ("-DSSDEVICE_PORTABLE",)])
def test_every_float16_is_read_and_rounded_to_as_the_format_says(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    assert says("halves.cpp", tmp_path, *options) == (0, "0 differ\n")


@pytest.mark.wide
@on_arm
def test_every_float16_is_read_and_rounded_to_on_arm_as_the_format_says(tmp_path: Path) -> None:
    assert says("halves.cpp", tmp_path, "-static", compiler=[ARM_GCC], under=ARM) == (
        0,
        "0 differ\n",
    )


KV_HEADS = 3
GROUPS = 5
ANCESTORS = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
"""Of a root with two children, the second of which has one."""


def model_of(
    name: str,
    shapes: dict[str, tuple[int, ...]],
    outputs: int,
    alone: bool = False,
    **attributes: object,
) -> bytes:
    """One of our operators, with its function; ``alone``: that for a single row."""
    inputs = [forms.value(name, shape) for name, shape in shapes.items()]
    node = ir.node(name, inputs, attributes, domain=kernels.DOMAIN, num_outputs=outputs)
    for i, out in enumerate(node.outputs):
        out.name = f"y{i}"
        out.type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": OPSET, CONTRIB: 1})
    model = ir.Model(graph, ir_version=11)
    add_functions(model, alone)
    content: bytes = ir.serde.serialize_model(model).SerializeToString()
    return content


@pytest.mark.parametrize("width", [1536, 20, 3])
def test_the_gated_activation_is_that_of_standard_operators_up_to_rounding(
    library: Path, width: int
) -> None:
    x = (np.random.default_rng(width).standard_normal((1, 5, 2 * width)) * 20).astype(np.float32)
    x[0, 0, :3] = 0, -80, 200
    model = model_of(kernels.GATED_SILU, {"x": x.shape}, 1)
    ours, native, standard = (
        session(model, file).run(None, {"x": x})[0] for file in (library, built("native"), None)
    )
    np.testing.assert_array_equal(ours, native)
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    np.testing.assert_allclose(ours, gate / (1 + np.exp(-gate)) * up, rtol=1e-6)
    np.testing.assert_allclose(
        standard, ours, atol=1e-4
    )  # ONNX Runtime's sigmoid is less exact far from 0


@pytest.mark.parametrize(("inputs", "outputs"), [(1152, 256), (256, 1728), (37, 21), (3, 5)])
def test_a_product_with_a_weight_in_float16_is_that_of_float32_up_to_rounding(
    library: Path, inputs: int, outputs: int
) -> None:
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((1, 3, inputs)).astype(np.float32)
    weight = rng.standard_normal((inputs, outputs)).astype(np.float16)
    weight[0, :2] = 2**-24, 65504
    model = forms.half_linear_model(3, weight)
    ours, native, standard = (
        session(model, file, 2).run(None, {"x": x})[0] for file in (library, built("native"), None)
    )
    np.testing.assert_array_equal(ours, native)
    scale = np.abs(x).astype(np.float64) @ np.abs(weight).astype(np.float64)
    for found in (ours, standard):
        assert (
            np.abs(found - x.astype(np.float64) @ weight.astype(np.float64)) <= 1e-6 * scale
        ).all()
    (alone,) = session(forms.half_linear_model(1, weight), built("native")).run(
        None, {"x": x[:, 1:2]}
    )
    np.testing.assert_array_equal(alone[0, 0], ours[0, 1])


@pytest.mark.parametrize("width", [576, 20, 3])
def test_the_norm_of_a_sum_is_that_of_standard_operators_up_to_rounding(
    library: Path, width: int
) -> None:
    rng = np.random.default_rng(width)
    x, y = (rng.standard_normal((2, 1, 5, width)) * 10).astype(np.float32)
    x[0, 0] = y[0, 0] = 0
    feeds = {"x": x, "y": y, "weight": rng.standard_normal(width).astype(np.float32)}
    model = model_of(
        kernels.ADD_NORM, {name: value.shape for name, value in feeds.items()}, 2, epsilon=1e-5
    )
    ours, native, standard = (
        session(model, file).run(None, feeds) for file in (library, built("native"), None)
    )
    total = (x + y).astype(np.float64)
    expected = total / np.sqrt(np.square(total).mean(-1, keepdims=True) + 1e-5) * feeds["weight"]
    for mine, other in zip(ours, native, strict=True):
        np.testing.assert_array_equal(mine, other)
    np.testing.assert_array_equal(ours[1], x + y)
    np.testing.assert_allclose(ours[0], expected, rtol=1e-6, atol=1e-6)
    for mine, other in zip(ours, standard, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rotated", [64, 32])
@pytest.mark.parametrize("rows", [1, 5])
def test_queries_and_keys_are_rotated_and_values_are_not(
    library: Path, rows: int, rotated: int
) -> None:
    rng = np.random.default_rng(rows)
    heads = KV_HEADS * GROUPS
    dim = 64
    x = rng.standard_normal((1, rows, heads + 2 * KV_HEADS, dim)).astype(np.float32)
    angle = rng.uniform(0, 6, (1, rows, rotated // 2))
    cos = np.cos(angle).astype(np.float32)
    sin = np.sin(angle).astype(np.float32)
    a = x[..., : rotated // 2]
    b = x[..., rotated // 2 : rotated]
    c = cos[:, :, None]
    s = sin[:, :, None]
    turned = np.concatenate([a * c - b * s, b * c + a * s, x[..., rotated:]], -1)
    expected = [
        turned[:, :, :heads],
        turned[:, :, heads : heads + KV_HEADS],
        x[:, :, heads + KV_HEADS :],
    ]
    flat = [part.reshape(1, rows, -1) for part in expected]
    feeds = {"x": x.reshape(1, rows, -1), "cos": cos, "sin": sin}
    settings = {
        "heads": heads,
        "kv_heads": KV_HEADS,
        "rotary_dim": rotated,
        "widths": [part.shape[-1] for part in flat],
    }
    model = model_of(
        kernels.ROTARY_SPLIT, {name: value.shape for name, value in feeds.items()}, 3, **settings
    )
    for ours, exact in zip(session(model, library).run(None, feeds), flat, strict=True):
        np.testing.assert_array_equal(ours, exact)
    for standard, exact in zip(session(model, None).run(None, feeds), flat, strict=True):
        np.testing.assert_allclose(standard, exact, atol=2e-6)


CACHES = {kernels.TREE_ATTENTION: np.float32, kernels.HALF_TREE_ATTENTION: np.float16}
"""The operators of attention, and the type of their caches."""


def attention_model(
    kind: str, rows: int, past: int, dim: int, more: int = 0, groups: int = GROUPS
) -> bytes:
    """An operator of attention as the exporter writes it, with its function; ``more``: new rows in
    the second run.
    """
    width = KV_HEADS * dim
    shapes = {
        "q": (1, rows, groups * width),
        "past_keys": (past, width),
        "keys": (rows - more, width),
        "more_keys": (more, width),
        "past_values": (past, width),
        "values": (rows - more, width),
        "more_values": (more, width),
        "mask": (1, 1, rows, past + rows),
    }
    form = attention_form(rows, KV_HEADS, groups, dim, dim**-0.5)
    model = model_of(kind, shapes, 1, alone=rows == 1, **form)
    if CACHES[kind] == np.float32:
        return model
    typed = onnx.load_from_string(model)
    for value in typed.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    return typed.SerializeToString()


def attention_inputs(
    kind: str, past: int, dim: int, seen: np.ndarray, shown: int, groups: int = GROUPS
) -> dict[str, np.ndarray]:
    """Rows at random; of ``past`` rows the first ``shown`` are visible, of the new ones those in
    ``seen [R, R]``.
    """
    rng = np.random.default_rng(past)
    rows = len(seen)
    width = KV_HEADS * dim
    visible = np.concatenate([np.tile(np.arange(past) < shown, (rows, 1)), seen], axis=1)
    mask = np.where(visible, np.float32(0), np.float32(-1e9))[None, None]
    drawn = {"q": (1, rows, groups * width), "keys": (rows, width), "values": (rows, width)}
    drawn |= {"past_keys": (past, width), "past_values": (past, width)}
    drawn |= {"more_keys": (0, width), "more_values": (0, width)}
    types = {"past_keys": CACHES[kind], "past_values": CACHES[kind]}
    made = {
        name: rng.standard_normal(shape).astype(types.get(name, np.float32))
        for name, shape in drawn.items()
    }
    return {"mask": mask, **made}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("dim", [64, 256, 40, 20])
@pytest.mark.parametrize(("past", "shown"), [(0, 0), (33, 20), (600, 590)])
def test_attention_is_that_of_standard_operators_up_to_rounding(
    library: Path, past: int, shown: int, dim: int, kind: str
) -> None:
    feeds = attention_inputs(kind, past, dim, ANCESTORS, shown)
    model = attention_model(kind, 4, past, dim)
    for threads in (1, 2):
        ours, standard = (
            session(model, file, threads).run(None, feeds)[0] for file in (library, None)
        )
        np.testing.assert_allclose(ours, standard, atol=2e-6)


@pytest.mark.parametrize("kind", CACHES)
def test_new_rows_in_two_runs_are_attended_to_as_in_one(library: Path, kind: str) -> None:
    feeds = attention_inputs(kind, 40, 64, ANCESTORS, 29)
    two = dict(feeds)
    for name in ("keys", "values"):
        two |= {name: feeds[name][:1], f"more_{name}": feeds[name][1:]}
    for file in (library, None):
        (in_one,) = session(attention_model(kind, 4, 40, 64), file).run(None, feeds)
        (in_two,) = session(attention_model(kind, 4, 40, 64, more=3), file).run(None, two)
        np.testing.assert_array_equal(in_two, in_one)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("dim", "groups"), [(64, 3), (64, 2), (64, GROUPS), (20, GROUPS)])
def test_a_node_has_the_bits_of_the_same_row_in_plain_decoding(
    library: Path, dim: int, groups: int, kind: str
) -> None:
    feeds = attention_inputs(kind, 40, dim, ANCESTORS, 29, groups)
    (tree,) = session(attention_model(kind, 4, 40, dim, groups=groups), library).run(None, feeds)
    for node, seen in enumerate(ANCESTORS):
        path = np.flatnonzero(seen)[:-1]
        # what the cache holds when plain decoding comes to this node, and a row that is still
        # masked
        past = {
            name: np.concatenate(
                [feeds[f"past_{name}"][:29], feeds[name][path], feeds[name][:1]]
            ).astype(CACHES[kind])
            for name in ("keys", "values")
        }
        mask = np.zeros((1, 1, 1, len(past["keys"]) + 1), np.float32)
        mask[..., -2] = -1e9
        alone = {"q": feeds["q"][:, node : node + 1], "mask": mask}
        alone |= {name: feeds[name][node : node + 1] for name in past}
        alone |= {f"more_{name}": feeds[f"more_{name}"] for name in past}
        alone |= {f"past_{name}": rows for name, rows in past.items()}
        (row,) = session(
            attention_model(kind, 1, len(past["keys"]), dim, groups=groups), library
        ).run(None, alone)
        np.testing.assert_array_equal(row[0, 0], tree[0, node])


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("dim", [64, 40])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_without_kernels_a_row_alone_has_the_bits_of_the_same_row_among_others(
    groups: int, dim: int, kind: str
) -> None:
    feeds = attention_inputs(kind, 64, dim, np.tril(np.ones((4, 4), bool)), 50, groups)
    alone = feeds | {name: feeds[name][:1] for name in ("keys", "values")}
    alone |= {"q": feeds["q"][:, :1], "mask": feeds["mask"][..., :1, :65]}
    rows, row = (
        session(attention_model(kind, count, 64, dim, groups=groups), None).run(None, given)[0]
        for count, given in ((4, feeds), (1, alone))
    )
    np.testing.assert_array_equal(row[0, 0], rows[0, 0])


@pytest.mark.wide
@pytest.mark.parametrize("kind", CACHES)
def test_kernels_of_this_cpu_and_portable_ones_give_the_same_bits(kind: str) -> None:
    dims = (32, 40, 64, 128)
    models = [
        (attention_model(kind, 4, 300, dim), attention_inputs(kind, 300, dim, ANCESTORS, 290))
        for dim in dims
    ]
    for groups in (1, 2, 3):  # the rows of a tree may be computed together
        window = attention_inputs(kind, 300, 64, ANCESTORS, 290, groups)
        for row, hidden in enumerate((0, 0, 7, 133)):
            window["mask"][..., row, :hidden] = -1e9
        models.append((attention_model(kind, 4, 300, 64, groups=groups), window))
        for past in (21, 32):
            chunk = attention_inputs(kind, past, 64, np.tril(np.ones((32, 32), bool)), past, groups)
            models.append((attention_model(kind, 32, past, 64, groups=groups), chunk))
    for model, feeds in models:
        native, portable = (
            session(model, built(cpu)).run(None, feeds)[0] for cpu in ("native", "portable")
        )
        np.testing.assert_array_equal(native, portable)


def test_without_the_kernels_a_graph_computes_the_same_up_to_rounding(library: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((96, 576)).astype(np.float32)
    x = np.random.default_rng(1).standard_normal((1, 5, 576)).astype(np.float32)
    model = forms.linears_model(5, [weight], Quant.INT4)
    ours, standard = (session(model, file).run(None, {"x": x})[0] for file in (library, None))
    assert not np.array_equal(ours, standard)  # so the kernel did run
    np.testing.assert_allclose(ours, standard, atol=1e-5 * np.abs(ours).max())


def test_rows_of_another_width_are_an_error_and_no_crash(library: Path) -> None:
    model = onnx.load_from_string(
        forms.linears_model(2, [np.ones((256, 64), np.float32)], Quant.INT4)
    )
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_value = 96
    del model.functions[:]  # whose rules for shapes would already refuse it
    with pytest.raises(Exception, match="rows have another width than the weights"):
        session(model.SerializeToString(), library).run(
            None, {"x": np.ones((1, 2, 96), np.float32)}
        )


def test_with_the_kernels_int4_steps_have_the_bits_of_plain_decoding_on_every_cpu(
    base: Path, adapter: Path, tmp_path: Path, installed: Path
) -> None:
    result = compared_along_a_chain(base, adapter, tmp_path / "bundle", "int4")
    assert result.differences == [] and result.nodes_ended == set(range(4))
    assert result.largest_change == 0


@pytest.mark.parametrize(("with_kernels", "lanes"), [(True, 1), (False, LANES)])
def test_the_kernels_need_few_sizes_of_the_cache(
    base: Path, adapter: Path, installed: Path, with_kernels: bool, lanes: int
) -> None:
    def make(out: Path) -> None:
        assert main(export(base, out, "--adapter", f"app={adapter}")) == 0

    engine = open_engine(
        Bundle.open(made_once("export/with-kernels", make)),
        "app",
        EngineOptions(kernels=with_kernels),
    )
    conversation = engine.new_conversation()
    prefill(conversation, [1, 2, 3])
    conversation.step(4)
    cache = conversation.cache
    assert isinstance(cache, OnnxCache) and {call.lanes for call in cache.calls.values()} == {lanes}
