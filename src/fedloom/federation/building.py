"""Building a federation: from the configuration, or from arrays in memory."""

from __future__ import annotations

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, unknown
from fedloom.federation.partitions import divide
from fedloom.federation.records import Federation, Silo
from fedloom.federation.sources import SOURCES
from fedloom.streams import Streams


def build_federation(config: DataConfig, streams: Streams) -> Federation:
    """Load the source, divide its records among silos, and pool them again if the layout is centralised."""
    if config.source not in SOURCES:
        raise ConfigError("data.source: " + unknown("source", config.source, SOURCES))
    dataset = SOURCES[config.source].load(config.path)
    silos = tuple(Silo(name, dataset.train.take(index)) for name, index in divide(dataset, config, streams))
    federation = Federation(dataset.name, silos, dataset.test, dataset.groups, dataset.classes)
    return federation.centralised() if config.layout == "centralised" else federation
