"""Work on runs from a page: begin, stop, go on, train on, hand on.

Each deed is shown first, and done when it is confirmed. What is done is what the command of the same words does, in a
process of its own.
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

from fedloom.certificate.matter import Approval
from fedloom.config import load_config
from fedloom.errors import ConfigError, FedloomError, unknown
from fedloom.presets import preset_names, starter_names
from fedloom.release.formats import FORMATS
from fedloom.release.provenance import FLAG as RISK
from fedloom.runs import background
from fedloom.runs.folder import RunFolder
from fedloom.settings import override
from fedloom.studio.catalogue import Catalogue
from fedloom.studio.handing_on import free_name

NAME = re.compile(r"[A-Za-z0-9][\w-]{0,63}", re.ASCII)
MOST_ROUNDS = 1_000_000
MOST_RECORDS = 1_000_000
Asked = Mapping[str, str]


@dataclass(frozen=True)
class Deed:
    """What somebody wants to be done: in words, and as a command on a run's folder."""

    sentence: str
    words: tuple[str, ...]
    folder: Path
    hands_on: bool = False  # then the run stays as it is, and the deed is waited for

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
        done = background.perform(deed.words) if deed.hands_on else background.begin(deed.words, deed.folder)
        if done.exit_code:
            last = done.said.strip().splitlines()
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

    def _certify(self, asked: Asked) -> Deed:
        folder, name = self._run(asked)
        approval = asked.get("approval", "").strip()
        if approval:
            Approval.of(approval)  # complains
        approved = (f"--approval={approval}",) if approval else ()
        sentence = f"Make the certificate of the run '{name}'"
        return Deed(sentence, ("certificate", str(folder), *approved), folder, hands_on=True)

    def _synthesize(self, asked: Asked) -> Deed:
        folder, name = self._run(asked)
        count, form = asked.get("records", ""), asked.get("format", "")
        if not count.isdecimal() or not 1 <= int(count) <= MOST_RECORDS:
            raise ConfigError(f"records = '{count}' must be a whole number up to {MOST_RECORDS:,}")
        if form not in FORMATS:
            raise ConfigError("format: " + unknown("format", form, FORMATS))
        out = folder / free_name(folder, "dataset")
        words = ("synthesize", str(folder), "--n", str(int(count)), "--format", form, "--out", str(out), *_risk(asked))
        return Deed(
            f"Make a data set of {int(count):,} records from the run '{name}', with a card",
            words,
            folder,
            hands_on=True,
        )

    def _export(self, asked: Asked) -> Deed:
        folder, name = self._run(asked)
        out = folder / free_name(folder, "generators")
        words = ("export", str(folder), "--out", str(out), *_risk(asked))
        return Deed(f"Write the generators of the run '{name}' for others, with a card", words, folder, hands_on=True)

    def _run(self, asked: Asked) -> tuple[Path, str]:
        entry = self.catalogue.entry(asked.get("run", ""))
        if RunFolder.open(entry.path).is_deployed:
            raise ConfigError(f"run '{entry.name}' is a federation's; its server stops it and goes on with it")
        return entry.path, entry.name


def _risk(asked: Asked) -> tuple[str, ...]:
    """A person's word that it shall be handed on all the same."""
    return (RISK,) if asked.get("risk") == "accepted" else ()


HAND_ON: Mapping[str, Callable[[Workbench, Asked], Deed]] = {
    "certify": Workbench._certify,
    "synthesize": Workbench._synthesize,
    "export": Workbench._export,
}
DEEDS: Mapping[str, Callable[[Workbench, Asked], Deed]] = {
    "begin": Workbench._new,
    "stop": Workbench._stop,
    "resume": Workbench._resume,
    "extend": Workbench._extend,
    **HAND_ON,
}
