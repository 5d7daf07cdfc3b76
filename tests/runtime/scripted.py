"""A target without a model.

The next token is a hash of the committed rows, so a wrong row changes every answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    FUNCTIONS,
    GREEDY,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PREFILL,
    ROOT,
    STEP,
    STEP_SHORT,
    TOKENS,
    VALID,
    Geometry,
)
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Cache, Engine, Inputs, Outputs
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree

GARBAGE = -7
Drafter = Callable[["ScriptedCache", Sequence[int]], NDArray[np.int32]]
"""``(cache, context) -> drafts [γ, k]`` after the tokens of ``context``."""


def next_token(context: Sequence[int], vocab: int) -> int:
    """The model: any change in what came before gives another continuation."""
    return zlib.crc32(np.asarray(context, dtype=np.int64).tobytes()) % vocab


def continuation(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """The first ``count`` tokens of greedy decoding, without any loop of the product."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class ScriptedCache(Cache):
    """Rows hold the token they came from. Writes are of fixed size and refuse to pass the capacity.

    ``chunks``: prompt tokens of each prefill; ``steps``: calls of the other functions.
    """

    def __init__(self, geometry: Geometry, inputs: Inputs, drafter: Drafter) -> None:
        super().__init__(inputs)
        self.geometry = geometry
        self.held = np.full(geometry.capacity, GARBAGE, dtype=np.int64)
        self.drafter = drafter
        self.length = 0
        self.chunks: list[int] = []
        self.steps = 0

    def call(self, function: str, length: int) -> Outputs:
        self.length = length
        if function == PREFILL:
            self.chunks.append(int(self.inputs[VALID][0]))
            out = self.prefill(self.inputs[CHUNK][: self.chunks[-1]].tolist())
        else:
            self.steps += 1
            last = int(self.inputs[ROOT][0])
            out = self.step(last, function) if function in (STEP, STEP_SHORT) else self.plain(last)
        return {name: np.array(values, np.int32) for name, values in out.items()}

    def prefill(self, chunk: Sequence[int]) -> dict[str, Any]:
        assert 1 <= len(chunk) <= self.geometry.chunk
        self.write([*chunk, *[GARBAGE] * (self.geometry.chunk - len(chunk))])
        context = self.context(chunk)
        return {
            NEXT_ROOT: [next_token(context, self.geometry.vocab)],
            NEXT_DRAFTS: self.draft(context),
        }

    def step(self, last: int, function: str = STEP) -> dict[str, Any]:
        geometry = self.geometry if function == STEP else self.geometry.shorter
        tree = geometry.tree
        slots = [last, *self.inputs[DRAFTS][: geometry.gamma].reshape(-1).tolist()]
        tokens = [slots[slot] for slot in tree.draft_indices(geometry.k)]
        past = self.held[: self.length].tolist()
        paths = list[list[int]]()
        for row in tree.path_table:
            paths.append([tokens[node] for node in dict.fromkeys(row)])
        predicted = [next_token([*past, *path], geometry.vocab) for path in paths]
        stands = [True] * tree.size
        for node in range(1, tree.size):
            parent = tree.parents[node]
            stands[node] = stands[parent] and tokens[node] == predicted[parent]
        end = max(range(tree.size), key=lambda node: (stands[node], tree.depths[node], -node))
        self.write([*paths[end], *[GARBAGE] * (tree.emitted - len(paths[end]))])
        run = [predicted[node] for node in dict.fromkeys(tree.path_table[end])]
        return {
            TOKENS: [*run, *[GARBAGE] * (tree.emitted - len(run))],
            COUNT: [len(run)],
            NEXT_DRAFTS: self.draft([*past, *paths[end]]),
        }

    def plain(self, last: int) -> dict[str, Any]:
        self.write([last])
        return {TOKENS: [next_token(self.context([last]), self.geometry.vocab)]}

    def write(self, rows: Sequence[int]) -> None:
        assert self.length + len(rows) <= self.geometry.capacity, "a write beyond the cache"
        self.held[self.length : self.length + len(rows)] = rows

    def context(self, new: Sequence[int]) -> list[int]:
        context = [*self.held[: self.length].tolist(), *new]
        assert GARBAGE not in context, "an uncommitted row was used"
        return context

    def draft(self, context: Sequence[int]) -> NDArray[np.int32]:
        return (
            self.drafter(self, context)
            if self.geometry.gamma
            else np.zeros((0, self.geometry.k), np.int32)
        )


class ScriptedEngine(Engine):
    """Gives scripted caches; ``kind``: of which class."""

    def __init__(
        self, geometry: Geometry, drafter: Drafter, kind: type[ScriptedCache] = ScriptedCache
    ) -> None:
        super().__init__(
            geometry, frozenset(GREEDY if geometry.short else FUNCTIONS), Path("scripted")
        )
        self.drafter = drafter
        self.kind = kind

    def new_cache(self, inputs: Inputs, beside: Cache | None = None) -> ScriptedCache:
        return self.kind(self.geometry, inputs, self.drafter)

    def release(self) -> None:
        pass


def cache_of(conversation: Conversation) -> ScriptedCache:
    """The scripted cache of a conversation."""
    assert isinstance(conversation.cache, ScriptedCache)
    return conversation.cache


def make_geometry(
    tree: Tree, *, k: int = 0, vocab: int = 11, context: int = 40, chunk: int = 4, short: int = 0
) -> Geometry:
    """A geometry whose model sizes do not matter."""
    k = max(k, tree.width)
    return Geometry(1, 1, 1, vocab, tree.depth, k, tree, context, chunk, short=short)


def random_drafter(seed: int, oracle: float) -> Drafter:
    """Drafts of which about a share ``oracle`` are the true continuation at a random rank; the rest
    is noise.
    """
    random = np.random.default_rng(seed)

    def draft(cache: ScriptedCache, context: Sequence[int]) -> NDArray[np.int32]:
        geometry = cache.geometry
        drafts = random.integers(0, geometry.vocab, (geometry.gamma, geometry.k)).astype(np.int32)
        # The node's main row predicts one token; stream j predicts the one j places after it.
        truth = continuation(context, geometry.gamma + 1, geometry.vocab)[1:]
        for stream, token in enumerate(truth):
            if random.random() < oracle:
                drafts[stream, random.integers(geometry.k)] = token
        return drafts

    return draft


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("</s>", "<user>", "<assistant>", "<system>")


@cache
def make_tokenizer() -> ChatTokenizer:
    """One token a printable ASCII character after the special ones; ``</s>`` (id 0) stops."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=" "))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return ChatTokenizer(tokenizer, ChatFormat(TEMPLATE, {"eos_token": "</s>"}, (0,)))


def make_session(tree: Tree, *, oracle: float = 0.8, context: int = 200, seed: int = 0) -> Session:
    """A session that answers with hashed characters."""
    tokenizer = make_tokenizer()
    geometry = make_geometry(tree, vocab=tokenizer.tokenizer.get_vocab_size(), context=context)
    return Session(ScriptedEngine(geometry, random_drafter(seed, oracle)), tokenizer)
