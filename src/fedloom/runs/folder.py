"""The run folder: run.toml, *.json, logs (*.jsonl), ledger.sqlite, checkpoints/, samples/, audit/."""

from __future__ import annotations

import json
import os
import platform
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import fedloom
from fedloom.config import Config, load_config
from fedloom.errors import ConfigError, RunFolderError
from fedloom.registry import packages_used
from fedloom.runs.checkpoint import checkpoint_rounds
from fedloom.runs.discoveries import Discovery
from fedloom.runs.files import (
    append_lines,
    explained,
    read_lines,
    remove_unfinished,
    write_atomically,
    write_folder_atomically,
    write_json,
)
from fedloom.runs.metrics import is_metric

ENDS = ("finished", "diverged")
SECRET_FILE, SECRET = "noise.key", 32  # bytes
NOISE, DATA, EARLIER = "noise", "data", "earlier_rounds"  # in environment.json
DISCOVERY = "discovery.json"
DIGEST = f"{DATA}.digest"  # whoever guesses the records could tell from it that he is right


@dataclass(frozen=True)
class DataSource:
    """What a run was really trained on; the digest tells records apart and stays out of all that is handed on."""

    name: str  # of the source, or where the records were instead
    digest: str = ""  # of the federation; empty: an older version did not write it down
    public: bool = False  # whether everybody has the records
    medical: bool = False  # whether the source is known to hold records of patients
    knows_subjects: bool = False  # whether all silos' records say whose they are


