"""Runs that the coordinator asks for: which experiment into which folder, and how it ended."""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path

from fedloom.config import Config
from fedloom.deployment.directories import ServerDirectory
from fedloom.deployment.processes import is_locked
from fedloom.errors import FedloomError
from fedloom.operations.trail import AUDIT, Trail
from fedloom.runs.files import write_json
from fedloom.settings import parse


@dataclass(frozen=True)
class Submission:
    """One request; a run that is resumed has several, and one name at the silos."""

    path: Path
    run: str
    folder: Path
    config: Config
    command: tuple[str, ...]  # what the coordinator typed

    @classmethod
    def create(cls, home: ServerDirectory, config: Config, folder: Path, run: str = "") -> Submission:
        """Write down what is asked for; without a ``run`` to go on with it is a new one."""
        for older in cls.unfinished(home) if run else ():
            if older.run == run and not is_locked(older.lock):
                older.end("it was handed in anew")
        number = uuid.uuid4().hex[:12]
        path = home.path / "submissions" / f"{number}.json"
        path.parent.mkdir(exist_ok=True)
        found = cls(path, run or number, folder.resolve(), config, tuple(sys.argv))
        tree = {"run": found.run, "folder": str(found.folder), "experiment": config.to_toml()}
        write_json(path, tree | {"command": list(found.command)})
        facts = {"run": found.run, "folder": str(found.folder), "experiment": config.digest()}
        Trail(home.path / AUDIT).note("handed in", facts)
        return found

    @classmethod
    def open(cls, home: ServerDirectory, number: str) -> Submission:
        """The run that was handed in under a number."""
        path = home.path / "submissions" / f"{number}.json"
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            config = parse(Config, tomllib.loads(tree["experiment"]))
            return cls(path, tree["run"], Path(tree["folder"]), config, tuple(tree["command"]))
        except (OSError, ValueError, KeyError) as error:
            raise FedloomError(f"{path} is missing or damaged ({error})") from error

    @property
    def number(self) -> str:
        """The number that the run was handed in under."""
        return self.path.stem

    @property
    def lock(self) -> Path:
        """Held by whoever carries the run out."""
        return self.path.with_name(f"{self.run}.lock")

    @property
    def stopping(self) -> Path:
        """There once the coordinator has stopped it."""
        return self.path.with_suffix(".stop")

    @classmethod
    def unfinished(cls, home: ServerDirectory) -> list[Submission]:
        """All that have no end yet, oldest first."""
        paths = (home.path / "submissions").glob("*.json")
        found = [path for path in paths if not path.with_suffix(".end").exists()]
        return [cls.open(home, path.stem) for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]

    @property
    def _ending(self) -> Path:
        return self.path.with_suffix(".end")

    def end(self, problem: str) -> None:
        """Write down how it ended; without a problem, as it should."""
        write_json(self._ending, {"problem": problem})

    @property
    def problem(self) -> str | None:
        """Why it ended, empty where it ended as it should; None while it has not."""
        if not self._ending.is_file():
            return None
        return str(json.loads(self._ending.read_text(encoding="utf-8"))["problem"])
