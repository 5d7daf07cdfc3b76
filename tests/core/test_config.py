"""Settings are strict: what a file says is taken exactly or refused with the name of the fault."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdevice.config import Mode, Schedule, StreamConfig, StreamMLP, load_strict, read_json, to_json
from ssdevice.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    name: str
    weight: float = 0.5


@dataclass(frozen=True)
class Outer:
    size: int
    inner: Inner
    mode: Mode = Mode.SHARED
    flag: bool = False
    note: str | None = None
    either: int | str = 0
    ranks: tuple[int, ...] = ()
    pair: tuple[str, float] = ("", 0.0)
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    anything: Any = None


MINIMAL: dict[str, Any] = {"size": 1, "inner": {"name": "a"}}

text = st.text(max_size=8)
number = st.floats(allow_nan=False, allow_infinity=False)
inner = st.builds(Inner, text, number)
outer = st.builds(
    Outer,
    st.integers(),
    inner,
    mode=st.sampled_from(Mode),
    flag=st.booleans(),
    note=st.none() | text,
    either=st.integers() | text,
    ranks=st.lists(st.integers(), max_size=3).map(tuple),
    pair=st.tuples(text, number),
    many=st.lists(inner, max_size=2).map(tuple),
    by_name=st.dictionaries(text, inner, max_size=2),
    counts=st.dictionaries(text, st.integers(), max_size=2),
    anything=st.none() | st.booleans() | text,
)


@given(outer)
def test_round_trip_through_json_text(value: Outer) -> None:
    assert load_strict(Outer, json.loads(json.dumps(to_json(value))), "x") == value


def test_defaults_fill_what_is_left_out() -> None:
    assert load_strict(Outer, MINIMAL, "x") == Outer(1, Inner("a"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"siz": 2}, r"x: unknown key 'siz', did you mean 'size'\?"),
        ({"inner": {"nme": "a"}}, r"x\.inner: unknown key 'nme', did you mean 'name'\?"),
        ({"zzzzzz": 2}, r"x: unknown key 'zzzzzz'; known keys are size, inner"),
        ({"size": "1"}, r"x\.size: expected an integer, found a string"),
        ({"size": 1.0}, r"x\.size: expected an integer, found a number"),
        ({"size": True}, r"x\.size: expected an integer, found true or false"),
        ({"size": None}, r"x\.size: expected an integer, found null"),
        ({"flag": 1}, r"x\.flag: expected true or false, found an integer"),
        ({"note": 3}, r"x\.note: expected a string, found an integer"),
        ({"either": 0.5}, r"x\.either: expected an integer, found a number"),
        ({"mode": "Shared"}, r"x\.mode: 'Shared' is not one of shared, lossless"),
        ({"mode": ["shared"]}, r"x\.mode: .* is not one of"),
        ({"mode": None}, r"x\.mode: 'None' is not one of"),
        ({"inner": ["a"]}, r"x\.inner: expected an object, found a list"),
        ({"inner": {}}, r"x\.inner: 'name' is missing"),
        (
            {"inner": {"name": "a", "weight": True}},
            r"x\.inner\.weight: expected a number, found true or false",
        ),
        (
            {"inner": {"name": "a", "weight": math.nan}},
            r"x\.inner\.weight: nan is not a finite number",
        ),
        (
            {"inner": {"name": "a", "weight": math.inf}},
            r"x\.inner\.weight: inf is not a finite number",
        ),
        (
            {"inner": {"name": "a", "weight": 10**400}},
            r"x\.inner\.weight: 1000.* is not a finite number",
        ),
        ({"ranks": [1, "2"]}, r"x\.ranks\[1\]: expected an integer, found a string"),
        ({"ranks": 3}, r"x\.ranks: expected a list, found an integer"),
        ({"ranks": {"0": 1}}, r"x\.ranks: expected a list, found an object"),
        ({"pair": ["a"]}, r"x\.pair: expected 2 values, found 1"),
        ({"pair": [1, 2]}, r"x\.pair\[0\]: expected a string, found an integer"),
        ({"many": [{"name": "a"}, {"name": 1}]}, r"x\.many\[1\]\.name: expected a string"),
        ({"by_name": {"k": {}}}, r"x\.by_name\['k'\]: 'name' is missing"),
        ({"by_name": []}, r"x\.by_name: expected an object, found a list"),
        ({"counts": {"k": "v"}}, r"x\.counts\['k'\]: expected an integer"),
    ],
)
def test_faults_are_named_with_their_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message):
        load_strict(Outer, {**MINIMAL, **change}, "x")


@pytest.mark.parametrize("data", [None, 3, "text", [], [["size", 1]]])
def test_top_level_must_be_an_object(data: Any) -> None:
    with pytest.raises(ConfigError, match="^x: expected an object, found"):
        load_strict(Outer, data, "x")


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="^x: 'size' is missing"):
        load_strict(Outer, {"inner": {"name": "a"}}, "x")


def test_hostile_values_make_short_messages() -> None:
    for data in (
        {"k" * 10_000: 1},
        {**MINIMAL, "mode": "m" * 10_000},
        {**MINIMAL, "counts": {"k" * 10_000: None}},
    ):
        with pytest.raises(ConfigError) as caught:
            load_strict(Outer, data, "x")
        assert len(str(caught.value)) < 400


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5
    )
)
def test_any_json_value_is_taken_or_refused_with_a_config_error(value: Any) -> None:
    for key in Outer.__dataclass_fields__:
        try:
            loaded = load_strict(Outer, {**MINIMAL, key: value}, "x")
        except ConfigError as error:
            assert str(error).startswith(f"x.{key}")
        else:
            assert isinstance(loaded, Outer)


def test_an_integer_is_a_number() -> None:
    weight = load_strict(Inner, {"name": "a", "weight": 2}, "x").weight
    assert weight == 2.0 and type(weight) is float


@given(
    st.builds(
        StreamConfig,
        mode=st.sampled_from(Mode),
        gamma=st.integers(1, 32),
        msa_layers=st.integers(0, 99),
        init_rank=st.integers(0, 64),
        token_rank=st.integers(0, 64),
        adapter_rank=st.integers(1, 64),
        stream_mlp=st.sampled_from(StreamMLP),
        lora_rank=st.integers(0, 64),
    )
)
def test_stream_config_round_trip(config: StreamConfig) -> None:
    assert load_strict(StreamConfig, to_json(config), "streams.json") == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"gamma": 0}, "gamma is 0"),
        ({"gamma": 33}, "gamma is 33"),
        ({"msa_layers": -1}, "msa_layers is -1"),
        ({"init_rank": -1}, "init_rank"),
        ({"lora_rank": -1}, "lora_rank"),
        ({"mode": "lossless", "adapter_rank": 0}, "adapter_rank"),
        ({"msa_layers": 0, "adapter_rank": 0}, "adapter_rank"),
        ({"draft_layers": 1}, "draft_layers need lossless mode"),
        (
            {"draft_layers": 1, "mode": "lossless", "adapter_rank": 0},
            "msa_layers is 4: draft layers do without",
        ),
        ({"draft_layers": 9}, "draft_layers is 9"),
        ({"stream_mlp": "base"}, "not one of adapter-only, adapter, base\\+adapter"),
    ],
)
def test_stream_config_refuses_values_out_of_range(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"streams.json.*{message}"):
        load_strict(StreamConfig, data, "streams.json")


def test_streams_start_above_a_lower_layer() -> None:
    StreamConfig(msa_layers=3).check_layers(4)
    with pytest.raises(ConfigError, match="N_s = 4 .* this one has 4"):
        StreamConfig(msa_layers=4).check_layers(4)


@pytest.mark.parametrize("enum", [Mode, StreamMLP, Schedule])
def test_enum_members_print_as_they_are_written_in_files(enum: type[Mode]) -> None:
    for member in enum:
        assert str(member) == f"{member}" == member.value == to_json(member)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"a": 1,}', "not JSON .line 1"),
        (b"\xff", "not UTF-8 text .byte 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not JSON this tool can use"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' appears twice"),
    ],
)
def test_read_json_names_file_and_fault(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.json: .*{message}"):
        read_json(path)


def test_read_json_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_json(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_json(tmp_path)


def test_read_json_keeps_order_and_letters(tmp_path: Path) -> None:
    path = tmp_path / "good.json"
    path.write_text('{"γ": 4, "a": [1, 2.5, null, true]}', "utf-8")
    assert list(read_json(path).items()) == [("γ", 4), ("a", [1, 2.5, None, True])]
