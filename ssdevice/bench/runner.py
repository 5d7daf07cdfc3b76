"""Measures a session: the same prompts in every decoding mode, interleaved, over several rounds."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ssdevice.bench.machine import Load, LoadWatch
from ssdevice.bench.statistics import Interval, Spread, speedup, spread
from ssdevice.contract import PLAIN, STEP
from ssdevice.data import Example
from ssdevice.errors import ContextOverflowError, InputError
from ssdevice.progress import Report
from ssdevice.rules import POSITIVE, Ruled
from ssdevice.runtime.generation import Drafts, Generation
from ssdevice.runtime.loop import ADAPTIVE, PLAIN_STEP, SPECULATIVE
from ssdevice.runtime.sampling.options import Sampling
from ssdevice.runtime.session import Session
from ssdevice.text.tokenizer import ChatTokenizer

WARM_UP_PROMPTS = 2
"""Prompts that run in every mode before times count."""


def fitting(
    examples: Sequence[Example],
    tokenizer: ChatTokenizer,
    instruction: str | None,
    most: int,
    skip_long: bool | None = None,
    file: Path | None = None,
) -> tuple[list[Example], list[list[int]]]:
    """The examples whose prompts have at most ``most`` tokens, and the ids of each.

    - ``instruction``: the app's, which goes before each prompt.
    - ``skip_long``: leave out the other examples; None if the user has no such option.
    - ``file``: where the examples are from.

    Raises InputError, or ContextOverflowError for a prompt that does not fit; both name the prompt.
    """
    kept = []
    prompts = []
    for number, example in enumerate(examples, 1):
        try:
            ids = tokenizer.prompt_ids(
                example.prompt, instruction=instruction, system=example.system, most=most
            )
            if len(ids) > most:
                raise ContextOverflowError(
                    f"the prompt has {len(ids)} tokens, at most {most} fit into the context"
                )
        except InputError as error:
            long = isinstance(error, ContextOverflowError)
            if long and skip_long:
                continue
            hint = "; --skip-long leaves out such prompts" if long and skip_long is False else ""
            where = f"{file}, prompt" if file is not None else "prompt"
            raise type(error)(f"{where} {number}: {error}{hint}") from error
        kept.append(example)
        prompts.append(ids)
    if not prompts:
        raise InputError("no prompt fits the context")
    return kept, prompts


@dataclass
class Acceptance:
    """Counts over steps.

    A draft is judged by the answer itself, whether or not its step got that far.

    - ``held``: (stream from 1, rank) -> how often that candidate was the true token.
    - ``judged``: stream -> how often the answer was long enough to tell.
    - ``emitted``: tokens of a step, after truncation -> number of steps.
    """

    held: Counter[tuple[int, int]] = field(default_factory=Counter)
    judged: Counter[int] = field(default_factory=Counter)
    emitted: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: Sequence[int], steps: Sequence[tuple[Drafts, int]]) -> None:
        """Count one answer: its ``tokens``, and the drafts and number of tokens of each step."""
        at = 1  # the first token came from prefill
        for drafts, count in steps:
            self.emitted[count] += 1
            for stream, candidates in enumerate(drafts, 1):
                if at + stream > len(tokens):
                    break
                self.judged[stream] += 1
                true = tokens[at + stream - 1]
                if true in candidates:
                    self.held[stream, candidates.index(true)] += 1
            at += count

    def histogram(self, emitted: int) -> list[int]:
        """Number of steps that emitted 1, 2, .. ``emitted`` tokens."""
        return [self.emitted[n] for n in range(1, emitted + 1)]

    def table(self, gamma: int, k: int) -> list[list[float]]:
        """``[γ, k]`` shares: how often candidate r of stream j was the true token.

        They are 0 where nothing was judged.
        """
        rows = list[list[float]]()
        for stream in range(1, gamma + 1):
            judged = max(self.judged[stream], 1)
            rows.append([self.held[stream, rank] / judged for rank in range(k)])
        return rows


@dataclass(frozen=True)
class BenchOptions(Ruled):
    """``rounds``: how often each prompt runs in each mode.

    ``skip_long``: leave out prompts beyond the context. ``sampling``: how tokens are chosen; None:
    greedily.
    """

    rounds: int = field(default=3, metadata=POSITIVE)
    max_tokens: int = field(default=128, metadata=POSITIVE)
    skip_long: bool = False
    sampling: Sampling | None = None


@dataclass
class Measured:
    """The answers of one decoding mode. ``rounds``: answers by round, then by prompt."""

    name: str
    rounds: list[list[Generation]] = field(default_factory=list)

    def add(self, number: int, answer: Generation) -> None:
        """Add the answer to the next prompt of round ``number``, from 0."""
        if number == len(self.rounds):
            self.rounds.append([])
        self.rounds[number].append(answer)

    @property
    def answers(self) -> list[Generation]:
        """The answers of the first round, by prompt."""
        return self.rounds[0]

    def differing(self, reference: "Measured") -> list[int]:
        """Prompts (from 0) whose tokens differ in any round from the first of ``reference``."""
        found = list[int]()
        for at, expected in enumerate(reference.answers):
            if any(answers[at].tokens != expected.tokens for answers in self.rounds):
                found.append(at)
        return found

    def over(self, other: "Measured") -> Interval | None:
        """Time of ``other`` over time of this, by emitted token, since answers may differ.

        It is taken prompt by prompt; None if no prompt took a step in both.
        """
        own_seconds = list[float]()
        other_seconds = list[float]()
        for own_answers, other_answers in zip(self.rounds, other.rounds, strict=True):
            for own, its in zip(own_answers, other_answers, strict=True):
                if own.steps and its.steps:
                    own_seconds.append(own.decode_seconds / sum(own.accepted))
                    other_seconds.append(its.decode_seconds / sum(its.accepted))
        if not own_seconds:
            return None
        return speedup(other_seconds, own_seconds)

    def per_round(self, value: Callable[[Generation], float]) -> Spread:
        """Spread over rounds of ``value``, which maps the total of a round to a number."""
        return spread([value(Generation.total(answers)) for answers in self.rounds])

    def seconds(self) -> list[float]:
        """Decoding time of each prompt that took a step: the median over rounds."""
        found = list[float]()
        for answers in zip(*self.rounds, strict=True):
            if answers[0].steps:
                found.append(median(answer.decode_seconds for answer in answers))
        return found

    @property
    def prompt_tokens_per_second(self) -> list[float | None]:
        """The speed on each prompt: the median over rounds, None for an answer of one token."""
        found = list[float | None]()
        for answers in zip(*self.rounds, strict=True):
            if answers[0].steps:
                found.append(median(answer.tokens_per_second for answer in answers))
            else:
                found.append(None)
        return found

    @property
    def tokens_per_second(self) -> Spread:
        """Tokens emitted by steps over the time of steps, without prefill."""
        return self.per_round(lambda total: total.tokens_per_second)

    @property
    def tokens_per_step(self) -> float:
        """β over all prompts: tokens emitted by steps (after truncation) over steps."""
        return Generation.total(self.answers).tokens_per_step

    @property
    def ttft_ms(self) -> Spread:
        """Milliseconds to the first token: the median over prompts, spread over rounds."""
        medians = list[float]()
        for answers in self.rounds:
            medians.append(median(answer.prefill_seconds * 1e3 for answer in answers))
        return spread(medians)

    @property
    def prefill_tokens_per_second(self) -> Spread:
        """Prompt tokens over the time to the first token."""
        return self.per_round(lambda total: total.prompt_tokens / total.prefill_seconds)

    @property
    def host_us_per_step(self) -> Spread:
        """Microseconds of a step outside the target's runtime: loop, cache and text."""
        return self.per_round(lambda total: total.host_us_per_step)

    @property
    def ms_per_step(self) -> Spread:
        """Milliseconds of a step, with the host's work; 0 without steps."""
        return self.per_round(lambda total: total.decode_seconds * 1e3 / max(1, total.steps))

    @property
    def native_ms_per_step(self) -> Spread:
        """Milliseconds of a step inside the target's runtime."""
        return self.per_round(lambda total: total.native_seconds * 1e3 / max(1, total.steps))


