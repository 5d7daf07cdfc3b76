"""Whatever is done to a manifest, it is refused in one line or means what it says: nothing is
dropped or guessed.
"""

from __future__ import annotations

import copy
import json
from functools import reduce
from operator import getitem
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdevice.bundle.manifest import Manifest, encode_manifest, parse_manifest
from ssdevice.bundle.sampling import ModelSampling
from ssdevice.config import to_json
from ssdevice.errors import BundleError
from tests.bundle.optional import optional_places, with_defaults
from tests.bundle.samples import leaves, sample_document

DOCUMENT = sample_document()
BYTES = json.dumps(DOCUMENT).encode()
# Functions are the largest part and all of a kind: one place in four is in them.
PLACES = [place for place in leaves(DOCUMENT)[1:] if place[0] != "functions"]
TENSORS = [place for place in leaves(DOCUMENT)[1:] if place[0] == "functions"]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 5),
    st.sampled_from(
        [
            0,
            1,
            2**31,
            2**63,
            10**30,
            -(10**30),
            1.5,
            1e308,
            "",
            "..",
            "../a",
            "/",
            "base",
            "sql",
            "step",
        ]
    ),
    st.text(max_size=20),
    st.sampled_from([copy.deepcopy(value) for value in DOCUMENT.values()]),
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """The sample with one to three things changed: replaced, removed, added, repeated, renamed or
    swapped.
    """
    document = copy.deepcopy(DOCUMENT)
    for _ in range(draw(st.integers(1, 3))):
        places = (
            st.sampled_from(PLACES),
            st.sampled_from(PLACES),
            st.sampled_from(PLACES),
            st.sampled_from(TENSORS),
        )
        *above, last = draw(st.one_of(*places))
        parent: Any = document
        try:
            for key in above:
                parent = parent[key]
            value = parent[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
        if isinstance(parent, (dict, list)):
            change(draw, parent, last, value)
    return document


def change(draw: st.DrawFn, parent: Any, last: Any, value: Any) -> None:
    """Change one value in its object or list, in place."""
    kind = draw(st.sampled_from(["replace", "replace", "nudge", "remove", "add", "swap"]))
    if kind == "replace":
        parent[last] = draw(VALUES)
    elif kind == "nudge" and type(value) is int:
        parent[last] = value + draw(st.sampled_from([-1, 1]))
    elif kind == "nudge" and isinstance(value, str):
        parent[last] = value + draw(st.sampled_from(["\n", "\0", "x", "/..", " ", "é"]))
    elif kind == "remove":
        del parent[last]
    elif isinstance(parent, list) and kind == "swap":
        parent.reverse()
    elif isinstance(parent, list):
        parent.insert(last, copy.deepcopy(value))
    elif kind == "swap":
        parent[draw(st.text(max_size=10))] = parent.pop(last)
    else:
        parent[draw(st.text(max_size=10))] = value


def one_line(error: BundleError) -> bool:
    """Whether a message is fit for a terminal and a log, whatever stood in the file."""
    text = str(error)
    return text.startswith("manifest.json") and text.isprintable() and len(text) < 700


WHOLE = {
    **DOCUMENT,
    "apps": DOCUMENT["apps"][:1],
    "default_app": "base",
    "sampling": to_json(ModelSampling()),
}
OPTIONAL = {
    place: default
    for place, default in optional_places(Manifest, WHOLE)
    if place[:2] != ("functions", 1)
}


@pytest.mark.parametrize("place", OPTIONAL, ids=lambda place: ".".join(map(str, place)))
def test_an_optional_field_that_is_left_out_is_its_default_and_is_written(
    place: tuple[Any, ...],
) -> None:
    written = changed(place, OPTIONAL[place])
    left_out = changed(place, None)
    *above, last = place
    del reduce(getitem, above, left_out)[last]
    manifest = parse_manifest(json.dumps(left_out).encode(), "manifest.json")
    assert json.loads(encode_manifest(manifest)) == written
    assert manifest == parse_manifest(json.dumps(written).encode(), "manifest.json")


@pytest.mark.parametrize("place", OPTIONAL, ids=lambda place: ".".join(map(str, place)))
def test_null_is_no_value_but_of_a_field_that_is_null_by_default(place: tuple[Any, ...]) -> None:
    data = json.dumps(changed(place, None)).encode()
    if OPTIONAL[place] is None:
        parse_manifest(data, "manifest.json")
    else:
        with pytest.raises(BundleError, match="found null|is not one of"):
            parse_manifest(data, "manifest.json")


def changed(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The sample, in which every optional field is written, with another value at a place."""
    document = copy.deepcopy(WHOLE)
    *above, last = place
    reduce(getitem, above, document)[last] = value
    return document


@settings(max_examples=500)
@given(mutated())
def test_a_mutated_manifest_is_refused_or_means_what_it_says(document: dict[str, Any]) -> None:
    try:
        manifest = parse_manifest(json.dumps(document).encode(), "manifest.json")
    except BundleError as error:
        assert one_line(error), str(error)
    else:
        assert to_json(manifest) == with_defaults(Manifest, document)
        assert parse_manifest(encode_manifest(manifest), "manifest.json") == manifest


@settings(max_examples=200)
@given(st.integers(0, len(BYTES) - 1), st.binary(max_size=4), st.integers(0, 40))
def test_mutated_bytes_are_refused_or_open(at: int, put: bytes, removed: int) -> None:
    try:
        manifest = parse_manifest(BYTES[:at] + put + BYTES[at + removed :], "manifest.json")
    except BundleError as error:
        assert one_line(error), str(error)
    else:
        assert isinstance(manifest, Manifest)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_but_a_manifest_is_refused(value: Any) -> None:
    with pytest.raises(BundleError) as caught:
        parse_manifest(json.dumps(value).encode(), "manifest.json")
    assert one_line(caught.value)
