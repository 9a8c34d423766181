"""Rules between columns: what they say, and that made-up rows keep to them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import ConfigError
from fedloom.modalities.rules import breaking, keeping, rule_of
from fedloom.modalities.schema import Schema

NAN = math.nan
TREE = {
    "rules": ["a <= b", "low <= high", "if sex is male then pregnant is null", "a + c = total", "x + y = z"],
    "columns": {
        "a": {"kind": "integer", "bounds": [0, 20], "null": True},
        "b": {"kind": "integer", "bounds": [3, 15]},
        "c": {"kind": "integer", "bounds": [0, 10], "null": True},
        "total": {"kind": "integer", "bounds": [2, 12]},
        "x": {"kind": "continuous", "bounds": [0.1, 1.0]},
        "y": {"kind": "continuous", "bounds": [-1.0, 0.5]},
        "z": {"kind": "continuous", "bounds": [-0.7, 0.9]},
        "low": {"kind": "ordinal", "levels": ["none", "some", "much"]},
        "high": {"kind": "ordinal", "levels": ["none", "some", "much"], "null": True},
        "sex": {"kind": "categorical", "levels": ["male", "fe is male", "female"]},
        "pregnant": {"kind": "categorical", "levels": ["no", "yes"], "null": True},
        "day": {"kind": "date", "first": "2020-01-01", "last": "2020-02-01"},
    },
}
SCHEMA = Schema.of(TREE)
PLACE = {name: number for number, name in enumerate(SCHEMA.names)}


def record(**values: float) -> np.ndarray:
    row = np.zeros((1, len(PLACE)))
    for name, value in values.items():
        row[0, PLACE[name]] = value
    return row


@pytest.mark.parametrize(
    ("text", "values", "holds"),
    [
        ("a <= b", {"a": 4, "b": 4}, True),
        ("a <= b", {"a": 5, "b": 4}, False),
        ("a <= b", {"a": NAN, "b": 4}, True),
        ("low <= high", {"low": 2, "high": 1}, False),
        ("a + c = total", {"a": 2, "c": 3, "total": 5}, True),
        ("a + c = total", {"a": 2, "c": 3, "total": 6}, False),
        ("a + c = total", {"a": 2, "c": NAN, "total": 6}, True),
        ("x + y = z", {"x": 0.1, "y": 0.2, "z": 0.3}, True),  # which no sum of floats says
        ("if sex is male then pregnant is null", {"sex": 0, "pregnant": 1}, False),
        ("if sex is male then pregnant is null", {"sex": 0, "pregnant": NAN}, True),
        ("if sex is male then pregnant is null", {"sex": 1, "pregnant": 1}, True),
        ("if sex is fe is male then pregnant is no", {"sex": 1, "pregnant": 1}, False),
        ("if sex is not female then pregnant is no", {"sex": 0, "pregnant": 1}, False),
        ("if sex is not female then pregnant is no", {"sex": 2, "pregnant": 1}, True),
        ("if pregnant is null then sex is male", {"sex": 2, "pregnant": NAN}, False),
        ("if pregnant is not null then sex is female", {"sex": 2, "pregnant": 0}, True),
    ],
)
def test_what_a_rule_says(text: str, values: dict[str, float], holds: bool) -> None:
    rule = rule_of(text, SCHEMA.columns)
    assert rule.holds(record(**values)).tolist() == [holds]
    assert breaking([rule], record(**values)) == [not holds]
    assert rule.holds(rule.repaired(record(**values))).tolist() == [True]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), tries=st.integers(1, 4))
def test_rows_that_are_made_up_keep_to_all_rules_and_to_all_bounds(seed: int, tries: int) -> None:
    draw = np.random.default_rng(seed)
    codes = draw.integers(0, SCHEMA.sizes, (tries * 30, len(PLACE)))
    draws = SCHEMA.values(codes, draw.random(codes.shape)).reshape(tries, 30, -1)
    found = keeping(SCHEMA.checks, draws)
    assert SCHEMA.broken_rules(found) == []
    for column, values in zip(SCHEMA.columns, found.T, strict=True):
        known = values[~np.isnan(values)]
        assert column.null or len(known) == 30
        assert np.all((column.least <= known) & (known <= column.largest))
        assert not column.whole or np.all(known % 1 == 0)


def test_the_first_draw_that_keeps_to_the_rules_is_taken_as_it_is() -> None:
    rules = (rule_of("a <= b", SCHEMA.columns),)
    draws = np.stack([record(a=9, b=4), record(a=3, b=8), record(a=1, b=2)])
    assert np.array_equal(keeping(rules, draws), draws[1])
    assert np.array_equal(keeping(rules, draws[:1]), record(a=4, b=4))  # none does: it is changed
    assert np.array_equal(keeping((), draws), draws[0])


def test_a_sum_changes_its_total_and_its_parts_where_that_would_leave_its_bounds() -> None:
    rule = rule_of("a + c = total", SCHEMA.columns)
    rows = np.concatenate([record(a=3, c=4, total=12), record(a=20, c=7, total=3), record(a=0, c=0, total=9)])
    found = rule.repaired(rows)[:, [PLACE[name] for name in ("a", "c", "total")]]
    assert found.tolist() == [[3, 4, 7], [5, 7, 12], [2, 0, 2]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a < b", r"rules: 'a < b' is no rule; write 'a <= b', 'a \+ b = c' or 'if a is x then b is y'"),
        ("a <= bee", "unknown column 'bee'"),
        ("a <= a", "names a column twice"),
        ("a <= x", "columns 'a' and 'x' are of different kinds"),
        ("sex <= pregnant", "the levels of column 'sex' have no order"),
        ("a <= b <= c", "'a <= b <= c' is no rule"),
        ("low + low = high", "names a column twice"),
        ("day + day = day", "names a column twice"),
        ("low + high = sex", "the levels of column 'sex' have no order"),
        ("if sex is mail then pregnant is no", "unknown level 'mail'; did you mean 'male'"),
        ("if sex is male then pregnant is not no", "unknown level 'not no'"),
        ("if sex is null then pregnant is no", "column 'sex' has null = false"),
        ("if a is 3 then pregnant is no", "unknown level '3'"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Schema.of({**TREE, "rules": [text]})


@pytest.mark.parametrize("text", ["p <= q", "p + r = q"])
def test_a_rule_that_no_record_could_keep_to_is_refused(text: str) -> None:
    bounds = {"p": [10, 20], "q": [0, 9], "r": [0, 1]}
    columns = {name: {"kind": "integer", "bounds": pair} for name, pair in bounds.items()}
    with pytest.raises(ConfigError, match=r"can never hold: the bounds of its columns are against it"):
        Schema.of({"rules": [text], "columns": columns})


def test_rules_that_take_back_what_others_ask_for_are_refused() -> None:
    rules = [rule_of(text, SCHEMA.columns) for text in ("if sex is male then pregnant is no", "a <= b")]
    rules += [rule_of("if sex is male then pregnant is yes", SCHEMA.columns)]
    with pytest.raises(ConfigError, match="the schema's rules cannot all be kept together"):
        keeping(rules, record(sex=0)[None])
