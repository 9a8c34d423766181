"""Silos whose records are somewhere else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from fedloom.federation.records import Records, Silo
from fedloom.outline import in_outline


@dataclass(frozen=True, eq=False)
class RemoteSilo(Silo):
    """An organisation of a deployment as the others know it: by name and groups, without a record."""

    __repr__ = in_outline

    declared: tuple[int, ...] = ()
    is_remote: ClassVar[bool] = True

    @classmethod
    def of(cls, name: str, groups: tuple[int, ...], shape: tuple[int, ...], kind: str = "") -> RemoteSilo:
        """A silo whose records, of a shape and kind, are somewhere else."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(name, Records(torch.empty(0, *shape), none, none, kind=kind), declared=groups)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The groups that the charter says the silo holds records of."""
        return self.declared
