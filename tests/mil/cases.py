"""The table of operations: every kernel with small random inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.mil.builder import Build, Case

_rng = np.random.default_rng(18)


def f(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Random float32."""
    return _rng.uniform(low, high, shape).astype(np.float32)


def i(*shape: int, low: int = -5, high: int = 6) -> np.ndarray:
    """Random int32."""
    return _rng.integers(low, high, shape).astype(np.int32)


def b(*shape: int) -> np.ndarray:
    """Random truth values."""
    return _rng.random(shape) < 0.5


def op(kind: str, *names: str, **constants: Any) -> Build:
    """A build function: operands called ``names``, the rest constant."""
    return lambda mb, *values: getattr(mb, kind)(
        **dict(zip(names, values, strict=True)), **constants
    )


def _torch(function: str, *arguments: Any, **options: Any) -> Any:
    """A reference by torch, called on the case's inputs."""

    def run(*inputs: np.ndarray) -> np.ndarray:
        import torch

        target = torch
        for part in function.split("."):
            target = getattr(target, part)
        return target(*[torch.tensor(value) for value in inputs], *arguments, **options).numpy()

    return run


def elementwise() -> list[Case]:
    """Arithmetic, comparison, activations."""
    cases = []
    for kind in (
        "add",
        "sub",
        "mul",
        "real_div",
        "maximum",
        "equal",
        "greater_equal",
        "less",
        "less_equal",
    ):
        cases.append(
            Case(f"{kind}_f", op(kind, "x", "y"), (f(2, 1, 3), f(4, 3, low=0.5)), exact=True)
        )
    for kind in ("add", "sub", "mul", "maximum", "equal", "greater_equal", "less", "less_equal"):
        cases.append(Case(f"{kind}_i", op(kind, "x", "y"), (i(2, 5), i(5, low=1)), exact=True))
    cases.append(Case("logical_and", op("logical_and", "x", "y"), (b(3, 4), b(4)), exact=True))
    for kind in ("abs", "erf", "tanh", "sigmoid", "relu", "softplus"):
        cases.append(Case(kind, op(kind, "x"), (f(3, 7, low=-4, high=8),)))
    cases.append(Case("abs_i", op("abs", "x"), (i(3, 7),), exact=True))
    cases.append(Case("sqrt", op("sqrt", "x"), (f(3, 7, low=0, high=9),)))
    cases.append(Case("rsqrt", op("rsqrt", "x", epsilon=1e-3), (f(3, 7, low=0, high=9),)))
    cases.append(Case("rsqrt_default", op("rsqrt", "x"), (f(3, 7, low=0.1, high=9),)))
    cases.append(Case("inverse", op("inverse", "x"), (f(3, 7, low=0.5, high=9),)))
    cases.append(Case("silu", op("silu", "x"), (f(3, 7),), _torch("nn.functional.silu")))
    for mode in ("EXACT", "TANH_APPROXIMATION"):
        cases.append(
            Case(f"gelu_{mode.lower()}", op("gelu", "x", mode=mode), (f(3, 7, low=-5, high=5),))
        )
    cases.append(Case("softmax", op("softmax", "x", axis=1), (f(2, 5, 3, low=-30, high=30),)))
    cases.append(Case("clip", op("clip", "x", alpha=-0.5, beta=0.25), (f(3, 7),), exact=True))
    cases.append(
        Case("select", op("select", "cond", "a", "b"), (b(3, 1), f(3, 4), f(4)), exact=True)
    )
    cases.append(
        Case("select_i", op("select", "cond", "a", "b"), (b(3, 4), i(3, 4), i(1)), exact=True)
    )
    for dtype, source in (
        ("int32", f(3, 5)),
        ("fp16", f(3, 5)),
        ("fp32", i(3, 5)),
        ("bool", i(3, 5, low=-1, high=2)),
    ):
        cases.append(Case(f"cast_{dtype}", op("cast", "x", dtype=dtype), (source,), exact=True))
    for dtype in ("int16", "uint16", "int8", "uint8"):
        build = _cast_back(dtype)
        cases.append(
            Case(f"cast_{dtype}", build, (i(3, 5, low=0, high=100),), lambda x: x, exact=True)
        )
    return cases


def _cast_back(dtype: str) -> Build:
    return lambda mb, x: mb.cast(x=mb.cast(x=x, dtype=dtype), dtype="int32")


def reductions() -> list[Case]:
    """Along axes: sums, norms, choices."""
    cases = []
    for kind in ("mean", "max"):
        name = f"reduce_{kind}"
        cases.append(
            Case(f"{name}_keep", op(name, "x", axes=[-1, 0], keep_dims=True), (f(2, 3, 4),))
        )
        cases.append(Case(f"{name}_one", op(name, "x", axes=[1], keep_dims=False), (f(2, 3, 4),)))
    cases.append(
        Case(
            "reduce_argmax",
            op("reduce_argmax", "x", axis=1, keep_dims=True),
            (f(2, 9, 2),),
            exact=True,
        )
    )
    cases.append(
        Case(
            "reduce_argmax_tie",
            op("reduce_argmax", "x"),
            (np.full((2, 5), 3, np.float32),),
            exact=True,
        )
    )
    cases.append(
        Case("reduce_argmax_u16", _argmax_u16, (f(2, 9),), lambda x: x.argmax(-1), exact=True)
    )
    gamma = f(4)
    beta = f(4)
    cases.append(
        Case(
            "layer_norm",
            op("layer_norm", "x", axes=[-1], gamma=gamma, beta=beta, epsilon=1e-3),
            (f(2, 3, 4),),
        )
    )
    cases.append(Case("layer_norm_plain", op("layer_norm", "x", axes=[1, 2]), (f(2, 3, 4),)))
    return cases


def _argmax_u16(mb: Any, x: Any) -> Any:
    return mb.cast(x=mb.reduce_argmax(x=x, axis=-1, output_dtype="uint16"), dtype="int32")


def linear() -> list[Case]:
    """Products of matrices."""
    weight = f(5, 4)
    bias = f(5)
    return [
        Case("linear", op("linear", "x", weight=weight, bias=bias), (f(2, 3, 4),)),
        Case("linear_plain", op("linear", "x", weight=weight), (f(3, 4),)),
        Case("matmul", op("matmul", "x", "y"), (f(2, 3, 4), f(4, 5))),
        Case(
            "matmul_xy",
            op("matmul", "x", "y", transpose_x=True, transpose_y=True),
            (f(2, 4, 3), f(1, 2, 5, 4)),
        ),
        Case("matmul_vector", op("matmul", "x", "y"), (f(4), f(4, 3))),
    ]
