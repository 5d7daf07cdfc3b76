"""Quality of answers as one number per example, so that means and paired intervals can be computed.

- ``exact_match``: whether the answer equals a target. Columns: ``exact_match`` and
  ``exact_match_normalized``.
- ``final_answer``: whether the number after ``####`` is the target's. Column: ``final_answer``.
- ``rouge``: F-measure of ROUGE-1 and ROUGE-Lsum against the best target. Columns: ``rouge1`` and
  ``rougeLsum``.

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

    words = _QUOTED.sub(lift, text.replace(QUOTE, "")).casefold().split()
    plain = _AROUND_SIGN.sub(r"\1", " ".join(words))
    first, *others = plain.rstrip("; ").split(QUOTE)
    whole = first
    for inner, piece in zip(quoted, others, strict=True):
        whole += f'"{inner}"{piece}'
    return whole


def final_answer(text: str) -> Decimal | None:
    """The number after the first ``####`` of a worked solution: ``#### $1,234.0`` is 1234.

    None if there is no such number.
    """
    found = _ANSWER.search(text)
    if found is None:
        return None
    minus_before_currency, minus, digits = found.groups()
    value = Decimal(digits.replace(",", ""))
    if minus_before_currency or minus:
        return -value
    return value


def exact_match(predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """1 for an answer that equals a target.

    Surrounding space does not count; in the second column, answers are compared after
    ``normalize_query``.
    """
    equal = list[float]()
    equal_normalized = list[float]()
    for prediction, example in zip(predictions, examples, strict=True):
        targets = [target.strip() for target in example.targets]
        equal.append(float(prediction.strip() in targets))
        queries = [normalize_query(target) for target in example.targets]
        equal_normalized.append(float(normalize_query(prediction) in queries))
    return {"exact_match": equal, "exact_match_normalized": equal_normalized}


def final_answer_match(predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """1 for an answer whose number after ``####`` equals that of a target: 1,000 is 1000.0.

    Raises InputError if no target of an example has such a number.
    """
    scores = []
    for number, (prediction, example) in enumerate(zip(predictions, examples, strict=True), 1):
        accepted = {final_answer(target) for target in example.targets} - {None}
        if not accepted:
            raise InputError(
                f"example {number}: its completion has no '{ANSWER_MARK} number'; "
                "choose another metric"
            )
        scores.append(float(final_answer(prediction) in accepted))
    return {"final_answer": scores}


def rouge(predictions: Sequence[str], examples: Sequence[Example]) -> Scores:
    """F-measure of ROUGE-1 and ROUGE-Lsum, for English text.

    The rouge-score library computes it, with its stemmer. Of several targets the best counts, for
    each measure. Sentences, which ROUGE-Lsum matches one by one, end at ``.``, ``!`` or ``?``
    before a space, or at a line break. Raises MissingExtraError without rouge-score.
    """
    with needs_extra("bench"):
        from rouge_score.rouge_scorer import RougeScorer
    scorer = RougeScorer(("rouge1", "rougeLsum"), use_stemmer=True)
    rouge1 = list[float]()
    rouge_lsum = list[float]()
    for prediction, example in zip(predictions, examples, strict=True):
        targets = [_sentence_lines(target) for target in example.targets]
        best = scorer.score_multi(targets, _sentence_lines(prediction))
        rouge1.append(float(best["rouge1"].fmeasure))
        rouge_lsum.append(float(best["rougeLsum"].fmeasure))
    return {"rouge1": rouge1, "rougeLsum": rouge_lsum}


def _sentence_lines(text: str) -> str:
    """A text with each sentence on a line of its own."""
    return _SENTENCE_END.sub("\n", text)


Metric = Callable[[Sequence[str], Sequence[Example]], Scores]
METRICS: Mapping[str, Metric] = {
    "exact_match": exact_match,
    "final_answer": final_answer_match,
    "rouge": rouge,
}


def choose_metric(examples: Sequence[Example], wanted: str | None = None) -> str | None:
    """The metric ``wanted``, or the one that suits the data.

    ``final_answer`` if every example is a worked solution, ``rouge`` if any has references, else
    ``exact_match``. Summaries whose only target is their completion look like queries: name
    ``rouge`` for them. None if an example has nothing to compare answers with.
    """
    if wanted is not None:
        return wanted
    if not all(example.targets for example in examples):
        return None
    if examples and all(map(_is_worked_solution, examples)):
        return "final_answer"
    if any(example.references for example in examples):
        return "rouge"
    return "exact_match"


def _is_worked_solution(example: Example) -> bool:
    return any(final_answer(target) is not None for target in example.targets)


def check_metric(examples: Sequence[Example], wanted: str | None) -> None:
    """Raise what scoring answers to these examples would raise, before they are answered."""
    metric = choose_metric(examples, wanted)
    if metric is not None:
        answers = [next(iter(example.targets), "") for example in examples]
        score(metric, answers, examples)


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