@dataclass(frozen=True)
class RunFolder:
    """The folder that remains of a run, and all that is read from it."""

    path: Path
    config: Config

    @classmethod
    def create(cls, path: Path, config: Config, data: DataSource | None = None) -> RunFolder:
        """Start a new folder, for a run on these data; it appears whole, or not at all.

        Of a private run it is its owner's alone: ledger, log and checkpoints tell more than what is handed on.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunFolderError(
                f"{path} exists already; choose another --out, or 'fedloom resume {path}' to go on with it"
            )
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        found = environment() | ({DATA: asdict(data)} if data else {})
        files = {"run.toml": config.to_toml(), "environment.json": json.dumps(found, indent=2)}
        mode = 0o777 if config.privacy.mechanism == "none" else 0o700
        write_folder_atomically(path, {name: text.encode() for name, text in files.items()}, mode=mode)
        return cls(path, config)

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The run that lies in a folder already."""
        if not path.is_dir():
            raise RunFolderError(f"{path} is not a run folder: there is no such folder")
        if not (path / "run.toml").is_file():
            raise RunFolderError(f"{path} is not a run folder: it holds no run.toml")
        try:
            return cls(path, load_config(path / "run.toml"))
        except ConfigError as error:
            raise RunFolderError(f"{path} is not a run folder of this version: {error}") from error

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, machine, command and the engine's choice, from environment.json."""
        try:
            found: dict[str, Any] = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path / 'environment.json'} is missing or damaged ({error})") from error
        return found

    def note(self, facts: dict[str, Any]) -> None:
        """Add facts to environment.json."""
        write_json(self.path / "environment.json", {**self.environment, **facts})

    @property
    def data_source(self) -> DataSource:
        """What the run was trained on; of an older version's runs no more than what their settings say is known.

        Whoever marks records as public later, in run.toml, is believed.
        """
        found = self.environment.get(DATA)
        known = DataSource(**found) if found else DataSource(self.config.data.source)
        return replace(known, public=known.public or self.config.data.public)

    @property
    def is_deployed(self) -> bool:
        """Whether its silos are machines of their own."""
        return bool(self.environment.get("engine_choice", {}).get("name") == "flower")

    @property
    def ledger(self) -> Path:
        """Where a simulated run under DP-SGD keeps account of what it spent."""
        return self.path / "ledger.sqlite"

    @property
    def statements(self) -> Path:
        """Where the signed statements of a federation's silos lie, once its run has ended."""
        return self.path / "statements.json"

    def secret(self) -> bytes:
        """What a private run's noise is drawn from: made at its start, and gone as soon as it has ended."""
        path = self.path / SECRET_FILE
        if not path.exists():
            write_atomically(path, secrets.token_bytes(SECRET), mode=0o600)
        if not self.rounds_done:
            self.note({NOISE: "secret"})
        return path.read_bytes()

    @property
    def kept_noise_secret(self) -> bool:
        """Whether all rounds of a private run drew their noise from its secret; an older version had only the seed."""
        return self.environment.get(NOISE) == "secret"

    @property
    def not_for_release(self) -> str:
        """Why its models may not be handed on; empty where nothing stands against it."""
        canaries = self.config.audit.canaries
        return f"not for release: {canaries} canaries were put among its training records by coins" if canaries else ""

    def keep_coins(self, coins: Mapping[str, list[bool]]) -> None:
        """Write down, before training, which canaries of each silo went into its training records."""
        path = self.path / "canaries.json"
        if coins and not path.exists():
            write_json(path, {"included": coins})

    def record_before(self, egress: list[dict[str, Any]]) -> None:
        """Log what left before the first round."""
        append_lines(self.path / "egress.jsonl", egress)

    def record_discovery(self, found: Discovery) -> None:
        """Keep the groups that were found, for good."""
        write_json(self.path / DISCOVERY, found.to_mapping())

    @property
    def discovery(self) -> Discovery | None:
        """The groups that were found, and how sure that is; None where none were looked for."""
        found = self._found(DISCOVERY)
        return Discovery.of(found) if found else None

    def record_audit(self, found: Mapping[str, Any]) -> None:
        """Keep what ``fedloom audit`` found last."""
        write_json(self.path / "audit.json", found)

    @property
    def audit(self) -> dict[str, Any]:
        """What ``fedloom audit`` found last; empty where it has not looked."""
        return self._found("audit.json")

    def record_judgement(self, found: Mapping[str, Any]) -> None:
        """Keep the numbers by which the run is judged."""
        write_json(self.path / "verdict.json", found)

    def record_downstream(self, found: Mapping[str, Any]) -> None:
        """Keep what ``fedloom downstream`` found last."""
        write_json(self.path / "downstream.json", found)

    @property
    def downstream(self) -> dict[str, Any]:
        """What ``fedloom downstream`` found last; empty where it has not looked."""
        return self._found("downstream.json")

    def _found(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        except ValueError as error:
            raise RunFolderError(f"{path} is damaged ({error})") from error
        return found

    @property
    def overflow(self) -> Path:
        """Where a run at work puts what silos keep and memory does not hold."""
        return self.path / "overflow"

    @property
    def rounds_done(self) -> int:
        """The round of the newest checkpoint; 0 before the first."""
        return max(checkpoint_rounds(self.path), default=0)

    def metrics(self) -> list[dict[str, Any]]:
        """One row for each round, oldest first."""
        return read_lines(self.path / "metrics.jsonl")

    def egress(self) -> list[dict[str, Any]]:
        """One row for each silo and round: what left."""
        return read_lines(self.path / "egress.jsonl")

    def silo_events(self) -> list[dict[str, Any]]:
        """In a deployment: what happened with each silo in each round, oldest first."""
        return read_lines(self.path / "silos.jsonl")

    def record_round(self, metrics: dict[str, Any], egress: list[dict[str, Any]]) -> None:
        """Log a round; this comes before its checkpoint, so a checkpoint never lacks its log."""
        append_lines(self.path / "egress.jsonl", egress)
        append_lines(self.path / "metrics.jsonl", [metrics])

    def evaluations(self) -> list[dict[str, Any]]:
        """One row for each value that ``fedloom evaluate`` found, oldest first."""
        return read_lines(self.path / "evaluations.jsonl")

    def record_evaluation(self, round_number: int, values: Mapping[str, float], seconds: float) -> None:
        """Add the values of one metric, which took so many seconds together."""
        rows = [{"round": round_number, "key": k, "value": v, "seconds": seconds} for k, v in values.items()]
        append_lines(self.path / "evaluations.jsonl", rows)

    def latest_metrics(self) -> dict[str, float]:
        """The metrics of the newest round that the run evaluated, and of the newest that was evaluated since."""
        own = next((row for row in reversed(self.metrics()) if any(map(is_metric, row))), {"round": 0})
        rows = self.evaluations()
        newest = max((row["round"] for row in rows), default=0)
        later = {row["key"]: row["value"] for row in rows if row["round"] == newest}
        metrics = {key: value for key, value in own.items() if is_metric(key)}
        return {**metrics, **later} if newest >= own["round"] else {**later, **metrics}

    def rewind(self, round_number: int, *, logs: Sequence[str] = ("metrics.jsonl", "egress.jsonl")) -> None:
        """Forget what a killed run left after a round: log lines without a checkpoint, half-written checkpoints."""
        remove_unfinished(self.path / "checkpoints")
        for name in logs:
            rows = [row for row in read_lines(self.path / name) if row["round"] <= round_number]
            write_atomically(self.path / name, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def end(self, state: str, round_number: int, reason: str = "") -> None:
        """Record how the run ended: one of ``ENDS``, ``diverged`` with the reason."""
        write_json(self.path / "status.json", {"state": state, "round": round_number, "reason": reason})
        (self.path / SECRET_FILE).unlink(missing_ok=True)  # nothing will be done again

    def reopened(self, config: Config) -> RunFolder:
        """The folder of a run that goes on with more rounds; stopped anywhere, nothing is lost."""
        (self.path / "status.json").unlink(missing_ok=True)
        self.note({EARLIER: [*self.environment.get(EARLIER, []), self.config.rounds]})
        write_atomically(self.path / "run.toml", config.to_toml().encode())
        return replace(self, config=config)

    def digests(self) -> set[str]:
        """Of the configurations that its checkpoints may have been made with: it, and it with fewer rounds before."""
        earlier = self.environment.get(EARLIER, [])
        return {self.config.digest(), *(replace(self.config, rounds=rounds).digest() for rounds in earlier)}

    @property
    def status(self) -> dict[str, Any]:
        """How the run ended; ``unfinished`` while it has not."""
        path = self.path / "status.json"
        if not path.is_file():
            return {"state": "unfinished", "round": self.rounds_done, "reason": ""}
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise RunFolderError(f"{path} is damaged ({error})") from error
        if not isinstance(found, dict) or found.get("state") not in ENDS:
            raise RunFolderError(f"{path} is damaged: its state must be one of {', '.join(ENDS)}")
        return found

    def samples_of(self, round_number: int) -> Path:
        """The folder of a round's sample grids."""
        folder = self.path / "samples" / f"round-{round_number:04d}"
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder


def environment() -> dict[str, Any]:
    """Where and with what the run was made."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "fedloom": fedloom.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in ("torch", "numpy", "safetensors")} | packages_used(),
    }
