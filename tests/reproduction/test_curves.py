from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedloom.errors import ConfigError
from fedloom.reports.charts import ROWS, Curve, row_chart
from fedloom.reproduction import tables
from fedloom.reproduction.rendering import render_pages
from fedloom.reproduction.tables import load_table
from reproduction.test_rendering import put, rendered

SVG = "{http://www.w3.org/2000/svg}"
CURVES = [
    Curve("one <first>", {"1": [2.0], "2": [4.0, 6.0], "3": [], "4": [1.0, 1.0, 4.0]}),
    Curve("two", {"2": [3.0], "many": [8.0]}),
]
DECLARED = 'curve = { column = "distance", across = "method" }\n'


def test_points_are_means_with_bars_of_a_deviation() -> None:
    root = ElementTree.fromstring(row_chart(CURVES, "rows", "values"))
    groups = root.findall(f"{SVG}g")
    told = [group.findtext(f"{SVG}title") for group in groups]
    assert told == ["1: 2.00 ± 0.00", "2: 5.00 ± 1.41", "4: 2.00 ± 1.73", "2: 3.00 ± 0.00", "many: 8.00 ± 0.00"]
    places = [(float(circle.attrib["cx"]), float(circle.attrib["cy"])) for circle in root.iter(f"{SVG}circle")]
    (first, low), (second, high), (fourth, again), (same, _), (last, top) = places
    assert same == second  # a row of both has one place, and rows stand at equal distances
    assert second - first == pytest.approx((fourth - second) / 2, abs=0.2) == pytest.approx(last - fourth, abs=0.2)
    assert again == low
    assert (low - high) / 3 == pytest.approx((high - top) / 3, abs=0.1)  # 2, 5 and 8
    bars = [group.find(f"{SVG}path") for group in groups]
    ends = [[float(y) for y in re.findall(r"[ V]([\d.]+)", bar.attrib["d"])] for bar in bars if bar is not None]
    assert len(ends) == 5
    assert all(ROWS.top <= y <= ROWS.bottom for bar in ends for y in bar)
    assert ends[1][0] - ends[1][1] == pytest.approx(2 * 2**0.5 * (low - high) / 3, abs=0.2)


def test_a_row_without_runs_is_a_gap() -> None:
    lines = re.findall(r'<path d="(M[^"]+)" fill="none"', row_chart(CURVES, "rows", "values"))
    assert [re.sub(r"[\d. ]", "", line) for line in lines] == ["MLM", "MM"]


def declare(curve: str) -> None:
    table = tables.TABLES / "tiny" / "table1.toml"
    table.write_text(curve + table.read_text())


def test_a_page_shows_the_curve_of_its_results(paper: Path) -> None:
    declare(DECLARED)
    assert "svg" not in rendered(paper)  # nothing to draw yet
    put(paper, "first/d", 0, 0.25)
    assert "![distance, by method](figures/table1.svg)" in rendered(paper)
    figure = paper / "figures" / "table1.svg"
    assert "<title>+D: 0.25 ± 0.00</title>" in figure.read_text(encoding="utf-8")
    assert render_pages(paper, [load_table("tiny/table1")]) == []
    put(paper, "first/d", 1, 0.75)
    assert render_pages(paper, [load_table("tiny/table1")]) == [paper / "README.md", figure]
    assert "<title>+D: 0.50 ± 0.35</title>" in figure.read_text(encoding="utf-8")


@pytest.mark.usefixtures("paper")
def test_a_curve_of_an_unknown_column_is_refused() -> None:
    declare(DECLARED.replace("distance", "distances"))
    with pytest.raises(ConfigError, match="tiny/table1: curve: unknown column 'distances'"):
        load_table("tiny/table1")
