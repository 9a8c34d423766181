"""The sections about one run."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import tomli_w
from markupsafe import Markup

from fedloom.evaluation.metric import count_of
from fedloom.privacy.ledger import told
from fedloom.reports.charts import COLOURS, Copy, Link, Series, bars, line_chart, number, sharing_diagram
from fedloom.reports.downstream import NAMES, TESTS
from fedloom.reports.facts import RunFacts, SiloFacts
from fedloom.reports.health import MARKS
from fedloom.reports.logs import last
from fedloom.reports.panels import Panel
from fedloom.reports.parts import (
    Listing,
    Section,
    Story,
    curve_name,
    losses_first,
    method_of,
    metric_name,
    points_of,
    sample_films,
    section_body,
    size,
)
from fedloom.runs.metrics import is_metric, of_whom, sample_count, split_key, uncounted
from fedloom.templating import render

MOST_SILOS = 200  # rows of a table; the JSON file has them all
MOST_LINES = 24  # in one chart
MOST_BOXES = 12  # on a side of the sharing diagram
MOST_BEATS = 30  # rounds in which one sees how a silo was
MOST_COLUMNS = 8  # groups beside each other in a table of metrics
SILO = "/silo="
BROAD_PANELS = {"reconstructions", "interpolations", "nearest-neighbours", "outliers"}
SMALL_PANELS = {"prior-swap", "pathways"}


def run_sections(story: Story, prefix: str, *, with_samples: bool) -> list[Section]:
    """Everything about one run, in the order in which people ask."""
    facts, found = story.facts, []

    def add(anchor: str, title: str, body: Markup | None) -> None:
        if body:
            found.append(Section(prefix + anchor, title, body))

    if with_samples:
        add("samples", "Samples, round by round", sample_films([story]))
    add("silos", "Who took part", _silos(facts))
    add("sharing", "Who shares what", _sharing(facts))
    add("metrics", "Metrics", _metrics(facts))
    add("downstream", "What it is good for", _downstream(facts))
    add("training", "Training", _training(facts))
    for name, panel in story.panels.items():
        add(name, panel.title, _panel(name, panel))
    add("health", "How silos are", _health(facts))
    add("egress", "What left each silo", _egress(facts))
    add("privacy", "Privacy", _privacy(facts))
    add("audit", "Attacks", _audit(facts))
    add("reproduce", "Reproduce", _reproduce(facts))
    add("environment", "Environment", _environment(facts))
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
        "privacy": facts.guarantee.partition(" for each ")[0] or "unknown",
    }
    shown = {name: value for name, value in cards.items() if name not in without}
    return render("reports/templates/heading.html", {"cards": shown, "warnings": story.findings})


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


def _sharing(facts: RunFacts) -> Markup:
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


def _metrics(facts: RunFacts) -> Markup:
    """The newest values, a column for each group and for silos a list of their own; and how they came about."""
    of_silos = [key for key in facts.metrics if is_metric(key) and SILO in key]
    of_groups = [key for key in facts.metrics if is_metric(key) and SILO not in key]
    columns = sorted(dict.fromkeys(split_key(key)[1] for key in of_groups), key=bool)  # all before any group
    if len(columns) > MOST_COLUMNS:
        newest, silos = _metrics_list(facts, of_groups + of_silos), _metrics_list(facts, [])
    else:
        newest, silos = _metrics_table(facts, of_groups, columns), _metrics_list(facts, of_silos)
    return section_body("metrics", {"newest": newest, "silos": silos, "curves": _curves(facts, training=False)})


def _metrics_table(facts: RunFacts, keys: Sequence[str], columns: Sequence[str]) -> Listing:
    headers = ("metric", *(column or "all" for column in columns), "n", "in round")
    rows = [row for metric, cells in sorted(_cells(facts, keys).items()) for row in _rows(metric, cells, columns)]
    return Listing(headers, rows, right=range(1, len(headers)))


Cell = tuple[int, str, int]  # number of samples, value, round


def _cells(facts: RunFacts, keys: Sequence[str]) -> dict[str, dict[str, list[Cell]]]:
    """By metric and by group: a value for each number of samples that it was computed from, the smallest first."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for key in keys:
        metric, whose = split_key(uncounted(key))
        cell = (sample_count(key) or 0, number(last(facts.metrics[key])), max(facts.metrics[key]))
        found.setdefault(metric, {}).setdefault(whose, []).append(cell)
    return {metric: {whose: sorted(cells) for whose, cells in by.items()} for metric, by in found.items()}


def _rows(metric: str, cells: Mapping[str, Sequence[Cell]], columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """One row for a metric; more where it was computed from several numbers of samples."""
    for place in itertools.zip_longest(*(cells.get(column, []) for column in columns)):
        known = [cell for cell in place if cell]
        counts = " / ".join(f"{count:,}" for count in dict.fromkeys(cell[0] for cell in known))  # of all, of a group
        values = (cell[1] if cell else "" for cell in place)
        yield (metric_name(metric), *values, counts, str(max(cell[2] for cell in known)))


def _metrics_list(facts: RunFacts, keys: Sequence[str]) -> Listing:
    """A row for each key."""
    rows = []
    for key in sorted(keys, key=lambda key: split_key(key)[0]):
        history = facts.metrics[key]
        rows.append((metric_name(key), of_whom(key), count_of(key), number(last(history)), str(max(history))))
    return Listing(("metric", "of", "from", "newest value", "in round"), rows, right=(3, 4))


def _training(facts: RunFacts) -> Markup | None:
    curves = _curves(facts, training=True)
    return section_body("curves", {"curves": curves}) if curves else None


def _curves(facts: RunFacts, *, training: bool) -> list[tuple[str, Markup]]:
    """A chart for each metric, or each loss term and cost, that has more than one value."""
    colours = {name: place for place, name in enumerate(("", *facts.groups, *(silo.name for silo in facts.silos)))}
    families: dict[str, dict[str, list[Series]]] = {}
    for key, history in losses_first(facts.metrics):
        if is_metric(key) == training or len(history) < 2:
            continue
        metric, whose = split_key(uncounted(key))
        count = sample_count(key)
        name = f"{whose or 'all'} (n={count:,})" if count is not None else whose
        beside = families.setdefault(metric, {}).setdefault(whose, [])
        colour = colours.get(whose, 0) + COLOURS * len(beside)  # another number of samples: the colour, dashed
        beside.append(Series(name, points_of(key, history), colour))
    charts = []
    for family, by in families.items():
        lines = list(itertools.chain.from_iterable(by.values()))
        chart = line_chart(f"{curve_name(family)} over rounds", lines[:MOST_LINES], curve_name(family))
        charts.append((curve_name(family), chart))
    return charts


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
        "parts": Listing(("", ""), parts),
        "accounts": Listing(headers, rows, right=(1, 2, 3, 5)),
        "hidden": len(accounts) - MOST_SILOS,
    }
    return section_body("privacy", values)


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
    return "unlimited" if value is None else told(value)


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


def _reproduce(facts: RunFacts) -> Markup:
    first = facts.environment.get("command", "")
    return section_body("reproduce", {"command": facts.reproduce, "seed": facts.seed, "first": first})


def _environment(facts: RunFacts) -> Markup | None:
    rows = list(facts.environment.items())
    return section_body("environment", {"facts": Listing(("", ""), rows)}) if rows else None
