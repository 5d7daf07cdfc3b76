"""The step contract: the functions every target exports and every runtime calls, as data.

Sizes: T nodes of the draft tree, A = its depth + 1, γ streams with k candidates each, C tokens of a
chunk, V tokens of the vocabulary, D elements of a state. All are constants of an export; only the
length of a cache that is passed in varies.

Greedy decoding takes three functions, which share one set of weights and one KV cache::

    step(root[1], drafts[γ,k], length[1], cache)
        -> tokens[A], count[1], next_drafts[γ,k], cache'
    prefill(chunk[C], count[1], length[1], cache)
        -> root[1], next_drafts[γ,k], cache'
    step_plain(root[1], length[1], cache)
        -> tokens[1], cache'

Without streams there is no ``step``, and ``prefill`` has no drafts.

A caller may also draft itself; ``next_drafts`` are then zeros. In that case there may be a step
over the first S levels of the tree, which costs less::

    step_short(root[1], drafts[S,k], length[1], cache)
        -> tokens[S+1], count[1], next_drafts[γ,k], cache'

A caller that chooses tokens itself (sampling, penalties, grammars) calls a step in two parts. The
first commits nothing; what the caller chose decides which of its rows it commits::

    verify(root[1], drafts[γ,k], length[1], cache)
        -> logits[T,V], states[T,D], rows of all T nodes
    verify_plain(root[1], length[1], cache)
        -> logits[1,V], states[1,D], rows of the root
    draft([path[A], count[1],] token[1], last_state[1,D], length[1], cache)
        -> next_drafts[γ,k] [, cache']

``last_state`` is that of the last node on the chosen path, ``token`` is what was chosen after it,
and ``length`` counts the path. With an internal cache ``verify`` writes the rows of all nodes
behind the committed ones, in the order of the nodes, and ``draft`` moves those of the ``count``
nodes in ``path`` to the front (along a chain they are there already).

The KV cache has one of two forms:

- Internal: the graph owns tensors ``keys`` and ``values`` of shape ``[layers, kv_heads, capacity,
  head_dim]`` and writes the new rows itself. A target may split both by layer (``keys.0``, .., see
  ``ssdevice.export.state_form``).
- External: the caller passes the committed rows of each layer as ``[past, kv_heads * head_dim]``.
  It gets the new rows of all layers as one tensor ``rows[2 * layers, n, kv_heads * head_dim]``
  (keys of layer 0, values of layer 0, keys of layer 1, ..), and writes them at ``length``.

Either way n rows are written: A, C, T or 1. Those beyond the count are garbage and stay masked.

The inputs for adapters, in graphs that several apps share, are not part of this contract: see
``ssdevice.adapters.slots``.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil

from ssdevice.errors import ConfigError
from ssdevice.rules import Rule, Ruled, within
from ssdevice.tree import MAX_NODES, Tree

# Functions.
STEP = "step"
PREFILL = "prefill"
PLAIN = "step_plain"
FUNCTIONS = (STEP, PREFILL, PLAIN)
STEP_SHORT = "step_short"
GREEDY = (*FUNCTIONS, STEP_SHORT)
"""The functions whose graph chooses the tokens."""
VERIFY = "verify"
VERIFY_PLAIN = "verify_plain"
DRAFT = "draft"
CHOOSING = (VERIFY, VERIFY_PLAIN, DRAFT)
"""The functions for a caller that chooses tokens."""
ONE_ROW = (PLAIN, VERIFY_PLAIN)
"""The functions on which streams have no influence."""

# Tensors.
ROOT = "root"
DRAFTS = "drafts"
LENGTH = "length"
CHUNK = "chunk"
TOKENS = "tokens"
COUNT = "count"
VALID = "valid"
NEXT_DRAFTS = "next_drafts"
NEXT_ROOT = "next_root"
ROWS = "rows"
KEYS = "keys"
VALUES = "values"
PAST = "past"
LOGITS = "logits"
"""An output ``[T, V]`` of ``verify``. Beyond this contract, a target may add it to ``step`` as the
last output.
"""
STATES = "states"
LAST_STATE = "last_state"
"""Not ``state``, which Core ML reserves."""
TOKEN = "token"
PATH = "path"

CAPACITY_MULTIPLE = 32
CACHE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_CONTEXT = 1 << 20
RANK_PATH: Rule = {"minItems": 1, "maxItems": 32, "items": within(0, MAX_NODES - 1)}


def past_key(layer: int) -> str:
    """The input for a layer's cached keys, ``[P, kv_heads * head_dim]``, with an external cache."""
    return f"past_keys.{layer}"


