"""Compares plain decoding of a bundle with its other modes, and with that of another bundle.

One of the modes has *forced* drafts: they put the plain answer on one tree path after another, with
wrong ids everywhere else, until every node was the end of an accepted run. An untrained or badly
matched app accepts too few of its own drafts for that.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from ssdevice.bench.equality import Answer, Answerer, Asked, Comparison, Rows
from ssdevice.bundle.manifest import Precision
from ssdevice.contract import PLAIN, STEP
from ssdevice.errors import BundleError
from ssdevice.runtime.conversation import Conversation
from ssdevice.runtime.engine import Engine
from ssdevice.runtime.loop import (
    PLAIN_STEP,
    SPECULATIVE,
    Advance,
    decode,
    plain,
    plain_step,
    prefill,
    speculative,
)
from ssdevice.text.stream import Emission

FORCED = "forced"
OTHER = "other bundle"


def greedy(
    conversation: Conversation, shown: Engine | None, asked: Asked, advance: Advance | set[int]
) -> Answerer:
    """Answers prompts of token ids greedily in one decoding mode, or with forced drafts.

    ``advance``: the mode; or, for forced drafts, a set that collects the nodes at which their runs
    ended. ``shown``: an engine of the same bundle that shows logits, if there is one.
    """

    def answered(ids: Sequence[int], expected: Sequence[int]) -> Answer:
        if isinstance(advance, set):
            decoding = forcer(len(ids), expected, advance)
            showing = forcer(len(ids), expected, set())
        else:
            decoding = advance
            showing = advance
        tokens = answer(conversation, ids, decoding, asked.stop_ids, asked.max_tokens)
        return Answer(tokens, lambda: shown_rows(shown, ids, expected or tokens, showing))

    return answered


def shown_rows(
    shown: Engine | None, ids: Sequence[int], truth: Sequence[int], advance: Advance
) -> Rows | None:
    """Logits ``[len(truth), vocab]`` of a mode kept on ``truth`` after ``ids``.

    None without an engine. The last prompt token is decoded, because prefill shows no logits.
    """
    if shown is None:
        return None
    return led(shown.new_conversation(), ids[:-1], [ids[-1], *truth], advance)


def compare_modes(engine: Engine, shown: Engine | None, asked: Asked) -> Comparison:
    """Decode prompts in all modes of an engine.

    ``shown``: an engine that also shows logits, if the target has one.
    """
    result = Comparison(asked.precision, len(asked.prompts), nodes=engine.geometry.tree.size)
    by = partial(greedy, engine.new_conversation(), shown, asked)
    base = plain_of(engine)
    others = dict[str, Answerer]()
    if STEP in engine.functions:
        if base is plain:
            others[PLAIN_STEP] = by(plain_step)
        others[SPECULATIVE] = by(speculative)
        others[FORCED] = by(result.nodes_ended)
    return result.compare("compare decoding modes", asked.prompts, by(base), others, asked.report)


class Agreement(Comparison):
    """The result of ``against_bundle``.

    Two quantizations of a model are two models, which may differ.
    """

    def faults(self) -> list[str]:
        """Those of a comparison between float32 bundles; none for other precisions."""
        if self.precision is not Precision.FP32:
            return []
        return self.unexcused()


def against_bundle(
    mine: Engine | None,
    other: Engine,
    other_shown: Engine | None,
    asked: Asked,
    answers: Sequence[list[int]],
) -> Agreement:
    """Decode prompts with ``other`` and compare with ``answers``, as far as its context holds them.

    ``mine`` and ``other_shown`` show logits; ``asked`` has the coarser precision of both. Raises
    ContextOverflowError for a prompt that is longer than the context.
    """
    base = plain_of(other)
    room = other.geometry.context + 1
    decode = greedy(other.new_conversation(), other_shown, asked, base)

    def given(case: tuple[Sequence[int], list[int]], _: Sequence[int]) -> Answer:
        ids, whole = case
        tokens = whole[: room - len(ids)]
        showing = plain_of(mine) if mine is not None else base
        return Answer(tokens, lambda: shown_rows(mine, ids, tokens, showing))

    def of_other(case: tuple[Sequence[int], list[int]], cut: Sequence[int]) -> Answer:
        ids, _ = case
        return decode(ids, cut)

    result = Agreement(asked.precision, len(asked.prompts), between="the bundles")
    cases = list(zip(asked.prompts, answers, strict=True))
    return result.compare("compare bundles", cases, given, {OTHER: of_other}, asked.report)


def plain_of(engine: Engine) -> Advance:
    """Plain decoding with the functions that an engine has."""
    return plain if PLAIN in engine.functions else plain_step


def answer(
    conversation: Conversation,
    ids: Sequence[int],
    advance: Advance,
    stop_ids: Sequence[int],
    max_tokens: int,
) -> list[int]:
    """The tokens of one answer, without text."""

    def accept(run: Sequence[int]) -> Emission:
        for count, token in enumerate(run, 1):
            if token in stop_ids:
                return Emission("", count, True)
        return Emission("", len(run), False)

    conversation.length = 0
    tokens = list[int]()
    for run in decode(conversation, ids, advance, accept, max_tokens):
        tokens += run.tokens
    return tokens


def forcer(prompt_tokens: int, truth: Sequence[int], ended: set[int]) -> Advance:
    """An ``Advance`` that forces ``truth`` onto one tree path per step, with wrong ids elsewhere.

    It takes the paths node by node, then those of a short step, if there is one. ``ended`` collects
    the nodes of the whole tree at which runs ended.
    """
    turn = 0
    paths = list[tuple[int, ...]]()

    def advance(conversation: Conversation, last: int) -> Sequence[int]:
        nonlocal turn
        g = conversation.geometry
        if not paths:
            paths.extend(g.tree.paths)
            if conversation.short:
                paths.extend(g.shorter.tree.paths)
        # The index in truth of what follows the last token.
        at = conversation.length - prompt_tokens + 1
        node = turn % len(paths)
        turn += 1
        path = paths[node]
        whole = node < g.tree.size
        for stream in range(g.gamma):
            true = truth[at + stream] if at + stream < len(truth) else 0
            conversation.drafts[stream] = (true + 1 + np.arange(g.k)) % g.vocab
            if stream < len(path) and at + stream < len(truth):
                conversation.drafts[stream, path[stream]] = true
        run = conversation.step(last, short=not whole)
        if whole and len(run) == len(path) + 1:
            ended.add(node)
        return run

    return advance


def lead(
    conversation: Conversation, ids: Sequence[int], truth: Sequence[int], advance: Advance
) -> Iterator[int]:
    """Keep a mode on ``truth`` after ``ids``, whatever it chooses.

    Yields how many tokens of it each call stood for: 0 for the prefill, then the first and those
    after it as long as the mode chose them itself.
    """
    conversation.length = 0
    if ids:
        prefill(conversation, ids)
    yield 0
    at = 0
    while at + 1 < len(truth):
        run = advance(conversation, truth[at])
        kept = 1
        while kept < len(run) and at + kept + 1 < len(truth) and run[kept - 1] == truth[at + kept]:
            kept += 1
        conversation.length += kept
        at += kept
        yield kept


def led(
    conversation: Conversation, ids: Sequence[int], truth: Sequence[int], advance: Advance
) -> Rows:
    """Logits ``[len(truth) - 1, vocab]`` of a mode kept on ``truth`` after ``ids``.

    Raises BundleError for logits that are not finite.
    """
    rows: list[Rows] = []
    for kept in lead(conversation, ids, truth, advance):
        if not kept:  # prefill shows no logits
            continue
        logits = conversation.logits[:kept]
        if not np.isfinite(logits).all():
            raise BundleError(
                f"{conversation.engine.source}: logits are not finite; export the bundle again"
            )
        rows.extend(logits)
    if not rows:
        return np.zeros((0, conversation.geometry.vocab), np.float32)
    return np.stack(rows)
