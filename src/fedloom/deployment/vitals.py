"""What ``/metrics`` shows of a server or a silo, and when ``/healthz`` calls it ill: read from its folder alone."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import fedloom
from fedloom.deployment.directories import ServerDirectory, SiloDirectory
from fedloom.deployment.expiry import expiries
from fedloom.deployment.submissions import Submission
from fedloom.errors import FedloomError
from fedloom.operations.health import Check
from fedloom.operations.spending import HOLD
from fedloom.operations.trail import AUDIT
from fedloom.privacy.ledger import Ledger

LEAST = 64 * 2**20  # bytes of disk, below which a round may not fit
STILL = 60.0  # seconds without a beat after which the process's own loop is taken for stuck
Home = ServerDirectory | SiloDirectory


@dataclass
class LogTally:
    """Counts of values in a log of JSON lines that only grows; each line is read once."""

    path: Path
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _seen: int = 0

    def rows(self) -> Iterable[dict[str, Any]]:
        """The whole lines that have come since the last look; all of them again where the log was begun anew."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            if file.seek(0, 2) < self._seen:
                self._seen, self.counts = 0, Counter()
            file.seek(self._seen)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._seen += len(lines + newline)
        for line in lines.splitlines():
            try:
                yield dict(json.loads(line))
            except ValueError:  # one that a kill cut short
                continue


@dataclass
class Pulse:
    """A loop that is to go round every few seconds."""

    last: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        """It went round."""
        self.last = time.monotonic()

    def problem(self) -> str:
        """That it is stuck."""
        still = time.monotonic() - self.last
        return f"its loop has stood still for {still:.0f} seconds" if still > STILL else ""


def checks_of(home: Home, pulse: Pulse) -> dict[str, Check]:
    """What makes a process ill whichever wire it speaks."""

    def certificates() -> str:
        return "; ".join(each.warning() for each in expiries(home.path) if each.left().total_seconds() < 0)

    def disk() -> str:
        free = shutil.disk_usage(home.path).free
        return f"{free} bytes are free at {home.path}, {LEAST} are needed" if free < LEAST else ""

    found: dict[str, Check] = {"loop": pulse.problem, "certificates": certificates, "disk": disk}
    if isinstance(home, SiloDirectory):

        def policy() -> str:
            try:
                home.policy()
            except FedloomError as error:
                return str(error)
            return ""

        def hold() -> str:
            return "restored from a backup, and not confirmed" if (home.path / HOLD).exists() else ""

        found |= {"policy": policy, "hold": hold}
    return found


class Vitals(Collector):
    """Gauges and counters of one folder."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._deeds = LogTally(home.path / AUDIT)
        self._journals: dict[Path, LogTally] = {}
        self._bytes: Counter[str] = Counter()
        self._spent: tuple[int, float] = (-1, 0.0)  # charges, and what they cost

    def collect(self) -> Iterable[Metric]:
        """As the folder is now."""
        home = self._home
        silo = home.name if isinstance(home, SiloDirectory) else ""
        charter = home.invitation.charter if isinstance(home, SiloDirectory) else home.charter
        about = {"version": fedloom.__version__, "federation": charter.name, "silo": silo}
        yield InfoMetricFamily("fedloom", "what runs here", value=about)
        yield _gauge("fedloom_disk_free_bytes", "free where the folder lies", shutil.disk_usage(home.path).free)
        ends = {each.path.name: each.ends.timestamp() for each in expiries(home.path)}
        yield _family("fedloom_certificate_expiry_timestamp_seconds", "when it ends", "certificate", ends)
        for row in self._deeds.rows():
            self._deeds.counts[(str(row.get("event")),)] += 1
        deeds = CounterMetricFamily("fedloom_audit_events", "lines of the audit log", labels=["event"])
        for (event,), count in sorted(self._deeds.counts.items()):
            deeds.add_metric([event], count)
        yield deeds
        yield from self._silo(home) if isinstance(home, SiloDirectory) else self._server(home)

    def _silo(self, home: SiloDirectory) -> Iterable[Metric]:
        yield _gauge("fedloom_restored_unconfirmed", "1: nothing is paid", (home.path / HOLD).exists())
        path = home.path / "ledger.sqlite"
        if not path.is_file():
            return
        with closing(Ledger(path, read_only=True)) as ledger:
            charges, budget = ledger.chain().charges, ledger.budget_of(home.name)
            if budget is None:
                return
            if charges != self._spent[0]:  # counting takes a while, and the answer changes with a charge alone
                self._spent = (charges, budget.spent(ledger.events(home.name)))
        yield CounterMetricFamily("fedloom_ledger_charges", "paid for on this silo's data", value=charges)
        yield _gauge("fedloom_epsilon_spent", "by all runs together", self._spent[1])
        yield _gauge("fedloom_epsilon_granted", "to all runs together", budget.epsilon)

    def _server(self, home: ServerDirectory) -> Iterable[Metric]:
        states: dict[str, int] = dict.fromkeys(("under way", "finished", "ended early"), 0)
        for path in (home.path / "submissions").glob("*.json"):
            submission = Submission.open(home, path.stem)
            state = {None: "under way", "": "finished"}.get(submission.problem, "ended early")
            states[state] += 1
            journal = submission.folder / "silos.jsonl"
            self._journals.setdefault(journal, LogTally(journal))
        yield _gauge("fedloom_silos_invited", "in the charter", len(home.charter.silos))
        yield _gauge("fedloom_silos_admitted", "whose keys may join", len(home.keys_admitted()))
        yield _family("fedloom_runs", "handed in, by how they stand", "state", states)
        events = CounterMetricFamily("fedloom_silo_events", "of the runs' journals", labels=["silo", "event"])
        for tally in self._journals.values():
            for row in tally.rows():
                tally.counts[str(row.get("silo")), str(row.get("event"))] += 1
                self._bytes["down" if row.get("event") == "asked" else "up"] += int(row.get("bytes", 0))
        for (silo, event), count in sorted(sum((each.counts for each in self._journals.values()), Counter()).items()):
            events.add_metric([silo, event], count)
        yield events
        traffic = CounterMetricFamily("fedloom_update_bytes", "of models and updates", labels=["direction"])
        for direction in ("down", "up"):
            traffic.add_metric([direction], self._bytes[direction])
        yield traffic


def _gauge(name: str, said: str, value: float) -> Metric:
    return GaugeMetricFamily(name, said, value=value)


def _family(name: str, said: str, label: str, values: Mapping[str, float]) -> Metric:
    found = GaugeMetricFamily(name, said, labels=[label])
    for key, value in values.items():
        found.add_metric([key], value)
    return found
