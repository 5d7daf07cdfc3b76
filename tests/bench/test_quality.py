"""Quality metrics: what counts as right, example by example."""

from __future__ import annotations

import sys
from decimal import Decimal

import pytest

from ssdevice.bench.quality import METRICS, choose_metric, final_answer, normalize_query, score
from ssdevice.data import Example
from ssdevice.errors import InputError, MissingExtraError

QUERY = 'SELECT name FROM t WHERE city = "New York"'


@pytest.mark.parametrize(
    ("answer", "strict", "normalized"),
    [
        (QUERY, 1, 1),
        (f"  {QUERY}\n", 1, 1),
        ('select NAME from t\nwhere city="New York" ;', 0, 1),
        ("SELECT name FROM t WHERE city = 'New York'", 0, 1),
        ('SELECT name FROM t WHERE city = "new york"', 0, 0),
        ('SELECT name FROM t WHERE city = "New  York"', 0, 0),
        ('SELECT name FROM t WHERE city = "New York', 0, 0),
        ("SELECT name FROM t WHERE city = New York", 0, 0),
        ("", 0, 0),
    ],
)
def test_exact_match_is_strict_or_normalized(answer: str, strict: float, normalized: float) -> None:
    scores = score("exact_match", [answer], [Example("p", QUERY)])
    assert scores == {"exact_match": [strict], "exact_match_normalized": [normalized]}


def test_normalization_keeps_what_is_quoted_and_loses_no_words() -> None:
    assert normalize_query("A  ( B , c )  = \"X  y\" AND d='It;' ; ") == 'a(b,c)="X  y" and d="It;"'
    assert normalize_query("a b") != normalize_query("ab")
    assert normalize_query('x = "a" "b"') != normalize_query('x = "b" "a"')
    assert normalize_query("x\0y") == "xy"


def test_exact_match_takes_any_reference() -> None:
    example = Example("p", "one", ("two", "three"))
    assert score("exact_match", ["three", "one"], [example, example])["exact_match"] == [1, 0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("so\n#### 1234", "1234"),
        ("#### 1,234.0", "1234"),
        ("####$5.50 each", "5.5"),
        ("#### -$3", "-3"),
        ("#### $-3.", "-3"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### 4\n#### 5", "4"),
        ("4", None),
        ("#### none", None),
        ("####", None),
    ],
)
def test_final_answer_is_the_number_after_the_mark(text: str, value: str | None) -> None:
    assert final_answer(text) == (None if value is None else Decimal(value))


def test_final_answers_are_compared_as_numbers() -> None:
    examples = [Example("p", "a\n#### 1,000")] * 3
    assert score("final_answer", ["b\n#### 1000.00", "#### 100", "1000"], examples) == {
        "final_answer": [1, 0, 0]
    }
    with pytest.raises(InputError, match="example 1: its completion has no '#### number'"):
        score("final_answer", ["#### 1"], [Example("p", "one")])


def test_rouge_takes_the_best_reference_for_each_column() -> None:
    pytest.importorskip("rouge_score", reason="the rouge metric needs the bench extra")
    example = Example("p", "The cat sat.", ("The cat sat. It purred.", "A dog barks"))
    scores = score("rouge", ["It purred. The cat sat.", "A dog barked", "", "zebra"], [example] * 4)
    # Sentences are matched one by one, so their order does not matter to ROUGE-Lsum; barks and
    # barked share a stem.
    assert scores["rougeLsum"] == [1, 1, 0, 0]
    assert scores["rouge1"] == [1, 1, 0, 0]
    half = score("rouge", ["the cat"], [Example("p", "the cat sat down")])
    assert half["rouge1"] == half["rougeLsum"] == [pytest.approx(2 * 1 * 0.5 / 1.5)]


def test_rouge_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ssdevice\[bench\]'"):
        score("rouge", ["a"], [Example("p", "a")])


def test_metric_is_chosen_by_the_data() -> None:
    worked = Example("p", "a\n#### 4")
    described = Example("p", "a", ("a", "b"))
    query = Example("p", QUERY)
    assert choose_metric([worked, worked]) == "final_answer"
    assert choose_metric([query, described]) == "rouge"
    for examples in ([query], [worked, query], []):
        assert choose_metric(examples) == "exact_match"
    assert choose_metric([query, Example("p")]) is None
    assert choose_metric([query], "rouge") == "rouge"
    assert choose_metric([Example("p")], "rouge") == "rouge"


def test_wrong_input_is_named() -> None:
    for metric in METRICS:
        with pytest.raises(InputError, match="example 1 has neither a completion nor references"):
            score(metric, ["a"], [Example("p")])