@dataclass(frozen=True)
class BenchResult:
    """What was measured.

    ``skipped``: number of prompts left out because they exceed the context.
    """

    examples: list[Example]
    modes: dict[str, Measured]
    acceptance: Acceptance
    load: Load
    skipped: int

    @property
    def baseline(self) -> Measured | None:
        """The faster plain mode; None if nothing plain was measured."""
        plain = [mode for name, mode in self.modes.items() if name not in (SPECULATIVE, ADAPTIVE)]
        return max(plain, key=lambda mode: mode.tokens_per_second.median, default=None)

    def differing(self, name: str) -> list[int]:
        """Prompts (from 0) on which a mode gave other tokens than the first mode.

        See ``Measured.differing``.
        """
        first = next(iter(self.modes.values()))
        return self.modes[name].differing(first)

    @property
    def equal(self) -> bool:
        """Whether all modes emitted the same tokens in all rounds."""
        return not any(self.differing(name) for name in self.modes)

    @property
    def speedup(self) -> Interval | None:
        """Decoding time of the faster plain mode over that of the speculative mode.

        With an interval over prompts; by token where their answers differ.
        """
        baseline = self.baseline
        speculative = self.modes.get(SPECULATIVE)
        if speculative is None or baseline is None:
            return None
        if speculative.differing(baseline):
            return speculative.over(baseline)
        plain_seconds = baseline.seconds()
        seconds = speculative.seconds()
        if not plain_seconds or len(plain_seconds) != len(seconds):
            return None
        return speedup(plain_seconds, seconds)


