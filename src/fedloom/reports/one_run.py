"""The sections about one run."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import tomli_w
from markupsafe import Markup

from fedloom.privacy.ledger import format_epsilon
from fedloom.reports.charts import bars
from fedloom.reports.discovery import discovery_body
from fedloom.reports.downstream import NAMES, TESTS
from fedloom.reports.facts import RunFacts, SiloFacts
from fedloom.reports.figures import Listing, Panel
from fedloom.reports.health import MARKS
from fedloom.reports.metrics import metric_name, metrics_body, quality_over_epsilon, training_body
from fedloom.reports.parts import (
    Section,
    Story,
    method_of,
    sample_films,
    section_body,
    size,
)
from fedloom.reports.sharing import sharing_body
from fedloom.templating import render

MOST_SILOS = 200  # rows of a table; the JSON file has them all
MOST_BEATS = 30  # rounds in which one sees how a silo was
CLASSES = "classes"
BROAD_PANELS = {
    CLASSES,
    "columns",
    "samples-as-rows",
    "reconstructions",
    "interpolations",
    "nearest-neighbours",
    "outliers",
}
SMALL_PANELS = {"prior-swap", "pathways"}


def run_sections(story: Story, prefix: str, *, with_samples: bool) -> list[Section]:
    """Everything about one run, in the order in which people ask."""
    facts, found = story.facts, []

    def add(anchor: str, title: str, body: Markup | None) -> None:
        if body:
            found.append(Section(prefix + anchor, title, body))

    if with_samples:
        add("samples", "Samples, round by round", sample_films([story]))
    panels = {name: _panel(name, panel) for name, panel in story.panels.items()}
    if CLASSES in panels:  # nobody needs to ask what they are of
        add(CLASSES, story.panels[CLASSES].title, panels.pop(CLASSES))
    add("silos", "Who took part", _silos(facts))
    add("discovery", "Groups that nobody named", discovery_body(facts.discovery) if facts.discovery else None)
    add("sharing", "Who shares what", sharing_body(facts))
    add("metrics", "Metrics", metrics_body(facts))
    add("classes-learned", "What samples teach", _taught(facts))
    if curves := quality_over_epsilon(facts):
        add("epsilon", "Quality over epsilon", section_body("curves", {"curves": curves}))
    add("downstream", "What it is good for", _downstream(facts))
    add("training", "Training", training_body(facts))
    for name, body in panels.items():
        add(name, story.panels[name].title, body)
    add("health", "How silos are", _health(facts))
    add("egress", "What left each silo", _egress(facts))
    add("privacy", "Privacy", _privacy(facts))
    add("audit", "Attacks", _audit(facts))
    add("reproduce", "Reproduce", section_body("reproduce", {"facts": facts}))
    environment = Listing(("", ""), list(facts.environment.items()))
    add("environment", "Environment", section_body("environment", {"facts": environment}) if environment.rows else None)
    add("configuration", "Configuration", section_body("configuration", {"toml": tomli_w.dumps(facts.config)}))
    return found


def run_heading(story: Story, without: Collection[str] = ()) -> Markup:
    """The run at a glance, except for what a page says elsewhere or cannot know, and its warnings."""
    facts = story.facts
    records = [silo.records for silo in facts.silos if silo.records is not None]
    names = ", ".join(facts.groups)
    cards = {
        "rounds": f"{facts.rounds_done} of {facts.rounds_planned}",
        "state": facts.status["state"],
        "silos": f"{len(facts.silos):,}" if facts.silos else "unknown",
        "groups": (names if len(names) <= 40 else f"{len(facts.groups):,}") or "unknown",
        "training records": f"{sum(records):,}" if records else "unknown",
        "left the silos": size(sum(silo.bytes for silo in facts.silos)),
        "privacy": _card(facts),
    }
    shown = {name: value for name, value in cards.items() if name not in without}
    values = {"verdict": facts.verdict, "cards": shown, "warnings": story.findings}
    return render("reports/templates/heading.html", values)


def _card(facts: RunFacts) -> str:
    """The guarantee in so few words that a card holds them."""
    epsilon = facts.privacy.get("epsilon")
    return f"ε {format_epsilon(epsilon)}" if epsilon else facts.guarantee.partition(":")[0] or "unknown"


def _silos(facts: RunFacts) -> Markup:
    data, participation = facts.config["data"], facts.config["participation"]
    share = f"In a round, {participation['rate']:.0%} of the silos take part ({participation['mode']})."
    if data["layout"] == "centralised":
        share = "All records lie in one silo, which takes part in every round."
    described = f"{data['source']}, partition {data['partition']}"
    intro = f"Method {method_of(facts)} on {described}. {share}"
    if facts.no_records:
        intro = f"Method {method_of(facts)}. {share} Sizes and labels are missing: {facts.no_records}."
    counted = any(silo.records is not None for silo in facts.silos)
    rows = []
    for silo in facts.silos[:MOST_SILOS]:
        cells: list[str] = [silo.name, ", ".join(silo.groups), f"{silo.rounds:,}"]
        if counted:
            known = {name: silo.classes.get(name, 0) for name in _classes_beside(silo, facts)}
            cells.append("unknown" if silo.records is None else f"{silo.records:,}")
            cells.append(bars(f"Labels of {silo.name}", known) if known else "")
        rows.append(cells)
    headers = ("silo", "groups", "rounds taken part", *(("records", "records of each class") if counted else ()))
    silos = Listing(headers, rows, right=(2, 3))
    return section_body("silos", {"intro": intro, "silos": silos, "hidden": len(facts.silos) - MOST_SILOS})


def _classes_beside(silo: SiloFacts, facts: RunFacts) -> list[str]:
    """The classes that occur in silos of the same groups, so that their histograms can be compared."""
    there = {name for other in facts.silos if other.groups == silo.groups for name in other.classes}
    return [name for name in (*facts.classes, "unlabelled") if name in there]


def _panel(name: str, panel: Panel) -> Markup:
    kind = "broad" if name in BROAD_PANELS else "small" if name in SMALL_PANELS else ""
    by_row = itertools.groupby(panel.figures, key=lambda figure: figure.row)
    rows = [(row, list(figures)) for row, figures in by_row]
    return section_body("panel", {"panel": panel, "kind": kind, "rows": rows})


def _egress(facts: RunFacts) -> Markup:
    rows = [
        (
            silo.name,
            f"{silo.rounds:,}",
            size(silo.bytes),
            size(silo.bytes / silo.rounds) if silo.rounds else "-",
            ", ".join(silo.blocks),
            ", ".join(silo.payloads),
        )
        for silo in facts.silos[:MOST_SILOS]
    ]
    if not any(silo.rounds for silo in facts.silos):
        rows = []
    headers = ("silo", "rounds", "bytes in all", "bytes a round", "blocks (block@owner)", "payloads")
    values = {
        "costs": "; ".join(f"{name}: {cost}" for name, cost in facts.payloads.items()),
        "silos": Listing(headers, rows, right=(1, 2, 3)),
        "hidden": len(facts.silos) - MOST_SILOS,
    }
    return section_body("egress", values)


def _privacy(facts: RunFacts) -> Markup:
    where = {
        "federated": "That records stayed at their silos is no privacy guarantee by itself.",
        "centralised": "All records were pooled in one place.",
    }
    revealed = "No mechanism bounds what the shared parameters reveal about a single record."
    explained = {"no DP guarantee": f"{revealed} {where.get(facts.config['data']['layout'], '')}"}
    parts = [
        (name.replace("_", " "), value)
        for name, value in facts.privacy.items()
        if isinstance(value, str) and name != "guarantee"
    ]
    accounts = facts.privacy.get("silos", [])
    rows = [
        (
            account["silo"],
            *(_epsilon(account[key]) for key in ("spent", "replaced", "epsilon")),
            _budget(account["spent"], account["epsilon"]),
            f"{account['delta']:g}",
        )
        for account in accounts[:MOST_SILOS]
    ]
    headers = ("silo", "epsilon spent", "one replaced", "granted", "of the budget", "delta")
    values = {
        "guarantee": facts.guarantee,
        "explained": explained.get(facts.guarantee, ""),
        "outside": [metric_name(family) for family in facts.outside_guarantee],
        "parts": Listing(("", ""), parts),
        "accounts": Listing(headers, rows, right=(1, 2, 3, 5)),
        "hidden": len(accounts) - MOST_SILOS,
    }
    return section_body("privacy", values)


def _taught(facts: RunFacts) -> Markup | None:
    """How often a classifier that learned from samples is right, class by class; nothing where none was fitted."""
    judged = facts.judged
    if not judged.of_classes:
        return None
    utility = (judged.utility.get("samples"), judged.utility.get("records"))
    rows = [(name, *pair) for name, pair in {"all classes": utility, **judged.of_classes}.items()]
    headers = ("class", "learned from samples", "learned from records")
    return section_body("taught", {"classes": Listing(headers, rows)})


def _downstream(facts: RunFacts) -> Markup | None:
    """What ``fedloom downstream`` found; nothing where it has not looked."""
    found = facts.downstream
    if not found.rows:
        return None
    columns = [(test, name) for test in TESTS for name in NAMES]
    rows = [
        (row, *(f"{100 * by[test][name]:.1f}" if name in by[test] else "-" for test, name in columns))
        for row, by in found.rows.items()
    ]
    headers = ("head", *(f"{name.replace('_', ' ')}, {test}" for test, name in columns))
    meaning = "; ".join(f"{test}: {what}" for test, what in found.tests.items())
    values = {
        "intro": f"In percent, mean over silos. {meaning}. Privacy: {found.guarantee or facts.guarantee}.",
        "heads": Listing(headers, rows, right=range(1, len(headers))),
        "sentences": found.sentences,
    }
    return section_body("downstream", values)


def _audit(facts: RunFacts) -> Markup | None:
    """What ``fedloom audit`` found; nothing where it has not looked."""
    if not facts.audit.sentences:
        return None
    attacks = ("generator", "membership by", "area", "found at 0.1 % false alarms", "at 1 % false alarms")
    kinds = ("outliers", "outliers never trained on", "typical records", "held-out records")
    values = {
        "sentences": facts.audit.sentences,
        "membership": Listing(attacks, facts.audit.membership, right=(2, 3, 4)),
        "outliers": Listing(("generator", "recognisably", *kinds), facts.audit.outliers, right=(2, 3, 4, 5)),
    }
    return section_body("audit", values)


def _epsilon(value: float | None) -> str:
    """JSON has no infinite numbers: no value is no limit."""
    return "unlimited" if value is None else format_epsilon(value)


def _budget(spent: float | None, granted: float | None) -> dict[str, float]:
    """What a bar shows; nothing where there is no limit."""
    return {} if spent is None or not granted else {"spent": spent, "granted": granted}


def _health(facts: RunFacts) -> Markup | None:
    """What became of every silo in the last rounds; nothing where silos are no machines of their own."""
    if not facts.health:
        return None
    rows = [
        (
            silo.silo,
            list(silo.rounds.items())[-MOST_BEATS:],
            f"{silo.answered} of {len(silo.rounds)}",
            "" if silo.seconds is None else f"{silo.seconds:.1f}",
            size(silo.bytes_up),
            silo.trouble,
        )
        for silo in facts.health[:MOST_SILOS]
    ]
    headers = ("silo", f"last {MOST_BEATS} rounds", "answered", "seconds", "came up", "newest trouble")
    silos = Listing(headers, rows, right=(2, 3, 4))
    return section_body("health", {"marks": MARKS, "silos": silos, "hidden": len(facts.health) - MOST_SILOS})
