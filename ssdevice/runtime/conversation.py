"""A conversation with an engine: the contract's three functions as Python calls, the same for every
target.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ssdevice import contract
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.generation import emitted_nodes
from ssdevice.runtime.sampling.choice import Chooser, walk

if TYPE_CHECKING:
    from ssdevice.runtime.engine import Cache, Engine


class Conversation:
    """One KV cache and the contract's functions on it.

    They do not change ``length``; only the loop does.

    ``length``: number of committed rows; going back means lowering it. ``drafts [γ, k] int32``: the
    draft of the last prefill or step, which the next step verifies. Any ids of the vocabulary may
    be written into it; they affect only the speed. ``verified``: those that the last step verified.
    ``short``: how many a short step does; 0 without one. ``text``: the tokens of the committed
    rows; what follows them is undefined, and a prefill replaces the list. ``chooser``: chooses the
    tokens of ``step`` and ``step_plain`` from logits; None: the graph does, greedily. ``forced``:
    the tokens that it cannot but choose next, which take the place of drafts; ``allows``: whether
    it could choose a token next; ``typical``: see ``Chooser``. ``cancelled``: the answer ends
    before the next call. ``beside``: a conversation whose memory this one may use, see
    ``Engine.new_cache``.

    The functions raise BundleError for a graph that fails or returns impossible values (nothing is
    committed then; Core ML's interpreter raises another SSDeviceError), and InputError once the
    engine is closed.
    """

    def __init__(self, engine: "Engine", beside: "Conversation | None" = None) -> None:
        self.engine = engine
        self.geometry = engine.geometry
        self.length = 0
        self.cancelled = False
        # With an internal cache functions are given the same, or more.
        specs = contract.functions(engine.geometry, contract.CacheForm.INTERNAL, "").values()
        given = [tensor for spec in specs for tensor in spec.inputs]
        self._inputs = {
            t.name: np.zeros(list(map(int, t.shape)), t.dtype) for t in reversed(given)
        }  # step's drafts
        self.short = engine.geometry.short if contract.STEP_SHORT in engine.functions else 0
        self.drafts = self.verified = self._inputs[contract.DRAFTS]
        self.text: list[int] = []
        self.chosen_by(None)
        self.cache: Cache = engine.new_cache(
            self._inputs, beside.cache if beside is not None else None
        )

    def chosen_by(self, chooser: Chooser | None) -> None:
        """Let a chooser choose the tokens of the next answer; None: the graph does."""
        self.chooser: Callable[[NDArray[np.float32]], int] | None = chooser
        self.forced: Callable[[], Sequence[int]] = chooser.forced if chooser else tuple
        self.allows: Callable[[int], bool] = chooser.allows if chooser else lambda token: True
        self.typical: Callable[..., Sequence[int]] = (
            chooser.typical if chooser else lambda tree, drafts, logits: (0,)
        )

    def prefill(self, chunk: Sequence[int]) -> int:
        """Write the rows of 1..C prompt tokens from ``length`` on and return the next token.

        Sets ``drafts``.
        """
        count = len(chunk)
        self._inputs[contract.CHUNK][:count] = chunk
        self._inputs[contract.CHUNK][count:] = 0
        self._inputs[contract.VALID][0] = count
        out = self._call(contract.PREFILL)
        token: int = out[contract.NEXT_ROOT].item()
        self._keep(contract.PREFILL, out, [token], count)
        self.text = [*self.text[: self.length], *chunk]
        return token

    def step(self, last: int, short: bool = False) -> list[int]:
        """Verify ``drafts`` after the token ``last``; returns the 1..A emitted tokens and sets the
        next ``drafts``.

        Writes the rows of ``last`` and of all emitted tokens but the last from ``length`` on.
        ``short``: verify the first ones only, where the graph chooses.
        """
        if (choose := self.chooser) is not None:
            for depth, token in zip(range(len(self.drafts)), self.forced(), strict=False):
                self.propose(depth, token)
            logits = self.verify(last)
            taken = self.typical(self.geometry.tree, self.verified, logits)
            path, chosen = walk(
                self.geometry.tree, self.verified, lambda node: choose(logits[node]), taken
            )
            self.keep(path, chosen)
            return chosen
        self._inputs[contract.ROOT][0] = last
        name, most = (
            (contract.STEP_SHORT, self.short + 1)
            if short
            else (contract.STEP, self.geometry.tree.emitted)
        )
        self.verified = self.drafts[: self.short if short else None].copy()
        out = self._call(name)
        count = int(out[contract.COUNT].item())
        if not 1 <= count <= most:
            raise BundleError(
                f"{self.engine.source}: {name} returned {count} tokens, expected 1 to {most}"
            )
        tokens: list[int] = out[contract.TOKENS].tolist()[:count]
        self._keep(name, out, tokens, count)
        self.text[self.length :] = [last, *tokens[:-1]]
        return tokens

    def step_plain(self, last: int) -> int:
        """Write the row of ``last`` at ``length`` and return the token after it.

        Does not change ``drafts``.
        """
        if self.chooser is not None:
            chosen = self.chooser(self.verify_plain(last)[0])
            self.keep([0], [chosen])
            return chosen
        self._inputs[contract.ROOT][0] = last
        out = self._call(contract.PLAIN)
        token: int = out[contract.TOKENS].item()
        self._keep(contract.PLAIN, out, [token], 1)
        self.text[self.length :] = [last]
        return token

    def hopeful(self) -> bool:
        """Whether a step could emit more than one token: the structure forces the next, or allows a
        draft of it.
        """
        return bool(self.forced()) or any(map(self.allows, self.drafts[:1].ravel().tolist()))

    def propose(self, depth: int, token: int) -> None:
        """Draft a token ``depth`` places after the next one; the candidate that it replaces becomes
        the next best.
        """
        candidates = self.drafts[depth].tolist()
        self.drafts[depth] = [token, *(each for each in candidates if each != token)][
            : len(candidates)
        ]

    def verify(self, last: int) -> NDArray[np.float32]:
        """The logits ``[T, V]`` of the tree of ``drafts`` after ``last``; ``keep`` then commits a
        path through it.

        They are valid until the next call.
        """
        self.verified = self.drafts.copy()
        return self._logits(contract.VERIFY, last)

    def verify_plain(self, last: int) -> NDArray[np.float32]:
        """The logits ``[1, V]`` after ``last`` alone, whose row ``keep`` then commits."""
        return self._logits(contract.VERIFY_PLAIN, last)

    def keep(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Write the rows of the last verification's nodes on a ``path`` from the root; ``tokens``:
        one after each.

        After a tree, ``drafts`` become the next draft, which follows the last of these tokens.
        """
        out = self._seen  # along a chain the path's rows are the first ones already
        there = self.geometry.tree.is_chain or contract.ROWS not in out
        self.cache.commit(
            out if there else {contract.ROWS: out[contract.ROWS][:, path]}, self.length, len(path)
        )
        self.text[self.length :] = [int(self._inputs[contract.ROOT][0]), *tokens[:-1]]
        if len(out[contract.LOGITS]) == 1 or contract.DRAFT not in self.engine.functions:
            return
        self._inputs[contract.PATH][: len(path)] = path
        self._inputs[contract.COUNT][0] = len(path)
        self._inputs[contract.TOKEN][0] = tokens[-1]
        self._inputs[contract.LAST_STATE][0] = out[contract.STATES][path[-1]]
        after = self._call(contract.DRAFT, self.length + len(path))
        self._check(contract.DRAFT, after[contract.NEXT_DRAFTS].ravel().tolist())
        self.drafts[...] = after[contract.NEXT_DRAFTS]

    @property
    def logits(self) -> NDArray[np.float32]:
        """Logits ``[emitted, V]`` from which the last ``step`` or ``step_plain`` chose its tokens.

        For engines that show them (``ExportTarget.logits_engine``).
        """
        rows = self._seen[contract.LOGITS].reshape(-1, self.geometry.vocab)
        if len(rows) == 1:
            return rows.copy()
        tokens = self._seen[contract.TOKENS].tolist()[: int(self._seen[contract.COUNT].item())]
        return rows[emitted_nodes(self.geometry.tree, self.verified.tolist(), tokens)]

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of these first ``tokens`` are committed.

        The last one must be computed, to predict the next.
        """
        most = max(0, min(self.length, len(tokens) - 1))
        return next((i for i in range(most) if self.text[i] != tokens[i]), most)

    def _logits(self, function: str, last: int) -> NDArray[np.float32]:
        self._inputs[contract.ROOT][0] = last
        return self._call(function)[contract.LOGITS]

    def _call(self, function: str, length: int | None = None) -> Mapping[str, NDArray[Any]]:
        if self.engine.closed:
            raise InputError(f"{self.engine.source}: the session was closed")
        if function not in self.engine.functions:
            has = ", ".join(sorted(self.engine.functions))
            raise BundleError(f"{self.engine.source}: the bundle has no {function}; it has {has}")
        length = self.length if length is None else length
        self._inputs[contract.LENGTH][0] = length
        self._seen = self.cache.call(function, length)
        return self._seen

    def _keep(
        self, function: str, out: Mapping[str, NDArray[Any]], tokens: list[int], rows: int
    ) -> None:
        """Check and keep the result of a call: a damaged graph may return anything, and ids are
        used as indices.
        """
        drafts = out.get(contract.NEXT_DRAFTS)  # apps without streams draft nothing
        self._check(function, tokens if drafts is None else [*tokens, *drafts.ravel().tolist()])
        if drafts is not None:
            self.drafts[...] = drafts
        self.cache.commit(out, self.length, rows)

    def _check(self, function: str, ids: list[int]) -> None:
        vocab = self.geometry.vocab
        if min(ids) < 0 or max(ids) >= vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise BundleError(
                f"{self.engine.source}: {function} returned token {wrong}, the model has {vocab}"
            )
