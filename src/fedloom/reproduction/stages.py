"""What a table may ask for beside metrics of the evaluation: heads on synthetic records, and two attacks of the audit.

Each gives its findings as metrics under its own name, so that a column can show them.
"""

from __future__ import annotations

from collections.abc import Callable

from fedloom.audit import audit_run
from fedloom.downstream.stage import downstream
from fedloom.evaluation.auditing import Effort
from fedloom.experiment import Run
from fedloom.federation.records import Federation
from fedloom.reproduction.tables import Row
from fedloom.runs.metrics import metric_key

Stage = Callable[[Run, Row, Federation, str], dict[str, float]]  # of a row's run, its federation and a device
EXPOSED = ("outliers", "unseen_outliers", "typical", "unseen_typical")  # kinds of records


def heads(run: Run, row: Row, federation: Federation, _: str) -> dict[str, float]:
    """Accuracies of heads and mixtures, mean over silos."""
    downstream(run, federation=federation, pathway=row.pathway)
    return {
        f"downstream/{row}/{test}/{name}": scores[test][name]
        for row, scores in run.folder.downstream.get("rows", {}).items()
        for test in scores
        for name in ("accuracy", "balanced_accuracy")
    }


def exposure(run: Run, _: Row, federation: Federation, device: str) -> dict[str, float]:
    """How often each kind of record is recognisable in what a released generator puts out.

    Under the generator's name, and once more without one for the generator that is closest to the outliers: what their
    own silo released for itself, or, where nothing but an average left it, that.
    """
    found: dict[str, float] = {}
    rows = audit_run(run, attacks=["outliers"], device=device, federation=federation)["attacks"]["outliers"]
    for row in rows:
        for kind in EXPOSED:
            if row[kind] is not None:
                key = metric_key("audit", f"{kind.replace('_', '-')}-{row['way']}", row["counts"][kind])
                found[f"{key}/{row['target']}"] = row[kind]["value"]
                if row["target"] == rows[-1]["target"]:  # those of single silos come last
                    found[key] = row[kind]["value"]
    return found


def membership(run: Run, _: Row, federation: Federation, device: str) -> dict[str, float]:
    """How often a training record scores above a held-out one, by each attack's best target, and by the best attack.

    Without the search for closest outputs: through the many steps of a flow it takes longer than the run.
    """
    effort = Effort(search=False)
    audit = audit_run(run, attacks=["membership"], effort=effort, device=device, federation=federation)
    found: dict[str, float] = {}
    for row in audit["attacks"]["membership"]:
        for attack in (row["attack"].replace(" ", "-"), "best"):
            key = f"audit/membership-{attack}/area"
            found[key] = max(found.get(key, 0.0), row["area"])
    return found


STAGES: dict[str, Stage] = {"downstream": heads, "audit": exposure, "membership": membership}
