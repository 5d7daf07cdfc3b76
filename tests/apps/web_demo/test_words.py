"""The page's prompts have the user's words as text, and an answer goes on where its prompt ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssdevice.text.messages import Chat
from ssdevice.text.stream import TextStream, TokenTexts
from tests.apps.web_demo import host
from tests.text.test_marks import KINDS, PLAIN, WRITTEN, opened, user
from tests.text.test_tokenizer import CHATML


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_the_words_of_a_prompt_are_text(tmp_path: Path, kind: str) -> None:
    """The ids are those of the Python runtime, with special tokens in the words and without."""
    chat, _ = opened(tmp_path, KINDS[kind], CHATML)
    (tmp_path / "stored.json").write_bytes(chat.tokenizer_json)
    words = [text.strip() for text in (*PLAIN, *WRITTEN)]
    after = "<|im_end|>\n<|im_start|>assistant\n"
    prompts = [["<|im_start|>user\n", text, after] for text in words]
    pairs = [("the", " the a"), ("the", "a"), ("a", " the")]
    follow = [[chat.encode(one), chat.encode(f"a{other}")[1:]] for one, other in pairs]
    given = json.dumps({"prompts": prompts, "follow": follow})
    done = host.script("words.mjs", tmp_path / "stored.json", given=given)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = [chat.chat_ids(Chat((user(text),)), as_text=True) for text in words]
    assert found["ids"] == expected
    if kind not in ("unigram", "word_piece"):  # other decoders
        streams = [TextStream(TokenTexts(chat.tokenizer), before) for before, _ in follow]
        texts = [
            stream.push(ids) + stream.flush()
            for stream, (_, ids) in zip(streams, follow, strict=True)
        ]
        assert found["texts"] == texts
