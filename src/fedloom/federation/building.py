"""Building a federation: from the configuration, or from arrays in memory."""

from __future__ import annotations

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, unknown
from fedloom.federation.partitions import PARTITIONS
from fedloom.federation.records import Federation, Silo
from fedloom.federation.sources import SOURCES
from fedloom.streams import Streams


def build_federation(config: DataConfig, streams: Streams) -> Federation:
    """Load the source, divide its records among silos, and pool them again if the layout is centralised."""
    if config.source not in SOURCES:
        raise ConfigError("data.source: " + unknown("source", config.source, SOURCES))
    if config.partition not in PARTITIONS:
        raise ConfigError("data.partition: " + unknown("partition", config.partition, PARTITIONS))
    dataset = SOURCES[config.source].load(config.path)
    silos = []
    for number, (name, index) in enumerate(PARTITIONS[config.partition].divide(dataset, config, streams)):
        if 0 < config.records_per_silo < len(index):
            order = streams.permutation("records-per-silo", len(index), silo=number)
            index = index[order[: config.records_per_silo]]
        silos.append(Silo(name, dataset.train.take(index)))
    federation = Federation(dataset.name, tuple(silos), dataset.test, dataset.groups, dataset.classes)
    return federation.centralised() if config.layout == "centralised" else federation
