"""The reference follows every function of an artifact through its products; see ``products``."""

from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from ssdevice import contract
from ssdevice.contract import (
    COUNT,
    NEXT_DRAFTS,
    NEXT_ROOT,
    PLAIN,
    PREFILL,
    ROOT,
    ROWS,
    STEP,
    STEP_SHORT,
    TOKENS,
)
from ssdevice.errors import ParityError
from ssdevice.export.exporter import ExportJob
from ssdevice.export.parity.difference import Array, as_stored, stored_difference
from ssdevice.export.parity.products import Bounds, Call, Follower, Shown
from ssdevice.export.parity.reference import Drafts, TorchDriver, force_drafts, random_prompt


def follow(job: ExportJob, shown: Shown, bounds: Bounds) -> dict[str, float]:
    """Prefill of a whole and a part of a chunk, plain steps, a step of every depth, of an artifact
    that is then closed.

    Raises ParityError.
    """
    g = job.plan.geometry
    walk = Walk(job, shown, bounds)
    prompt = random_prompt(
        g, min(g.chunk + g.chunk // 2 + 1, max(1, g.context - 2 * g.tree.emitted))
    )
    root = 0
    ends = [g.tree.depths.index(depth) for depth in range(g.tree.depth + 1)] if g.gamma else []
    steps = [(STEP, g, node) for node in ({*ends, g.tree.size - 1} if ends else ())]
    steps += [(STEP_SHORT, g.shorter, depth) for depth in range(1, g.short + 1)]
    plain = min(g.tree.emitted + 1, g.context - len(prompt) - g.tree.emitted)
    calls = len(range(0, len(prompt), g.chunk)) + plain + len(steps)
    done = count()

    def report(function: str) -> None:
        job.report(
            "check parity", next(done), 2 * calls, f"products of {function}"
        )  # results are the other half

    for at in range(0, len(prompt), g.chunk):
        report(PREFILL)
        root = walk.prefill(prompt[at : at + g.chunk], at)
    truth = [root]
    for i in range(plain):
        report(PLAIN)
        truth.append(walk.plain(truth[-1], len(prompt) + i))
    draw = np.random.default_rng(1)
    for name, geometry, node in steps:
        report(name)
        drafts = force_drafts(geometry, node, truth[1:], draw)
        walk.step(name, truth[0], drafts, len(prompt), geometry.tree.path_table[node])
    shown.close()
    found = walk.follower
    return {
        "products": float(found.count),
        "product_error": found.worst_product,
        "input_error": found.worst_rows,
    }


class Walk:
    """Calls an artifact with the reference's rows as its past, and lets the reference follow each
    call.
    """

    def __init__(self, job: ExportJob, shown: Shown, bounds: Bounds) -> None:
        self.shown = shown
        self.bounds = bounds
        self.geometry = job.plan.geometry
        self.reference = TorchDriver(job)
        self.follower = Follower(job.loaded.model, shown, bounds, job.plan.schedule)

    def prefill(self, tokens: Sequence[int], length: int) -> int:
        """One chunk; the next token."""
        chunk = np.zeros(self.geometry.chunk, np.int32)
        chunk[: len(tokens)] = tokens
        where = f"{PREFILL} of {len(tokens)} tokens at {length}"
        call = self._call(
            PREFILL, {contract.CHUNK: chunk, contract.VALID: _int(len(tokens))}, length
        )
        root, drafts = self.follower.follow(
            where, call, lambda: self.reference.prefill(tokens, length)
        )
        self._same_ids(
            where, NEXT_ROOT, int(call.outputs[NEXT_ROOT].item()), root, self.reference.main[-1]
        )
        if self.geometry.gamma:
            self._same_drafts(where, call, drafts)
        self._same_rows(where, call, length, len(tokens))
        return root

    def plain(self, root: int, length: int) -> int:
        """One plain step; the next token."""
        where = f"{PLAIN} at {length}"
        call = self._call(PLAIN, {ROOT: _int(root)}, length)
        token = self.follower.follow(where, call, lambda: self.reference.plain(root, length))
        self._same_ids(
            where, TOKENS, int(call.outputs[TOKENS].reshape(-1)[0]), token, self.reference.main[0]
        )
        self._same_rows(where, call, length, 1)
        return token

    def step(self, name: str, root: int, drafts: Drafts, length: int, path: Sequence[int]) -> None:
        """One step over forced drafts that should end at the last node of ``path``."""
        where = f"{name} to node {path[-1]}"
        call = self._call(
            name, {ROOT: _int(root), contract.DRAFTS: np.array(drafts, np.int32)}, length
        )
        theirs = self.follower.follow(
            where, call, lambda: self.reference.step(root, drafts, length)
        )
        if (count := int(call.outputs[COUNT].item())) != len(theirs.tokens):
            raise ParityError(
                f"{where}: {COUNT} is {count}, but the artifact's own logits accept "
                f"{len(theirs.tokens)}"
            )
        for i, (mine, token) in enumerate(
            zip(call.outputs[TOKENS][:count].tolist(), theirs.tokens, strict=True)
        ):
            self._same_ids(
                where,
                f"{TOKENS}[{i}]",
                mine,
                token,
                self.reference.main[path[min(i, len(path) - 1)]],
            )
        self._same_drafts(where, call, theirs.drafts)
        self._same_rows(where, call, length, count)

    def _call(self, function: str, integers: dict[str, Array], length: int) -> Call:
        past = self.reference.cache.rows[..., :length, :]
        past.copy_(torch.from_numpy(as_stored(past.numpy(), self.shown.dtype)))
        inputs = {**integers, contract.LENGTH: _int(length)}
        return self.shown.call(function, inputs, length, self.reference.rows(0, length))

    def _same_drafts(self, where: str, call: Call, theirs: Drafts) -> None:
        for j, (mine, row) in enumerate(
            zip(call.outputs[NEXT_DRAFTS].tolist(), theirs, strict=True)
        ):
            for rank, (a, b) in enumerate(zip(mine, row, strict=True)):
                self._same_ids(where, f"{NEXT_DRAFTS}[{j},{rank}]", a, b, self.reference.streams[j])

    def _same_ids(self, where: str, name: str, mine: int, theirs: int, logits: Array) -> None:
        same_ids(f"{where}: {name}", mine, theirs, logits, self.bounds.product)

    def _same_rows(self, where: str, call: Call, length: int, count: int) -> None:
        mine = call.outputs[ROWS][:, :count]
        theirs = self.reference.rows(length, length + count)
        if mine.shape != theirs.shape:
            raise ParityError(f"{where}: {ROWS} has shape {mine.shape}, not {theirs.shape}")
        for at, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            if not (off := stored_difference(one, other)) <= self.bounds.rows:
                raise ParityError(
                    f"{where}: the rows to commit, {'values' if at % 2 else 'keys'} of layer "
                    f"{at // 2}, differ by {off:.2g} of their size, allowed is "
                    f"{self.bounds.rows:g}. The products are right: rotary "
                    "embedding, a norm of keys, or the choice of accepted rows is not the model's"
                )


def same_ids(name: str, mine: int, theirs: int, logits: Array, bound: float) -> None:
    """Raise ParityError unless the ids are equal, or nearly tied in the ``logits [V]`` behind them.

    ``bound``: relative difference of products. Tokens outside a draft vocabulary have logits of
    minus infinity.
    """
    if mine == theirs:
        return
    near = bound * float(np.abs(logits[np.isfinite(logits)]).max())
    if not 0 <= mine < len(logits) or abs(float(logits[mine] - logits[theirs])) > near:
        raise ParityError(f"{name} is {mine}, but the artifact's own logits say {theirs}")


def _int(value: int) -> Array:
    return np.array([value], np.int32)
