"""Quality of answers as one number per example, so that means and paired intervals can be computed.

========================  =============================================================
==========================
metric                    what counts                                                    columns
========================  =============================================================
==========================
``exact_match``           the answer equals a target
``exact_match``,
                                                                                         ``exact_match_normalized``
``final_answer``          the number after ``####`` is the target's
``final_answer``
``rouge``                 F-measure of ROUGE-1 and ROUGE-Lsum against the best target    ``rouge1``,
``rougeLsum``
========================  =============================================================
==========================

Targets of an example are its references, or its completion if it has none. All values are in 0..1.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from ssdevice.data import Example
from ssdevice.errors import InputError, needs_extra

Scores = dict[str, list[float]]
ANSWER_MARK = "####"
QUOTE = "\0"  # replaces quoted text while the rest is normalized

_ANSWER = re.compile(ANSWER_MARK + r"\s*(-?)\s*\$?\s*(-?)(\d[\d,]*(?:\.\d+)?|\.\d+)")
_QUOTED = re.compile(r""""[^"]*"|'[^']*'""")
_AROUND_SIGN = re.compile(r"\s*([(),;=<>!+*/-])\s*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def normalize_query(text: str) -> str:
    """A query as ``exact_match_normalized`` compares it.

    Outside quotes: lower case, one space between words, none around signs, no final semicolon.
    Quoted text is kept; single and double quotes are the same.
    """
    quoted: list[str] = []

    def lift(found: re.Match[str]) -> str:
        quoted.append(found.group()[1:-1])
        return QUOTE

    plain = _AROUND_SIGN.sub(
        r"\1", " ".join(_QUOTED.sub(lift, text.replace(QUOTE, "")).casefold().split())
    )
    pieces = plain.rstrip("; ").split(QUOTE)
    return pieces[0] + "".join(
        f'"{inner}"{piece}' for inner, piece in zip(quoted, pieces[1:], strict=True)
    )


def final_answer(text: str) -> Decimal | None:
    """The number after the first ``####`` of a worked solution, or None: ``#### $1,234.0`` is 1234."""
    if (found := _ANSWER.search(text)) is None:
        return None
    before, after, digits = found.groups()
    value = Decimal(digits.replace(",", ""))
    return -value if before or after else value


def exact_match(predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """1 for an answer that equals a target: apart from surrounding space, and after
    ``normalize_query``.
    """
    pairs = list(zip(predictions, examples, strict=True))
    forms: dict[str, Callable[[str], str]] = {
        "exact_match": str.strip,
        "exact_match_normalized": normalize_query,
    }
    return {
        name: [float(form(p) in map(form, e.targets)) for p, e in pairs]
        for name, form in forms.items()
    }


def final_answer_match(predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """1 for an answer whose number after ``####`` equals that of a target, as numbers (1,000 =
    1000.0).

    Raises InputError if no target of an example has such a number.
    """
    scores = []
    for i, (prediction, example) in enumerate(zip(predictions, examples, strict=True)):
        accepted = {
            answer for target in example.targets if (answer := final_answer(target)) is not None
        }
        if not accepted:
            raise InputError(
                f"example {i + 1}: its completion has no '{ANSWER_MARK} number'; choose another metric"
            )
        scores.append(float(final_answer(prediction) in accepted))
    return {"final_answer": scores}


def rouge(predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """F-measure of ROUGE-1 and ROUGE-Lsum by the rouge-score library with its stemmer, for English
    text.

    Of several targets the best counts, for each measure. Sentences, which ROUGE-Lsum matches one by
    one, end at ``.``, ``!`` or ``?`` before a space, or at a line break. Raises MissingExtraError
    without rouge-score.
    """
    with needs_extra("bench"):
        from rouge_score.rouge_scorer import RougeScorer
    columns = ("rouge1", "rougeLsum")
    scorer = RougeScorer(columns, use_stemmer=True)
    best = [
        scorer.score_multi(
            [_SENTENCE_END.sub("\n", t) for t in example.targets],
            _SENTENCE_END.sub("\n", prediction),
        )
        for prediction, example in zip(predictions, examples, strict=True)
    ]
    return {column: [float(each[column].fmeasure) for each in best] for column in columns}


Metric = Callable[[Sequence[str], Sequence[Example]], Scores]
METRICS: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "final_answer": final_answer_match,
    "rouge": rouge,
}


def choose_metric(examples: Sequence[Example], wanted: str | None = None) -> str | None:
    """The metric ``wanted``, or the one that suits the data; None without anything to compare
    answers with.

    ``final_answer`` if every example is a worked solution, ``rouge`` if any has references, else
    ``exact_match``. Summaries whose only target is their completion look like queries: name
    ``rouge`` for them.
    """
    if wanted is not None or not all(example.targets for example in examples):
        return wanted
    if examples and all(
        any(final_answer(target) is not None for target in e.targets) for e in examples
    ):
        return "final_answer"
    return "rouge" if any(e.references for e in examples) else "exact_match"


def check_metric(examples: Sequence[Example], wanted: str | None) -> None:
    """Raise what scoring answers to these examples would raise, before they are answered."""
    if (metric := choose_metric(examples, wanted)) is not None:
        score(metric, [next(iter(example.targets), "") for example in examples], examples)


def score(metric: str, predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """Column -> one value per example, in order.

    ``metric``: one of METRICS. Raises InputError for an example without a target.
    """
    for i, example in enumerate(examples):
        if not example.targets:
            raise InputError(
                f"example {i + 1} has neither a completion nor references to compare with"
            )
    return METRICS[metric](predictions, examples)