def available_modes(functions: Collection[str], streams: bool) -> list[str]:
    """The modes of an app with these functions, a plain one first.

    ``plain`` uses the T = 1 graph, ``plain_step`` the step graph without its drafts. Without
    ``streams`` all drafts repeat the text, as those of the adaptive mode may.
    """
    has_plain = PLAIN in functions
    names = ["plain"] if has_plain else []
    if STEP in functions:
        names.append(PLAIN_STEP)
        if streams:
            names.append(SPECULATIVE)
        if has_plain:
            names.append(ADAPTIVE)
    return names


def measure(
    session: Session, examples: Sequence[Example], options: BenchOptions, report: Report
) -> BenchResult:
    """Run every prompt in every mode, ``options.rounds`` times.

    Modes alternate prompt by prompt and take turns to go first, so that a drift of the machine
    affects all alike. Raises ContextOverflowError for a prompt that does not fit, unless
    ``skip_long``.
    """
    context = session.engine.geometry.context
    kept, prompts = fitting(
        examples, session.tokenizer, session.instruction, context, options.skip_long
    )
    names = available_modes(session.engine.functions, session.streams)
    modes = [Measured(name) for name in names if options.sampling is None or name != PLAIN_STEP]
    acceptance = Acceptance()
    for ids in prompts[:WARM_UP_PROMPTS]:
        for mode in modes:
            timed_answer(session, ids, mode.name, options)
    watch = LoadWatch()
    for number, at, lane in take_turns(options.rounds, len(prompts), len(modes), report):
        mode = modes[lane]
        counts = acceptance if number == 0 and mode.name == SPECULATIVE else None
        mode.add(number, timed_answer(session, prompts[at], mode.name, options, counts))
    return BenchResult(
        examples=kept,
        modes={mode.name: mode for mode in modes},
        acceptance=acceptance,
        load=watch.load(),
        skipped=len(examples) - len(kept),
    )


def take_turns(
    rounds: int, prompts: int, lanes: int, report: Report
) -> Iterator[tuple[int, int, int]]:
    """The order of a measurement: (round, prompt, lane), all from 0.

    Every lane runs a prompt before the next one begins, and another lane goes first each time.
    """
    for number in range(rounds):
        for at in range(prompts):
            turn = (number + at) % lanes
            for lane in (*range(turn, lanes), *range(turn)):
                yield number, at, lane
            report("bench", number * prompts + at + 1, rounds * prompts, f"round {number + 1}")


def timed_answer(
    session: Session,
    ids: Sequence[int],
    mode: str,
    options: BenchOptions,
    acceptance: Acceptance | None = None,
) -> Generation:
    """An answer with its times; what its drafts were worth is added to ``acceptance``."""
    session.reset()  # nothing of the prompt is in the cache
    first = 0  # tokens of the first run, which came from prefill
    steps = []
    runs = session.runs(ids, max_tokens=options.max_tokens, mode=mode, sampling=options.sampling)
    for run in runs:
        if not first:
            first = len(run.tokens)
        if run.drafts is not None:
            steps.append((run.drafts.tolist(), len(run.tokens)))
    if acceptance is not None:
        acceptance.add(session.last.tokens[first - 1 :], steps)
    return session.last
