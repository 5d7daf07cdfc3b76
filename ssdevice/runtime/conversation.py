"""A conversation with an engine: the contract's functions as Python calls, the same for every
target.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssdevice import contract
from ssdevice.errors import BundleError, InputError
from ssdevice.runtime.generation import emitted_nodes
from ssdevice.runtime.sampling.choice import Chooser, walk

if TYPE_CHECKING:
    from ssdevice.runtime.engine import Cache, Engine, Outputs


class Conversation:
    """One KV cache and the contract's functions on it.

    ``length``: number of committed rows. Only the loop changes it; going back means lowering it.
    ``text``: the tokens of the committed rows. What follows them is undefined, and a prefill
    replaces the list.
    ``drafts [γ, k] int32``: the drafts of the last prefill or step, which the next step verifies.
    Any ids of the vocabulary may be written into it; they affect only the speed.
    ``verified [γ, k] int32``: the drafts that the last step verified.
    ``short``: how many drafts a short step verifies; 0 without one.
    ``cancelled``: the answer ends before the next call.

    ``chooser``: chooses the tokens of ``step`` and ``step_plain`` from logits. None: the graph
    does, greedily.
    ``forced``: the tokens that it cannot but choose next; they take the place of drafts.
    ``allows``: whether it could choose a token next.
    ``typical``: see ``Chooser``.

    ``beside``: a conversation whose memory this one may use, see ``Engine.new_cache``.

    The functions raise BundleError for a graph that fails or returns impossible values (nothing is
    committed then; Core ML's interpreter raises another SSDeviceError), and InputError once the
    engine is closed.
    """

    def __init__(self, engine: "Engine", beside: "Conversation | None" = None) -> None:
        self.engine = engine
        self.geometry = engine.geometry
        self.length = 0
        self.text: list[int] = []
        self.cancelled = False
        self.short = engine.geometry.short if contract.STEP_SHORT in engine.functions else 0
        self.chosen_by(None)
        self._inputs: dict[str, NDArray[np.int32]] = {}
        # With an internal cache functions are given the same integers, or more. Those that share a
        # name share memory: a step comes before a short one, which takes the first of its drafts.
        specs = contract.functions(engine.geometry, contract.CacheForm.INTERNAL, "")
        for spec in specs.values():
            for tensor in spec.inputs:
                shape = [int(size) for size in tensor.shape]
                self._inputs.setdefault(tensor.name, np.zeros(shape, tensor.dtype))
        self.drafts = self._inputs[contract.DRAFTS]
        self.verified = self.drafts
        self.cache: Cache = engine.new_cache(
            self._inputs, beside.cache if beside is not None else None
        )

    def chosen_by(self, chooser: Chooser | None) -> None:
        """Let a chooser choose the tokens of the next answer; None: the graph does."""
        self.chooser: Callable[[NDArray[np.float32]], int] | None = chooser
        self.forced: Callable[[], Sequence[int]] = tuple
        self.allows: Callable[[int], bool] = lambda token: True
        self.typical: Callable[..., Sequence[int]] = lambda tree, drafts, logits: (0,)
        if chooser is not None:
            self.forced = chooser.forced
            self.allows = chooser.allows
            self.typical = chooser.typical

    def prefill(self, chunk: Sequence[int]) -> int:
        """The token after 1..C tokens of a prompt.

        Writes their rows from ``length`` on, and sets ``drafts``.
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
        """The 1..A tokens after ``last``: accepted drafts, then the model's own next token.

        Writes the rows of ``last`` and of all these tokens but the last one from ``length`` on, and
        sets ``drafts``. ``short``: verifies the first drafts only, where the graph chooses.
        """
        if self.chooser is not None:
            return self._step_chosen(last, self.chooser)
        function = contract.STEP
        most = self.geometry.tree.emitted
        self.verified = self.drafts.copy()
        if short:
            function = contract.STEP_SHORT
            most = self.short + 1
            self.verified = self.verified[: self.short]
        self._inputs[contract.ROOT][0] = last
        out = self._call(function)
        count = int(out[contract.COUNT].item())
        if not 1 <= count <= most:
            raise BundleError(
                f"{self.engine.source}: {function} returned {count} tokens, expected 1 to {most}"
            )
        tokens: list[int] = out[contract.TOKENS].tolist()[:count]
        self._keep(function, out, tokens, count)
        self.text[self.length :] = [last, *tokens[:-1]]
        return tokens

    def _step_chosen(self, last: int, choose: Callable[[NDArray[np.float32]], int]) -> list[int]:
        """``step`` where the host chooses."""
        tree = self.geometry.tree
        for depth, token in zip(range(len(self.drafts)), self.forced(), strict=False):
            self.propose(depth, token)
        logits = self.verify(last)
        taken = self.typical(tree, self.verified, logits)
        path, tokens = walk(tree, self.verified, lambda node: choose(logits[node]), taken)
        self.keep(path, tokens)
        return tokens

    def step_plain(self, last: int) -> int:
        """The token after ``last``, whose row is written at ``length``. Leaves ``drafts``."""
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
        """Whether a step could emit more than one token.

        The structure forces the next one, or allows a draft of it.
        """
        return bool(self.forced()) or any(map(self.allows, self.drafts[:1].ravel().tolist()))

    def propose(self, depth: int, token: int) -> None:
        """Draft a token ``depth`` places after the next one.

        The candidate that it replaces becomes the next best.
        """
        candidates = self.drafts[depth].tolist()
        others = [each for each in candidates if each != token]
        self.drafts[depth] = [token, *others][: len(candidates)]

    def verify(self, last: int) -> NDArray[np.float32]:
        """The logits ``[T, V]`` of the tree of ``drafts`` after ``last``.

        They are valid until the next call. ``keep`` then commits a path through the tree.
        """
        self.verified = self.drafts.copy()
        return self._logits(contract.VERIFY, last)

    def verify_plain(self, last: int) -> NDArray[np.float32]:
        """The logits ``[1, V]`` after ``last``, whose row ``keep`` then commits."""
        return self._logits(contract.VERIFY_PLAIN, last)

    def keep(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit a ``path`` from the root through the last verification's nodes.

        ``tokens``: one after each node. After a tree, ``drafts`` become those that follow the last
        of these tokens.
        """
        out = self._seen
        rows = out
        # Along a chain the path's rows are the first ones already.
        if contract.ROWS in out and not self.geometry.tree.is_chain:
            rows = {contract.ROWS: out[contract.ROWS][:, path]}
        self.cache.commit(rows, self.length, len(path))
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
        for at in range(most):
            if self.text[at] != tokens[at]:
                return at
        return most

    def _logits(self, function: str, last: int) -> NDArray[np.float32]:
        self._inputs[contract.ROOT][0] = last
        return self._call(function)[contract.LOGITS]

    def _call(self, function: str, length: int | None = None) -> "Outputs":
        if self.engine.closed:
            raise InputError(f"{self.engine.source}: the session was closed")
        if function not in self.engine.functions:
            known = ", ".join(sorted(self.engine.functions))
            raise BundleError(f"{self.engine.source}: the bundle has no {function}; it has {known}")
        if length is None:
            length = self.length
        self._inputs[contract.LENGTH][0] = length
        self._seen = self.cache.call(function, length)
        return self._seen

    def _keep(self, function: str, out: "Outputs", tokens: list[int], rows: int) -> None:
        """Check and keep the result of a call.

        A damaged graph may return anything, and ids are used as indices.
        """
        drafts = out.get(contract.NEXT_DRAFTS)
        if drafts is None:  # an app without streams drafts nothing
            self._check(function, tokens)
        else:
            self._check(function, [*tokens, *drafts.ravel().tolist()])
            self.drafts[...] = drafts
        self.cache.commit(out, self.length, rows)

    def _check(self, function: str, ids: list[int]) -> None:
        vocab = self.geometry.vocab
        if min(ids) >= 0 and max(ids) < vocab:
            return
        for token in ids:
            if not 0 <= token < vocab:
                raise BundleError(
                    f"{self.engine.source}: {function} returned token {token}, "
                    f"the model has {vocab}"
                )
