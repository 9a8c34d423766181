from __future__ import annotations

import html
import json
import math
import re
from xml.etree import ElementTree

import pytest

from fedloom.reports.charts import (
    AxisScale,
    Copy,
    Curve,
    Link,
    Series,
    bars,
    line_chart,
    row_chart,
    scatter,
    sharing_diagram,
    ticks,
)

CROSS_SITE = '"><script>alert(1)</script>'


def paths(svg: str, style: str) -> list[str]:
    return re.findall(rf'<path class="{style}[^"]*" d="([^"]*)"', svg)


def hover(svg: str) -> list[list[object]]:
    found = re.search(r'data-hover="([^"]*)"', svg)
    assert found
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (1, 40, [0, 10, 20, 30, 40]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0.962, 1.0, [0.96, 0.97, 0.98, 0.99, 1.0]),
        (0, 0, [-1, -0.5, 0, 0.5, 1]),
        (-1e300, 1e300, [-1e300, -5e299, 0, 5e299, 1e300]),
    ],
)
def test_ticks_are_round_and_enclose_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_scale_maps_both_ends_and_puts_a_single_value_in_the_middle() -> None:
    assert [AxisScale(0, 4, 100, 300)(value) for value in (0, 1, 4)] == [100, 150, 300]
    assert AxisScale(7, 7, 100, 300)(7) == 200


def test_a_line_has_the_coordinates_of_its_points() -> None:
    # x from 66 to 426 over rounds 1 to 3, y from 206 up to 12 over 0 to 10
    svg = line_chart("losses", [Series("nll", [(1, 0.0), (2, 5.0), (3, 10.0)])], "nats")
    assert paths(svg, "line c0")[0] == "M66.0 206.0L246.0 109.0L426.0 12.0"
    assert hover(svg) == [
        [66.0, None, "round 1\nnll: 0"],
        [246.0, None, "round 2\nnll: 5"],
        [426.0, None, "round 3\nnll: 10"],
    ]
    assert ">nats</text>" in svg
    assert ">round</text>" in svg


def test_an_upright_name_is_as_long_as_there_is_room() -> None:
    svg = line_chart("losses", [Series("", [(1, 0.0), (2, 1.0)])], "x" * 35)
    assert f">{'x' * 33}…</text>" in svg
    assert hover(svg)[0][2] == f"round 1\n{'x' * 35}: 0"
    assert f">{'x' * 34}</text>" in line_chart("losses", [Series("", [(1, 0.0), (2, 1.0)])], "x" * 34)


@pytest.mark.parametrize("hole", [None, math.nan, math.inf, 1e301])
def test_a_value_without_a_place_is_a_gap(hole: float | None) -> None:
    points = [(1, 0.0), (2, 10.0), (3, hole), (4, 10.0), (5, 0.0)]
    svg = line_chart("losses", [Series("", points)], "nats")
    assert paths(svg, "line c0")[0] == "M66.0 206.0L156.0 12.0M336.0 12.0L426.0 206.0"
    assert [row[0] for row in hover(svg)] == [66.0, 156.0, 336.0, 426.0]


def test_a_single_point_is_a_dot() -> None:
    svg = line_chart("losses", [Series("", [(5, 0.5)])], "nats")
    assert paths(svg, "line c0") == [""]
    assert paths(svg, "dots c0") == ["M246.0 109.0h.01"]


@pytest.mark.parametrize("points", [[], [(1, None)], [(1, math.nan), (2, math.inf)]])
def test_nothing_to_draw_is_said(points: list[tuple[float, float | None]]) -> None:
    assert line_chart("losses", [Series("", points)], "nats") == '<p class="quiet">No finite value to draw.</p>'
    assert "No finite value" in scatter("codes", [Series("", points)], "x", "y", {})


def test_the_ninth_colour_is_the_first_with_dashes() -> None:
    svg = line_chart("many", [Series("a", [(1, 0.0), (2, 1.0)]), Series("b", [(1, 1.0), (2, 0.0)], colour=8)], "y")
    assert svg.count('class="line c0 d0"') == svg.count('class="line c0 d1"') == 2  # the line and its legend


def test_a_cloud_has_the_coordinates_of_its_points() -> None:
    # 4% of air on both sides: x from 66 to 386 over -0.04 to 1.04, y from 356 up to 12
    svg = scatter("codes", [Series("a", [(0, 0), (1, 1)])], "x", "y", {"mean": (0.5, 0.5)}, background=[(0, 1)])
    assert paths(svg, "dots c0")[0] == "M77.9 343.3h.01M374.1 24.7h.01"
    assert paths(svg, "dots behind") == ["M77.9 24.7h.01"]
    assert paths(svg, "cross") == ["M220.0 184.0h12M226.0 178.0v12"]
    assert hover(svg) == [[77.9, 343.3, "a"], [374.1, 24.7, "a"], [226.0, 184.0, "mean"]]


def test_bars_are_as_high_as_their_share_of_the_most() -> None:
    svg = bars("labels", {"zero": 10, "one": 0, "two": 5})
    assert re.findall(r'<rect class="bar" x="(\d+)" y="([\d.]+)" width="7" height="([\d.]+)"', svg) == [
        ("1", "2.0", "31.0"),
        ("10", "33.0", "0.0"),
        ("19", "17.5", "15.5"),
    ]
    assert hover(svg)[2] == [22.5, None, "two: 5"]


def test_the_diagram_draws_what_goes_up_and_what_comes_down() -> None:
    svg = sharing_diagram(
        [("a", "5 silos", ""), ("b", "1 silo", "head")],
        [Copy("encoder", "all silos", "global"), Copy("decoder", "each silo's own", "silo")],
        [Link(0, 0, up=True, down=True), Link(1, 0, up=True, down=True), Link(0, 1, up=True, down=False)],
    )
    assert svg.count('<path class="flow global"') == 2
    assert svg.count('<path class="flow silo"') == 1
    assert svg.count("marker-end=") == 3
    assert svg.count("marker-start=") == 2
    assert "1 silo; keeps head" in svg


@pytest.mark.parametrize(
    "svg",
    [
        line_chart(CROSS_SITE, [Series(CROSS_SITE, [(1, 2.0), (2, 3.0)])], CROSS_SITE, CROSS_SITE),
        scatter(CROSS_SITE, [Series(CROSS_SITE, [(1, 2.0)])], CROSS_SITE, CROSS_SITE, {CROSS_SITE: (0, 0)}),
        bars(CROSS_SITE, {CROSS_SITE: 3}),
        sharing_diagram(
            [(CROSS_SITE,) * 3], [Copy(CROSS_SITE, CROSS_SITE, CROSS_SITE)], [Link(0, 0, up=True, down=True)]
        ),
        row_chart([Curve(CROSS_SITE, {CROSS_SITE: [1.0]})], CROSS_SITE, CROSS_SITE),
    ],
    ids=["line", "scatter", "bars", "sharing", "rows"],
)
def test_names_with_markup_stay_text(svg: str) -> None:
    tree = ElementTree.fromstring(f"<div>{svg}</div>")
    assert not list(tree.iter("script"))
    assert any(CROSS_SITE in value for node in tree.iter() for value in [node.text or "", *node.attrib.values()])
