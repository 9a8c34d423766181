"""A run in a federation of others: what its parties are told, whatever the engine that tells them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import tomli_w

from fedloom.config import Config
from fedloom.deployment.charter import Charter
from fedloom.engines.remote.rules import RoundRules
from fedloom.errors import ConfigError
from fedloom.settings import parse


@dataclass(frozen=True)
class HostedRun:
    """What the parties are told: all of it stands in what is handed to the engine."""

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

    def told(self) -> dict[str, Any]:
        """As texts and plain values, which :meth:`of` reads back."""
        charter, experiment = tomli_w.dumps(self.charter.to_mapping()), self.config.to_toml()
        return {"run": self.run, "charter": charter, "experiment": experiment, "rounds": asdict(self.rules)}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> HostedRun:
        """From what was told."""
        config = parse(Config, tomllib.loads(str(told["experiment"])))
        return cls(config, charter_in(told), parse(RoundRules, told["rounds"], "rounds"), str(told["run"]))


def charter_in(told: Mapping[str, Any]) -> Charter:
    """The charter in what was told."""
    return Charter.of(tomllib.loads(str(told["charter"])))
