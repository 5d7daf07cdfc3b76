"""A target without a model: the next token is a hash of the committed rows, so a wrong row changes every answer."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from ssdevice.contract import FUNCTIONS, Geometry
from ssdevice.runtime.engine import Conversation, Engine
from ssdevice.runtime.session import Session
from ssdevice.text.chat_template import ChatFormat
from ssdevice.text.tokenizer import ChatTokenizer
from ssdevice.tree import Tree

GARBAGE = -7
Drafter = Callable[["ScriptedConversation", Sequence[int]], NDArray[np.int32]]
"""``(conversation, context) -> drafts [γ, k]`` after the tokens of ``context``."""


def next_token(context: Sequence[int], vocab: int) -> int:
    """The model: any change in what came before gives another continuation."""
    return zlib.crc32(np.asarray(context, dtype=np.int64).tobytes()) % vocab


def continuation(prompt: Sequence[int], count: int, vocab: int) -> list[int]:
    """The first ``count`` tokens of greedy decoding, without any loop of the product."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class ScriptedConversation(Conversation):
    """Rows hold the token they came from. Writes are of fixed size and refuse to pass the capacity."""

    def __init__(self, geometry: Geometry, drafter: Drafter) -> None:
        super().__init__(geometry)
        self.rows = np.full(geometry.capacity, GARBAGE, dtype=np.int64)
        self.drafter = drafter
        self.calls = 0

    def prefill(self, chunk: Sequence[int]) -> int:
        assert 1 <= len(chunk) <= self.geometry.chunk
        self.write([*chunk, *[GARBAGE] * (self.geometry.chunk - len(chunk))])
        return self.predict(chunk, draft=True)

    def step(self, root: int) -> list[int]:
        self.calls += 1
        geometry, tree = self.geometry, self.geometry.tree
        slots = [root, *self.drafts.reshape(-1).tolist()]
        tokens = [slots[slot] for slot in tree.token_slots(geometry.k)]
        past = self.rows[: self.length].tolist()
        paths = [[tokens[node] for node in dict.fromkeys(row)] for row in tree.path_table]
        predicted = [next_token([*past, *path], geometry.vocab) for path in paths]
        stands = [True] * tree.size
        for node in range(1, tree.size):
            parent = tree.parents[node]
            stands[node] = stands[parent] and tokens[node] == predicted[parent]
        end = max(range(tree.size), key=lambda node: (stands[node], tree.depths[node], -node))
        self.write([*paths[end], *[GARBAGE] * (tree.emitted - len(paths[end]))])
        self.draft([*past, *paths[end]])
        return [predicted[node] for node in dict.fromkeys(tree.path_table[end])]

    def step_plain(self, root: int) -> int:
        self.calls += 1
        self.write([root])
        return self.predict([root], draft=False)

    def write(self, rows: Sequence[int]) -> None:
        assert self.length + len(rows) <= self.geometry.capacity, "a write beyond the cache"
        self.rows[self.length : self.length + len(rows)] = rows

    def predict(self, new: Sequence[int], draft: bool) -> int:
        context = [*self.rows[: self.length].tolist(), *new]
        assert GARBAGE not in context, "an uncommitted row was used"
        if draft:
            self.draft(context)
        return next_token(context, self.geometry.vocab)

    def draft(self, context: Sequence[int]) -> None:
        if self.geometry.gamma:
            self.drafts[:] = self.drafter(self, context)


class ScriptedEngine(Engine):
    """Gives scripted conversations."""

    def __init__(self, geometry: Geometry, drafter: Drafter) -> None:
        super().__init__(geometry, frozenset(FUNCTIONS))
        self.drafter = drafter

    def new_conversation(self) -> ScriptedConversation:
        return ScriptedConversation(self.geometry, self.drafter)

    def close(self) -> None:
        pass


def make_geometry(tree: Tree, *, k: int = 0, vocab: int = 11, context: int = 40, chunk: int = 4) -> Geometry:
    """A geometry whose model sizes do not matter."""
    k = max(k, tree.width)
    return Geometry(1, 1, 1, vocab, tree.depth, k, tree, context, chunk)


def random_drafter(seed: int, oracle: float) -> Drafter:
    """Drafts of which about a share ``oracle`` are the true continuation at a random rank; the rest is noise."""
    random = np.random.default_rng(seed)

    def draft(conversation: ScriptedConversation, context: Sequence[int]) -> NDArray[np.int32]:
        geometry = conversation.geometry
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
