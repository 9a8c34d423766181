"""Work on runs from a page: begin, stop, go on, train on. Each deed is shown first, and done when it is confirmed.

What is done is what the command of the same words does, in a process of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.config import load_config
from fedloom.errors import ConfigError, FedloomError, unknown
from fedloom.presets import preset_names, starter_names
from fedloom.runs import background
from fedloom.runs.folder import RunFolder
from fedloom.settings import override
from fedloom.studio.catalogue import Catalogue

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
MOST_ROUNDS = 1_000_000
Asked = Mapping[str, str]


@dataclass(frozen=True)
class Deed:
    """What somebody wants to be done: in words, and as a command on a run's folder."""

    sentence: str
    words: tuple[str, ...]
    folder: Path

    @property
    def command(self) -> str:
        """As a person would type it."""
        return shlex.join(("fedloom", *self.words))


@dataclass(frozen=True)
class Workbench:
    """The deeds over a runs folder; a confirmation holds for what was shown, in this studio, alone."""

    catalogue: Catalogue
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    @property
    def presets(self) -> list[str]:
        """What a run may begin from."""
        return starter_names()

    def deed(self, asked: Asked) -> Deed:
        """What is asked for, checked as far as it can be before it is done."""
        kind = asked.get("deed", "")
        if kind not in DEEDS:
            raise ConfigError("deed: " + unknown("deed", kind, DEEDS))
        return DEEDS[kind](self, asked)

    def seal(self, deed: Deed) -> str:
        """What a confirmation must bring."""
        text = json.dumps([deed.words, str(deed.folder)])
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def carry_out(self, asked: Asked) -> None:
        """Do what was shown and confirmed."""
        deed = self.deed(asked)
        if not hmac.compare_digest(self.seal(deed), asked.get("seal", "")):
            raise ConfigError("this was not confirmed, or is not what was shown; look at it again, and confirm it")
        if deed.words[0] == "stop":
            background.stop(deed.folder)
            return
        begun = background.begin(deed.words, deed.folder)
        if begun.exit_code:
            last = begun.said.strip().splitlines()
            raise FedloomError(last[-1].removeprefix("Error: ") if last else "it ended at once")

    def _new(self, asked: Asked) -> Deed:
        name, source = asked.get("name", ""), asked.get("source", "")
        if not NAME.fullmatch(name):
            raise ConfigError(f"name = '{name}' must be letters, digits, - and _ alone, 64 of them at most")
        folder = self.catalogue.root / name
        if folder.exists():
            raise ConfigError(f"there is a run '{name}' already; choose another name")
        if source not in preset_names():
            raise ConfigError(unknown("preset", source, preset_names(), "'fedloom list presets' names them"))
        settings = shlex.split(asked.get("settings", ""))
        override({}, settings)
        load_config(source, settings).privacy.check_mechanism()
        return Deed(f"Begin the run '{name}'", ("run", source, *settings, "--out", str(folder)), folder)

    def _stop(self, asked: Asked) -> Deed:
        folder, name = self._run(asked)
        return Deed(f"Stop the run '{name}'; all up to its last checkpoint is kept", ("stop", str(folder)), folder)

    def _resume(self, asked: Asked) -> Deed:
        folder, name = self._run(asked)
        return Deed(f"Go on with the run '{name}'", ("resume", str(folder)), folder)

    def _extend(self, asked: Asked) -> Deed:
        folder, name = self._run(asked)
        text = asked.get("rounds", "")
        if not text.isdecimal() or not 1 <= int(text) <= MOST_ROUNDS:
            raise ConfigError(f"rounds = '{text}' must be a whole number up to {MOST_ROUNDS:,}")
        sentence = f"Train the run '{name}' on, to {int(text):,} rounds in all"
        return Deed(sentence, ("resume", str(folder), f"rounds={int(text)}"), folder)

    def _run(self, asked: Asked) -> tuple[Path, str]:
        entry = self.catalogue.entry(asked.get("run", ""))
        if RunFolder.open(entry.path).is_deployed:
            raise ConfigError(f"run '{entry.name}' is a federation's; its server stops it and goes on with it")
        return entry.path, entry.name


DEEDS: Mapping[str, Callable[[Workbench, Asked], Deed]] = {
    "begin": Workbench._new,
    "stop": Workbench._stop,
    "resume": Workbench._resume,
    "extend": Workbench._extend,
}
