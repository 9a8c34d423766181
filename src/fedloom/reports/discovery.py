"""The section about groups that nobody named: a map of the silos, from what they released, and how sure it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from fedloom.reports.charts import Point, Series, scatter
from fedloom.reports.figures import Listing
from fedloom.reports.parts import section_body
from fedloom.runs.discoveries import Discovery, FoundSilo

MOST_SILOS = 200  # rows of the table
CIRCLE = 24  # points around a silo, two standard deviations away from it


def discovery_body(found: Discovery) -> Markup:
    """Who is near whom, and how likely each silo is of its group."""
    groups = list(dict.fromkeys(silo.group for silo in found.silos.values()))
    clouds = [
        Series(group, [_point(silo) for silo in found.silos.values() if silo.group == group], colour)
        for colour, group in enumerate(groups)
    ]
    around = [point for silo in found.silos.values() for point in _circle(silo)]
    rows = [_row(name, silo) for name, silo in list(found.silos.items())[:MOST_SILOS]]
    values = {
        "sentence": found.sentence,
        "map": scatter("Silos by what they released", clouds, "first direction", "second direction", {}, around),
        "silos": Listing(("silo", "group", "how likely", "next", "noise of its place"), rows, right=(2, 4)),
        "hidden": len(found.silos) - MOST_SILOS,
    }
    return section_body("discovery", values)


def _point(silo: FoundSilo) -> Point:
    across, up = (*silo.place, 0.0, 0.0)[:2]
    return across, up


def _circle(silo: FoundSilo) -> Sequence[Point]:
    (x, y), radius = _point(silo), 2 * silo.error
    turns = (2 * math.pi * step / CIRCLE for step in range(CIRCLE))
    return [(x + radius * math.cos(turn), (y or 0.0) + radius * math.sin(turn)) for turn in turns]


def _row(name: str, silo: FoundSilo) -> tuple[str, ...]:
    others = {group: share for group, share in silo.odds.items() if group != silo.group}
    following = max(others, key=lambda group: others[group], default="-")
    return name, silo.group, f"{silo.odds.get(silo.group, 0.0):.1%}", following, f"{silo.error:.2g}"
