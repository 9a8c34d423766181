from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fedloom.reports.logs import UNREADABLE, finite, histories, last, read_rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (-0.5, -0.5),
        (1e308, 1e308),
        (math.nan, None),
        (-math.inf, None),
        (10**400, None),
        (True, None),
        ("1", None),
        (None, None),
        ([1], None),
    ],
)
def test_only_finite_numbers_count(value: Any, expected: float | None) -> None:
    assert finite(value) == expected


def test_histories_are_sorted_by_round_and_later_rows_win() -> None:
    rows = [{"round": 2, "train/nll": 5.0}, {"round": 1, "train/nll": math.nan, "note": "x", "whole": True}]
    rows.append({"round": 2, "train/nll": 4.0})
    assert histories(rows) == {"train/nll": {1: None, 2: 4.0}}
    assert list(histories(rows)["train/nll"]) == [1, 2]


def test_the_last_value_is_that_of_the_newest_round() -> None:
    assert last({1: 3.0, 7: 2.0}) == 2.0
    assert last({}) is None


def test_rows_without_a_round_and_broken_lines_are_dropped(tmp_path: Path) -> None:
    good = {"round": 3, "train/kl": 1.5}
    lines = ['{"round": 1, "tr', "[1, 2]", "7", "null", '{"train/kl": 1}', '{"round": "2"}', '{"round": -1}']
    lines += ['{"round": true}', '{"round": 1e9}', '{"round": 1000000000}', json.dumps(good)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_rows(tmp_path / "metrics.jsonl") == [good]
    assert read_rows(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("content", [b"\xff\xfe{}", b"[" * 100_000, b"9" * 5000])
def test_a_file_that_is_no_log_at_all_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UNREADABLE):
        read_rows(tmp_path / "metrics.jsonl")
