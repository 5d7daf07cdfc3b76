"""The contract keeps its promises for every geometry: names, shapes, and room for every fixed-size
write.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ssdevice import contract
from ssdevice.contract import CacheForm, FunctionSpec, Geometry, functions
from ssdevice.errors import ConfigError
from ssdevice.tree import Tree

BASE = Geometry(
    layers=3,
    kv_heads=2,
    head_dim=8,
    vocab=100,
    gamma=3,
    k=2,
    tree=Tree.full(2, 2),
    context=64,
    chunk=16,
)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    tree = draw(
        st.sampled_from(
            [Tree.root_only(), Tree.chain(1), Tree.chain(4), Tree.full(2, 3), Tree.full(5, 1)]
        )
    )
    context = draw(st.integers(2, 5000))
    assume(context > tree.size)
    return Geometry(
        layers=draw(st.integers(1, 5)),
        kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 16)),
        vocab=draw(st.integers(5, 1000)),
        gamma=draw(st.integers(tree.depth, 8)),
        k=draw(st.integers(tree.width, 5)),
        tree=tree,
        context=context,
        chunk=draw(st.integers(1, 300)),
        short=draw(st.integers(0, max(0, tree.depth - 1))),
    )


def present(g: Geometry, *names: str) -> tuple[str, ...]:
    """Those that a geometry has."""
    return tuple(name for name in names if g.short or name != contract.STEP_SHORT)


@given(geometries(), st.data())
def test_every_write_at_a_length_within_the_context_fits(g: Geometry, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, g.context) | st.just(g.context))
    for rows in (g.tree.emitted, g.chunk, 1):
        assert length + rows <= g.capacity
    # Nothing is wasted beyond the rounding.
    assert g.capacity % contract.CAPACITY_MULTIPLE == 0
    assert g.capacity - g.context - max(g.tree.emitted, g.chunk) < contract.CAPACITY_MULTIPLE


@given(geometries(), st.integers(1, 64))
def test_a_host_that_chooses_has_room_for_all_nodes_and_gets_what_it_gives(
    g: Geometry, hidden: int
) -> None:
    g = dataclasses.replace(g, hidden=hidden)
    assert 0 <= g.capacity - g.context - max(g.tree.size, g.chunk) < contract.CAPACITY_MULTIPLE
    for cache in CacheForm:
        specs = functions(g, cache, "float16")
        assert tuple(specs) == present(g, *contract.GREEDY, *contract.CHOOSING)
        shapes = {}
        for name, spec in specs.items():
            shapes[name] = {tensor.name: tensor.shape for tensor in (*spec.inputs, *spec.outputs)}
        for name, nodes in ((contract.VERIFY, g.tree.size), (contract.VERIFY_PLAIN, 1)):
            assert shapes[name][contract.LOGITS] == (nodes, g.vocab)
            assert shapes[name][contract.STATES] == (nodes, hidden)
        assert shapes[contract.DRAFT][contract.LAST_STATE] == (1, hidden)
        assert shapes[contract.DRAFT].get(contract.PATH) == (
            None if cache is CacheForm.EXTERNAL else (g.tree.emitted,)
        )
        # Only the graph that holds the cache moves its rows when it drafts.
        assert (contract.ROWS in shapes[contract.VERIFY]) is (cache is CacheForm.EXTERNAL)
        assert contract.ROWS not in shapes[contract.DRAFT]


@pytest.mark.parametrize("cache", CacheForm)
@given(g=geometries())
def test_names_are_unique_and_shapes_agree(cache: CacheForm, g: Geometry) -> None:
    specs = functions(g, cache, "float32")
    assert tuple(specs) == present(g, *contract.GREEDY)
    for name, spec in specs.items():
        assert spec.name == name
        tensors = [*spec.inputs, *spec.outputs, *spec.states]
        assert len({tensor.name for tensor in tensors}) == len(tensors)
        assert {tensor.dtype for tensor in tensors} <= {"int32", "float32"}
    for giver, taker in ((contract.STEP, contract.STEP), (contract.PREFILL, contract.STEP)):
        given_drafts = next(t for t in specs[giver].outputs if t.name == contract.NEXT_DRAFTS)
        taken_drafts = next(t for t in specs[taker].inputs if t.name == contract.DRAFTS)
        assert given_drafts.shape == taken_drafts.shape == (g.gamma, g.k)
    assert {t.name: t.shape for t in specs[contract.STEP].outputs}[contract.TOKENS] == (
        g.tree.emitted,
    )
    assert {t.name: t.shape for t in specs[contract.PREFILL].inputs}[contract.CHUNK] == (g.chunk,)
    if g.short:
        shapes = {
            t.name: t.shape
            for t in (*specs[contract.STEP_SHORT].inputs, *specs[contract.STEP_SHORT].outputs)
        }
        assert shapes[contract.DRAFTS] == (g.short, g.k) and shapes[contract.TOKENS] == (
            g.short + 1,
        )
        assert shapes[contract.NEXT_DRAFTS] == (g.gamma, g.k)
        assert g.shorter.tree.paths == tuple(path for path in g.tree.paths if len(path) <= g.short)


@given(geometries())
def test_state_form_keeps_the_cache_in_the_graph(g: Geometry) -> None:
    shape = (g.layers, g.kv_heads, g.capacity, g.head_dim)
    for spec in functions(g, CacheForm.INTERNAL, "float16").values():
        assert [(t.name, t.shape, t.dtype) for t in spec.states] == [
            (contract.KEYS, shape, "float16"),
            (contract.VALUES, shape, "float16"),
        ]
        assert all(t.dtype == "int32" for t in (*spec.inputs, *spec.outputs))


@given(geometries())
def test_rows_form_takes_the_past_and_gives_the_new_rows(g: Geometry) -> None:
    new_rows = {contract.STEP: g.tree.emitted, contract.PREFILL: g.chunk, contract.PLAIN: 1}
    new_rows[contract.STEP_SHORT] = g.short + 1
    expected = [
        name(layer)
        for layer in range(g.layers)
        for name in (contract.past_key, contract.past_value)
    ]
    for spec in functions(g, CacheForm.EXTERNAL, "float32").values():
        assert spec.states == ()
        past = [t for t in spec.inputs if t.dtype != "int32"]
        assert [t.name for t in past] == expected
        assert {t.shape for t in past} == {(contract.PAST, g.kv_heads * g.head_dim)}
        rows = spec.outputs[-1]
        assert (rows.name, rows.shape) == (
            contract.ROWS,
            (2 * g.layers, new_rows[spec.name], g.row_width),
        )


def test_integers_stand_first_in_the_signature() -> None:
    def names(spec: FunctionSpec) -> list[str]:
        return [t.name for t in spec.inputs if t.dtype == "int32"]

    specs = functions(BASE, CacheForm.EXTERNAL, "float32")
    assert names(specs[contract.STEP]) == [contract.ROOT, contract.DRAFTS, contract.LENGTH]
    assert names(specs[contract.PREFILL]) == [contract.CHUNK, contract.VALID, contract.LENGTH]
    assert names(specs[contract.PLAIN]) == [contract.ROOT, contract.LENGTH]
    assert [t.name for t in specs[contract.STEP].inputs[:3]] == names(specs[contract.STEP])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"vocab": 0}, "vocab is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"context": 0}, "context is 0"),
        ({"context": 7}, "cannot hold a draft tree of 7 nodes"),
        ({"context": contract.MAX_CONTEXT + 1}, "context is 1048577, expected 1 to 1048576"),
        ({"gamma": -1}, "gamma is -1"),
        ({"gamma": 1}, "2 deep"),
        ({"k": 0}, "k is 0"),
        ({"k": 1}, "candidate 1"),
        ({"k": 101}, "k is 101, the model has 100"),
        ({"short": 2}, "short is 2, the tree is 2 deep"),
        ({"short": -1}, "short is -1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(BASE, **change)
