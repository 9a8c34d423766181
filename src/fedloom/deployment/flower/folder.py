"""The app as a folder for ``flwr run``: a description, which names what every machine has installed itself."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.engines.flower.rules import RoundRules
from fedloom.errors import ConfigError, RunFolderError
from fedloom.runs.files import write_folder_atomically
from fedloom.settings import parse

HEADING = """\
# An app for 'flwr run'. It holds no code: every machine needs the same version of fedloom, as fedloom[flower].
# A SuperNode says who it is: --node-config 'silo="NAME" home="/the/silo's/folder" data="/its/records"'
"""


@dataclass(frozen=True)
class FlowerApp:
    """What the parties of a run in a Flower federation are told: all of it stands in the app's description."""

    config: Config
    charter: Charter
    rules: RoundRules
    run: str  # the run's folder where the server's half runs, from its user's home

    def check(self) -> None:
        """Find a person's mistake before anything is sent."""
        from fedloom.engines.charging import shares_noise
        from fedloom.experiment import Experiment

        self.config.privacy.check_mechanism()
        if self.config.data.layout != "federated" or self.config.audit.canaries:
            raise ConfigError("a federation has no centralised layout (data.layout) and no canaries (audit.canaries)")
        if shares_noise(self.config):  # a turn would need what the process of the one before knew
            raise ConfigError(
                "privacy.trust = 'distributed' needs silos that stay awake between turns: use the wire 'direct' "
                "('fedloom federation init')"
            )
        Experiment.of(self.config, self.charter.at_the_server())

    def write(self, folder: Path) -> None:
        """Into a new folder."""
        if folder.exists():
            raise RunFolderError(f"{folder} exists already; choose another --out")
        told = {"charter": tomli_w.dumps(self.charter.to_mapping()), "experiment": self.config.to_toml()}
        description = {
            "project": {
                "name": "fedloom-app",
                "version": "1.0.0",
                "description": f"{self.config.name} in the federation {self.charter.name}",
                "license": "Apache-2.0",
                "dependencies": [],
            },
            "tool": {
                "flwr": {
                    "app": {
                        "publisher": "fedloom",
                        "components": {
                            "serverapp": "fedloom.deployment.flower.app:server",
                            "clientapp": "fedloom.deployment.flower.app:client",
                        },
                        "config": {"run": self.run, **told, "rounds": asdict(self.rules)},
                    }
                }
            },
        }
        text = HEADING + tomli_w.dumps(description, multiline_strings=True)
        write_folder_atomically(folder, {"pyproject.toml": text.encode()})

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> FlowerApp:
        """From the run's config as Flower hands it out, in which tables are dotted names."""
        rules = {key.removeprefix("rounds."): value for key, value in told.items() if key.startswith("rounds.")}
        config = parse(Config, tomllib.loads(str(told["experiment"])))
        return cls(config, charter_in(told), parse(RoundRules, rules, "rounds"), str(told["run"]))


def charter_in(told: Mapping[str, Any]) -> Charter:
    """The charter in a run's config."""
    return Charter.of(tomllib.loads(str(told["charter"])))
