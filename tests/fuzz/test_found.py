"""What the fuzzer found, each once, so that it stays found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ssdevice.cli import MAX_MESSAGE, one_line
from ssdevice.config import RANK, StreamConfig
from ssdevice.errors import ConfigError, ContextOverflowError, InputError
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.scripted import make_tokenizer

CHAT = ChatFormat("{{ messages[0].content }}", {}, (0,))


def test_a_tokenizer_without_its_unknown_token_is_one_line() -> None:
    document = json.loads(make_tokenizer().tokenizer_json)
    del document["model"]["vocab"]["a"]
    document["model"]["unk_token"] = "absent"
    tokenizer = ChatTokenizer.from_bytes(json.dumps(document).encode(), CHAT)
    with pytest.raises(InputError, match="the tokenizer cannot encode the prompt"):
        tokenizer.prompt_ids("abc")


def test_a_text_that_cannot_fit_is_not_tokenized() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.encode("ab" * 100, 96)
    with pytest.raises(ContextOverflowError, match="20000 characters, far more than the 96 tokens"):
        tokenizer.encode("ab" * 10_000, 96)


@pytest.mark.parametrize("name", ["init_rank", "token_rank", "adapter_rank", "lora_rank"])
def test_a_rank_that_fills_memory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {RANK['maximum'] + 1}"):
        StreamConfig(**{name: RANK["maximum"] + 1})


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_in_the_place_of_weights_is_not_waited_for(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from ssdevice.model.adapter import load_streams

    os.mkfifo(tmp_path / "streams.safetensors")
    with pytest.raises(InputError, match="no such file"):
        load_streams(tmp_path, torch.nn.Linear(1, 1))


def test_messages_hold_nothing_that_a_terminal_obeys() -> None:
    assert one_line("a\nb\t\x1b[31mred\x00 \u202e漢字") == "a b \\x1b[31mred\\x00 \\u202e漢字"
    assert len(one_line("x" * 5000)) == MAX_MESSAGE