def past_value(layer: int) -> str:
    """The input for a layer's cached values, of the same shape as its keys."""
    return f"past_values.{layer}"


class CacheForm(StrEnum):
    """Who holds the KV cache: the caller (external), or the graph as state (internal).

    Manifests use these values.
    """

    EXTERNAL = "rows"
    INTERNAL = "state"


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and element type of one tensor; a string in the shape names a dynamic size."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


Tensors = tuple[TensorSpec, ...]


@dataclass(frozen=True)
class FunctionSpec:
    """Inputs, outputs and states of a function, in the order of the exported signature."""

    name: str
    inputs: Tensors
    outputs: Tensors
    states: Tensors = ()


@dataclass(frozen=True)
class Geometry(Ruled):
    """The constants of an export.

    - ``layers``: layers that keep rows, the model's and its draft layers.
    - ``kv_heads``, ``head_dim``, ``vocab``: the model's.
    - ``gamma``: γ, the number of streams, with ``k`` candidates each.
    - ``tree``: in JSON a list of the rank paths below the root, breadth first.
    - ``context``: tokens of a conversation.
    - ``chunk``: C, prompt tokens per prefill call.
    - ``hidden``: D, the width of a state; 0 without functions for a caller that chooses.
    - ``short``: S, the drafts that ``step_short`` verifies; 0 without it.

    Raises ConfigError for sizes out of their bounds, or that contradict each other.
    """

    layers: int = field(metadata=within(1, 1024))
    kv_heads: int = field(metadata=within(1, 4096))
    head_dim: int = field(metadata=within(1, 8192))
    vocab: int = field(metadata=within(1, 1 << 24))
    gamma: int = field(metadata=within(0, 32))
    k: int = field(metadata=within(1, MAX_NODES))
    tree: Tree = field(metadata={"maxItems": MAX_NODES - 1, "items": RANK_PATH})
    context: int = field(metadata=within(1, MAX_CONTEXT))
    chunk: int = field(metadata=within(1, 1 << 16))
    hidden: int = field(default=0, metadata=within(0, 1 << 20))
    short: int = field(default=0, metadata=within(0, 31))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > self.vocab:
            raise ConfigError(f"k is {self.k}, the model has {self.vocab} tokens")
        self.tree.check(self.gamma, self.k)
        if self.short and self.short >= self.tree.depth:
            raise ConfigError(f"short is {self.short}, the tree is {self.tree.depth} deep")
        if self.context <= self.tree.size:
            raise ConfigError(
                f"context {self.context} cannot hold a draft tree of {self.tree.size} nodes"
            )

    @property
    def capacity(self) -> int:
        """Cache rows: enough for every fixed-size write at a length within the context."""
        written_by_step = self.tree.size if self.hidden else self.tree.emitted
        rows = self.context + max(written_by_step, self.chunk)
        blocks = ceil(rows / CAPACITY_MULTIPLE)
        return blocks * CAPACITY_MULTIPLE

    @property
    def shorter(self) -> "Geometry":
        """The geometry of a step over the tree's first levels."""
        return replace(self, gamma=self.short, tree=self.tree.levels(self.short), short=0)

    @property
    def plain(self) -> "Geometry":
        """The geometry of plain decoding."""
        return replace(self, gamma=0, k=1, tree=Tree.root_only(), short=0)

    @property
    def row_width(self) -> int:
        """Elements of one cache row of one layer's keys."""
        return self.kv_heads * self.head_dim

    def token_bytes(self, cache_dtype: str) -> int:
        """Bytes of the cache for each token: keys and values of all layers."""
        return 2 * self.layers * self.row_width * CACHE_BYTES[cache_dtype]


