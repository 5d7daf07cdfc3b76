"""A byte-level tokenizer for the tiny models: their vocabulary, a few of its tokens being several
characters.
"""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from tests.runtime.scripted import SPECIAL, TEMPLATE

MERGES = [("n", "a"), ("m", "e"), ("na", "me"), ("{", '"'), ('"', ":"), ("Ġ", '"'), ('"', ",")]
RARE = "~`^|@#$%"
"""Characters that give their place to the merged tokens and to the line break."""


@cache
def letters() -> ChatTokenizer:
    """As many tokens as ``make_tokenizer`` of the scripted target has; ``</s>`` and ``<system>``
    stop.
    """
    characters = [chr(code) for code in range(33, 127) if chr(code) not in RARE]
    tokens = [*SPECIAL, "Ġ", "Ċ", *characters, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Bytes()
    tokenizer.add_special_tokens(list(SPECIAL))
    return ChatTokenizer(tokenizer, ChatFormat(TEMPLATE, {"eos_token": "</s>"}, (0, 3)))
