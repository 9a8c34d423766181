"""How a federation is: who was admitted, who is there, what became of its runs."""

from __future__ import annotations

from typing import Any

from fedloom.deployment.direct.conductor import DirectConductor
from fedloom.deployment.directories import ServerDirectory, SiloDirectory
from fedloom.deployment.expiry import warnings_of
from fedloom.deployment.link import REFUSED
from fedloom.deployment.processes import is_locked
from fedloom.deployment.submissions import Submission
from fedloom.operations.spending import HOLD
from fedloom.runs.folder import RunFolder

UNCONFIRMED = "it was restored from a backup, and pays nothing before 'fedloom federation confirm'"
RUNS, REFUSALS = 5, 10  # the newest


def server_status(home: ServerDirectory) -> dict[str, Any]:
    """Plain values for a table or as JSON."""
    charter, conductor, admitted, asking = home.charter, DirectConductor(home), home.keys_admitted(), home.asking()
    served = conductor.answers
    known = conductor.silos() if served else {}
    silos = []
    for silo, group in charter.silos.items():
        facts = known.get(silo, {"there": "offline" if served else "unknown", "device": ""})
        key = "admitted" if silo in admitted else f"asks: {asking[silo]}" if silo in asking else "missing"
        silos.append({"silo": silo, "group": group, "admitted": silo in admitted, "key": key, **facts})
    return {
        "name": charter.name,
        "address": charter.address,
        "wire": charter.wire,
        "served": served,
        "silos": silos,
        "runs": [_run(home, path.stem) for path in _newest(home)],
        "warnings": warnings_of(home.path),
    }


def silo_status(home: SiloDirectory) -> dict[str, Any]:
    """Whether it has joined, and what it refused to its server, newest last: each line as its logs have it."""
    lines = []
    for name in ("node", "worker", "silo"):
        path = home.logs / f"{name}.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        lines += [line for line in text.splitlines() if f"WARNING {REFUSED}" in line]
    return {
        "silo": home.name,
        "federation": home.invitation.charter.name,
        "joined": is_locked(home.lock),
        "refused": sorted(lines)[-REFUSALS:],
        "warnings": [*warnings_of(home.path), *([UNCONFIRMED] if (home.path / HOLD).exists() else [])],
    }


def _newest(home: ServerDirectory) -> list[Any]:
    found = sorted((home.path / "submissions").glob("*.json"), key=lambda path: path.stat().st_mtime)
    return found[-RUNS:]


def _run(home: ServerDirectory, number: str) -> dict[str, Any]:
    submission = Submission.open(home, number)
    done = RunFolder.open(submission.folder).rounds_done if submission.folder.is_dir() else 0
    state = {None: "under way, or its server died", "": "finished"}.get(submission.problem, submission.problem)
    return {"folder": str(submission.folder), "rounds": done, "state": f"{done} rounds; {state}"}
