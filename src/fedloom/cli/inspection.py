"""``fedloom inspect``: what a run folder holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fedloom.cli.downstream import print_scores
from fedloom.cli.metrics import last_metrics, metrics_table, say_verdict
from fedloom.cli.output import Json, RunDir, plural, say, say_facts, show, show_json, size, table

if TYPE_CHECKING:
    from fedloom.experiment import Run
    from fedloom.sharing.plan import SharingPlan


def inspect(
    folder: RunDir,
    as_json: Json = False,
) -> None:
    """Show a run: its settings, how far it is, who shares what with whom, and what has left the silos."""
    from fedloom.experiment import load

    run = load(folder)
    found = _described(run)
    if as_json:
        show_json(found)
    else:
        say(found["folder"])
        say_verdict(run.folder)
        _print(found)


def _described(run: Run) -> dict[str, Any]:
    from fedloom.privacy.summary import summarise
    from fedloom.reports.verdict import verdict_of
    from fedloom.runs.checkpoint import checkpoint_rounds

    checkpoints = checkpoint_rounds(run.folder.path)
    plan = run.generator().method.plan if checkpoints else None  # before the first, nobody has met the groups yet
    return {
        "verdict": asdict(verdict_of(run.folder)),
        "folder": str(run.folder.path),
        "config": run.config.to_mapping(),
        "engine": run.folder.environment.get("engine", ""),
        "rounds": {"done": run.folder.rounds_done, "planned": run.config.rounds},
        "status": run.folder.status,
        "checkpoints": checkpoints,
        "groups": list(plan.groups) if plan else [],
        "plan": _sharing(plan) if plan else {},
        "payloads": {payload.name: payload.cost for payload in plan.payloads} if plan else {},
        "privacy": summarise(run.config.privacy, run.folder.ledger).to_mapping(),
        "audit": run.folder.audit,
        "downstream": run.folder.downstream,
        "not_for_release": run.folder.not_for_release,
        "bytes_up": _bytes(run.folder.egress()),
        "bytes_down": _bytes(row for row in run.folder.silo_events() if row["event"] == "asked"),
        "metrics": last_metrics(run),
    }


def _sharing(plan: SharingPlan) -> dict[str, dict[str, Any]]:
    return {
        block: {"scope": str(rule.scope), "up": rule.up, "down": str(rule.down)} for block, rule in plan.blocks.items()
    }


def _bytes(log: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    """Silo -> round -> bytes that left it, or were sent to it; what was done again counts again."""
    found: dict[str, dict[int, int]] = {}
    for row in log:
        by_round = found.setdefault(row["silo"], {})
        by_round[row["round"]] = by_round.get(row["round"], 0) + row.get("bytes", 0)
    return dict(sorted(found.items()))


def _print(found: Mapping[str, Any]) -> None:
    config, rounds = found["config"], found["rounds"]
    data, model, local, participation = (config[part] for part in ("data", "model", "local", "participation"))
    method = dict(config["method"])
    name = method.pop("name")
    work = plural(local["steps"], "step") if local["steps"] else plural(local["epochs"], "epoch")
    kept = (
        f"checkpoints of {', '.join(map(str, found['checkpoints']))}" if found["checkpoints"] else "no checkpoint yet"
    )
    say_facts(
        {
            "name": f"{config['name']}, seed {config['seed']}",
            "method": " ".join([name, *(f"{key}={value}" for key, value in method.items())]),
            "data": f"{data['source']}, {data['partition']}, {data['layout']}",
            "model": f"{model['network']} {model['hidden']}, latent {model['latent']}",
            "local": f"{work}, batch {local['batch_size']}, {local['optimizer']} {local['learning_rate']:g}",
            "silos": f"{participation['mode']} {participation['rate']:g} of them in a round",
            "groups": ", ".join(found["groups"]) or "not known before the first checkpoint",
            "rounds": f"{rounds['done']} of {rounds['planned']} done, {kept}",
            "status": ": ".join(filter(None, (found["status"]["state"], found["status"]["reason"]))),
            "engine": found["engine"] or "not started",
        }
    )
    _print_sharing(found)
    say("")
    show(f"privacy: {found['privacy']['guarantee']}")
    if found["privacy"]["mechanism"] != "none":
        for part in ("replacement", "mechanism", "adjacency", "trust", "not_covered"):
            if part in found["privacy"]:
                show(f"privacy, {part.replace('_', ' ')}: {found['privacy'][part]}")
    if found["not_for_release"]:
        show(found["not_for_release"])
    for sentence in found["audit"].get("sentences", ()):
        show(f"audit of round {found['audit']['round']}, {sentence}")
    if found["downstream"]:
        say("")
        print_scores(found["downstream"])
    if found["metrics"]:
        say("")
        show(metrics_table(found["metrics"]))


def _print_sharing(found: Mapping[str, Any]) -> None:
    if found["plan"]:
        plan = table("block", "scope", "leaves the silo", "comes back")
        for block, rule in found["plan"].items():
            plan.add_row(block, rule["scope"], "yes" if rule["up"] else "never", rule["down"])
        say("")
        show(plan)
        for payload, cost in found["payloads"].items():
            show(f"payload '{payload}': {cost}")
    if found["bytes_up"]:
        headers = ["silo", "rounds", "up a round", "up in all", "down in all"][: 5 if found["bytes_down"] else 4]
        sent = table(*headers, right=tuple(headers[1:]))
        for silo, by_round in found["bytes_up"].items():
            total, down = sum(by_round.values()), sum(found["bytes_down"].get(silo, {}).values())
            cells = [silo, str(len(by_round)), size(total / len(by_round)), size(total), size(down)]
            sent.add_row(*cells[: len(headers)])
        say("")
        show(sent)