def functions(geometry: Geometry, cache: CacheForm, cache_dtype: str) -> dict[str, FunctionSpec]:
    """The contract of an export: function name -> FunctionSpec. Integers are int32 everywhere."""
    g = geometry

    def function(name: str, inputs: Tensors, outputs: Tensors, new_rows: int) -> FunctionSpec:
        """A function of these tensors and the cache, to which it adds ``new_rows``."""
        if cache is CacheForm.INTERNAL:
            shape = (g.layers, g.kv_heads, g.capacity, g.head_dim)
            keys = TensorSpec(KEYS, shape, cache_dtype)
            values = TensorSpec(VALUES, shape, cache_dtype)
            return FunctionSpec(name, inputs, outputs, states=(keys, values))
        past = list[TensorSpec]()
        for layer in range(g.layers):
            past.append(TensorSpec(past_key(layer), (PAST, g.row_width), cache_dtype))
            past.append(TensorSpec(past_value(layer), (PAST, g.row_width), cache_dtype))
        if new_rows:
            rows = TensorSpec(ROWS, (2 * g.layers, new_rows, g.row_width), cache_dtype)
            outputs = (*outputs, rows)
        return FunctionSpec(name, (*inputs, *past), outputs)

    def int32(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, shape, "int32")

    def seen(nodes: int) -> Tensors:
        """What a caller that chooses sees of so many nodes."""
        logits = TensorSpec(LOGITS, (nodes, g.vocab), "float32")
        states = TensorSpec(STATES, (nodes, g.hidden), "float32")
        return logits, states

    emitted = g.tree.emitted
    root = int32(ROOT, 1)
    length = int32(LENGTH, 1)
    count = int32(COUNT, 1)
    drafts = int32(DRAFTS, g.gamma, g.k)
    next_drafts = int32(NEXT_DRAFTS, g.gamma, g.k)
    specs = [
        function(
            STEP,
            inputs=(root, drafts, length),
            outputs=(int32(TOKENS, emitted), count, next_drafts),
            new_rows=emitted,
        ),
        function(
            PREFILL,
            inputs=(int32(CHUNK, g.chunk), int32(VALID, 1), length),
            outputs=(int32(NEXT_ROOT, 1), next_drafts),
            new_rows=g.chunk,
        ),
        function(PLAIN, inputs=(root, length), outputs=(int32(TOKENS, 1),), new_rows=1),
    ]
    if g.short:
        most = g.short + 1
        short_step = function(
            STEP_SHORT,
            inputs=(root, int32(DRAFTS, g.short, g.k), length),
            outputs=(int32(TOKENS, most), count, next_drafts),
            new_rows=most,
        )
        specs.append(short_step)
    if g.hidden:
        nodes = g.tree.size
        path = (int32(PATH, emitted), count) if cache is CacheForm.INTERNAL else ()
        last_state = TensorSpec(LAST_STATE, (1, g.hidden), "float32")
        specs += [
            function(VERIFY, inputs=(root, drafts, length), outputs=seen(nodes), new_rows=nodes),
            function(VERIFY_PLAIN, inputs=(root, length), outputs=seen(1), new_rows=1),
            function(
                DRAFT,
                inputs=(*path, int32(TOKEN, 1), last_state, length),
                outputs=(next_drafts,),
                new_rows=0,
            ),
        ]
    return {spec.name: spec for spec in specs}
