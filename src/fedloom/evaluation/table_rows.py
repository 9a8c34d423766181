"""What metrics of tables look at: rows of numbers as a schema means them, synthetic ones and real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedloom.errors import ConfigError
from fedloom.evaluation.evidence import Evaluation, Real
from fedloom.evaluation.metric import Need
from fedloom.modalities.schema import Numbers, Schema
from fedloom.modalities.table import FAMILY, schema_of
from fedloom.outline import in_outline


def _is_table(real: Real) -> None:
    modality = real.federation.modality
    if modality.family != FAMILY:
        raise ConfigError(f"evaluation.metrics names a metric of the rows of a table, and here are {modality.plural}")


TABLE = Need(lambda _: True, "", check=_is_table)


@dataclass(frozen=True, eq=False)
class TableRows:
    """The rows of one group."""

    __repr__ = in_outline

    group: str
    schema: Schema
    synthetic: Numbers
    training: Numbers  # of all its silos: only a simulation has them
    held_out: Numbers


def tables_of(evaluation: Evaluation) -> Iterator[TableRows]:
    """The rows of each group, as files would hold them."""
    real, schema = evaluation.real, schema_of(evaluation.real.federation.modality.name)
    for group, samples in evaluation.samples.items():
        yield TableRows(
            group,
            schema,
            real.federation.modality.encode(samples),
            real.training[group].x.cpu().numpy(),
            real.held_out[group].x.cpu().numpy(),
        )
