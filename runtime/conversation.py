"""A conversation with an engine: the contract's three functions as Python calls, the same for every target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssdevice.contract import (
    CHUNK,
    COUNT,
    DRAFTS,
    LENGTH,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    STEP,
    TOKENS,
    VALID,
    CacheForm,
    functions,
)
from ssdevice.errors import BundleError, InputError

if TYPE_CHECKING:
    from ssdevice.runtime.engine import Cache, Engine


class Conversation:
    """One KV cache and the contract's functions on it. They do not change ``length``; only the loop does.

    ``length``: number of committed rows; going back means lowering it. ``drafts [γ, k] int32``: the draft of the last
    prefill or step, which the next step verifies. Any ids of the vocabulary may be written into it; they affect only
    the speed. ``verified``: those that the last step verified. ``text``: the tokens of the committed rows; what follows
    them is undefined, and a prefill replaces the list. ``beside``: a conversation whose memory this one may use, see
    ``Engine.new_cache``.

    The functions raise BundleError for a graph that fails or returns impossible values (nothing is committed then; Core
    ML's interpreter raises another SSDeviceError), and InputError once the engine is closed.
    """

    def __init__(self, engine: Engine, beside: Conversation | None = None) -> None:
        self.engine = engine
        self.geometry = engine.geometry
        self.length = 0
        # The integers of a function do not depend on the form of the cache.
        specs = functions(engine.geometry, CacheForm.INTERNAL, "").values()
        integers = {tensor.name: tensor.shape for spec in specs for tensor in spec.inputs}
        self._inputs: dict[str, NDArray[np.int32]] = {
            name: np.zeros([int(size) for size in shape], np.int32) for name, shape in integers.items()
        }
        self.drafts = self.verified = self._inputs[DRAFTS]
        self.text: list[int] = []
        self.cache: Cache = engine.new_cache(self._inputs, beside.cache if beside is not None else None)

    def prefill(self, chunk: Sequence[int]) -> int:
        """Write the rows of 1..C prompt tokens from ``length`` on and return the next token. Sets ``drafts``."""
        count = len(chunk)
        self._inputs[CHUNK][:count] = chunk
        self._inputs[CHUNK][count:] = 0
        self._inputs[VALID][0] = count
        out = self._call(PREFILL)
        token: int = out[NEXT_ROOT].item()
        self._keep(PREFILL, out, [token], count)
        self.text = [*self.text[: self.length], *chunk]
        return token

    def step(self, last: int) -> list[int]:
        """Verify ``drafts`` after the token ``last`` and return the 1..A emitted tokens.

        Writes the rows of ``last`` and of all emitted tokens but the last from ``length`` on, and sets ``drafts`` to
        the next draft, which follows the last of these tokens.
        """
        self._inputs[ROOT][0] = last
        self.verified = self.drafts.copy()
        out = self._call(STEP)
        count, most = int(out[COUNT].item()), self.geometry.tree.emitted
        if not 1 <= count <= most:
            raise BundleError(f"{self.engine.source}: {STEP} returned {count} tokens, expected 1 to {most}")
        tokens: list[int] = out[TOKENS].tolist()[:count]
        self._keep(STEP, out, tokens, count)
        self.text[self.length :] = [last, *tokens[:-1]]
        return tokens

    def step_plain(self, last: int) -> int:
        """Write the row of ``last`` at ``length`` and return the token after it. Does not change ``drafts``."""
        self._inputs[ROOT][0] = last
        out = self._call(PLAIN)
        token: int = out[TOKENS].item()
        self._keep(PLAIN, out, [token], 1)
        self.text[self.length :] = [last]
        return token

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of these first ``tokens`` are committed. The last one must be computed, to predict the next."""
        most = max(0, min(self.length, len(tokens) - 1))
        return next((i for i in range(most) if self.text[i] != tokens[i]), most)

    def rows(self, start: int, end: int) -> NDArray[Any] | None:
        """See ``Cache.rows``."""
        return self.cache.rows(start, end)

    def _call(self, function: str) -> Mapping[str, NDArray[Any]]:
        if self.engine.closed:
            raise InputError(f"{self.engine.source}: the session was closed")
        if function not in self.engine.functions:
            has = ", ".join(sorted(self.engine.functions))
            raise BundleError(f"{self.engine.source}: the bundle has no {function}; it has {has}")
        self._inputs[LENGTH][0] = self.length
        return self.cache.call(function, self.length)

    def _keep(self, function: str, out: Mapping[str, NDArray[Any]], tokens: list[int], rows: int) -> None:
        """Check and keep the result of a call: a damaged graph may return anything, and ids are used as indices."""
        drafts = out.get(NEXT_DRAFTS)  # apps without streams draft nothing
        ids = tokens if drafts is None else [*tokens, *drafts.ravel().tolist()]
        if min(ids) < 0 or max(ids) >= self.geometry.vocab:
            wrong = next(i for i in ids if not 0 <= i < self.geometry.vocab)
            raise BundleError(
                f"{self.engine.source}: {function} returned token {wrong}, the model has {self.geometry.vocab}"
            )
        if drafts is not None:
            self.drafts[...] = drafts
        self.cache.commit(out, self.length, rows)
