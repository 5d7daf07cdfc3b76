"""Conversations on disk: a resumed one goes on as if it had never been left, and no file can do
harm.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ssdevice.adapters.storage import read_tensors, write_tensors
from ssdevice.bundle.folder import Bundle
from ssdevice.contract import ROWS, CacheForm
from ssdevice.errors import InputError
from ssdevice.runtime.saved import DESCRIPTION, HASH, _digest
from ssdevice.runtime.session import Session
from tests.runtime.tiny_bundle import APP, bundle_of_another_base, tiny_bundle


def saved_after(file: Path, prompt: str = "hello") -> tuple[str, list[dict[str, Any]]]:
    """Save a conversation of two turns; the answer to a third one in the session that wrote it."""
    with Session.open(tiny_bundle()) as session:
        "".join(session.chat(prompt, system="Be.", max_tokens=5))
        session.save(file)
        messages = session.messages
        return "".join(session.chat("b", max_tokens=12)), messages


def rewritten(file: Path, rows: Any = None, signed: bool = True, **changes: Any) -> None:
    """Change what a file says, with the right hash."""
    tensors = dict(read_tensors(file))
    described = {**json.loads(tensors[DESCRIPTION].tobytes()), **changes}
    tensors[DESCRIPTION] = np.frombuffer(json.dumps(described).encode(), np.int8)
    tensors[ROWS] = tensors[ROWS] if rows is None else rows(tensors[ROWS])
    if signed:
        tensors[HASH] = _digest(tensors[DESCRIPTION], tensors[ROWS])
    write_tensors(file, tensors)


def test_a_resumed_conversation_goes_on_and_computes_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "talk"
    expected, messages = saved_after(file)
    with Session.open(tiny_bundle(), resume=file) as session:
        assert session.messages == messages
        conversation = session._conversation
        computed = list[int]()
        whole = conversation.prefill
        monkeypatch.setattr(
            conversation, "prefill", lambda chunk: (computed.extend(chunk), whole(chunk))[1]
        )
        assert "".join(session.chat("b", max_tokens=12)) == expected
        assert len(computed) < 20 < session.last.prompt_tokens
        session.save(file)  # over the old one
    assert [path.name for path in tmp_path.iterdir()] == ["talk"]


def test_an_instruction_that_was_computed_once_is_a_prefix_of_other_prompts(tmp_path: Path) -> None:
    file = tmp_path / "app"
    with Session.open(tiny_bundle(), app=APP) as session:
        "".join(session.generate("a", max_tokens=1))
        session.save(file)
        expected = "".join(session.generate("hello", max_tokens=9))
    with Session.open(tiny_bundle(), app=APP, resume=file) as session:
        assert (
            session.messages == [] and session._conversation.shared(session.prompt_ids("hello")) > 5
        )
        assert "".join(session.generate("hello", max_tokens=9)) == expected


def nan(rows: Any) -> Any:
    rows = rows.copy()
    rows[0, 0, 0] = np.nan
    return rows


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another bundle": ({"bundle": "0" * 64}, "saved with another bundle"),
    "another app": ({"app": "base"}, "saved with app 'base', this session uses 'letters'"),
    "damaged": ({"signed": False, "text": [5]}, "is damaged: its content has another sha256"),
    "too many tokens": ({"text": [5] * 1000}, "context of 96"),
    "no tokens": ({"text": []}, "the prompt is empty"),
    "unknown token": ({"text": [5, 10**6]}, "token 1000000 is not one of"),
    "negative token": ({"text": [5, -1]}, "token -1 is not one of"),
    "other rows": ({"rows": lambda rows: rows[:, :-1]}, r"rows are float32 .*, expected float32"),
    "other type": (
        {"rows": lambda rows: rows.astype(np.float16)},
        r"rows are float16 .*, expected float32",
    ),
    "not finite": ({"rows": nan}, "values that are not finite"),
    "unknown key": ({"more": 1}, "unknown key 'more'"),
    "wrong type": ({"text": "abc"}, r"text: expected a list"),
    "wrong messages": (
        {"messages": [{"role": "assistant", "content": "x"}]},
        "cannot be the first",
    ),
    "wrong message": ({"messages": [3]}, r"messages\[0\]: expected"),
    "deep": ({"tools": json.loads("[" * 65 + "]" * 65)}, "nested deeper than 64 levels"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_or_was_changed_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "talk"
    saved_after(file)
    changes, expected = WRONG[name]
    rewritten(file, **changes)
    with pytest.raises(InputError, match=expected):
        Session.open(tiny_bundle(), resume=file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "talk"
    for path in (file, tmp_path):
        with pytest.raises(InputError, match="no such file"):
            Session.open(tiny_bundle(), resume=path)
    with pytest.raises(InputError, match="resume is int"):
        Session.open(tiny_bundle(), resume=5)  # type: ignore[arg-type]
    for content in (b"", b"\xff" * 100, b"{}"):
        file.write_bytes(content)
        with pytest.raises(InputError, match="not a safetensors file"):
            Session.open(tiny_bundle(), resume=file)
    write_tensors(file, {"x": np.zeros(3, np.float32)})
    with pytest.raises(InputError, match="not a saved conversation"):
        Session.open(tiny_bundle(), resume=file)
    with file.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse
    with pytest.raises(
        InputError, match="has 1099511627776 bytes, a conversation of this bundle has at most"
    ):
        Session.open(tiny_bundle(), resume=file)
    saved_after(file)
    with pytest.raises(InputError, match="saved with another bundle"):
        Session.open(Bundle.open(bundle_of_another_base(tmp_path / "other")), resume=file)


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with Session.open(tiny_bundle()) as session:
        with pytest.raises(InputError, match="nothing to save"):
            session.save(tmp_path / "talk")
        "".join(session.chat("a", max_tokens=2))
        with pytest.raises(InputError, match="is a folder"):
            session.save(tmp_path)
        with pytest.raises(InputError, match="a file is int"):
            session.save(5)  # type: ignore[arg-type]
        session.reset()
        with pytest.raises(InputError, match="nothing to save"):
            session.save(tmp_path / "talk")


def test_a_cache_inside_the_graphs_is_not_saved(tmp_path: Path) -> None:
    manifest = SimpleNamespace(cache=CacheForm.INTERNAL, target="coreml")
    with Session.open(tiny_bundle()) as session:
        "".join(session.chat("a", max_tokens=2))
        session._bundle = cast(Bundle, SimpleNamespace(manifest=manifest, folder=tmp_path))
        with pytest.raises(InputError, match="coreml keeps the KV cache inside its graphs"):
            session.save(tmp_path / "talk")
