"""The section about who shares what."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fedloom.reports.charts import Copy, Link, sharing_diagram
from fedloom.reports.facts import RunFacts
from fedloom.reports.figures import Listing
from fedloom.reports.parts import section_body

MOST_BOXES = 12  # on a side of the diagram


def sharing_body(facts: RunFacts) -> Markup:
    """A diagram of what passes between silos and server, and the plan in words."""
    parties: dict[tuple[str, ...], int] = {}
    for silo in facts.silos:
        parties[silo.groups or facts.groups] = parties.get(silo.groups or facts.groups, 0) + 1
    places = {group: place for place, group in enumerate(facts.groups)}
    kinds = sorted(parties.items(), key=lambda kind: [places.get(group, len(places)) for group in kind[0]])
    shown = dict(kinds[:MOST_BOXES]) or {(group,): 0 for group in facts.groups[:MOST_BOXES]}
    copies, links = _copies(facts, list(shown))
    stays = ", ".join(block for block, rule in facts.plan.items() if rule["scope"] == "silo" and not rule["up"])
    boxes = [
        (", ".join(groups), f"{count} silo{'' if count == 1 else 's'}" if count else "", stays)
        for groups, count in shown.items()
    ]
    rows = [
        (block, rule["scope"], "yes" if rule["up"] else "never", rule["down"]) for block, rule in facts.plan.items()
    ]
    values = {
        "diagram": sharing_diagram(boxes, copies, links),
        "hidden": len(parties) - len(shown),
        "blocks": Listing(("block", "scope", "leaves the silo", "comes back"), rows),
        "payloads": facts.payloads,
    }
    return section_body("sharing", values)


def _copies(facts: RunFacts, parties: Sequence[tuple[str, ...]]) -> tuple[list[Copy], list[Link]]:
    """The server's boxes, and the lines that lead to them."""
    copies: list[Copy] = []
    links: list[Link] = []
    for block, rule in facts.plan.items():
        owners = {
            "global": ["all silos"],
            "group": list(facts.groups),
            "silo": ["each silo's own"] if rule["up"] else [],
            "server": ["the server's own"],
        }[rule["scope"]]
        for owner in owners[: MOST_BOXES - len(copies)]:
            copies.append(Copy(block, owner, rule["scope"]))
            for index, groups in enumerate(parties):
                down = rule["down"] != "nothing"
                if (rule["scope"] != "group" or owner in groups) and (rule["up"] or down):
                    links.append(Link(index, len(copies) - 1, rule["up"], down))
    return copies, links
