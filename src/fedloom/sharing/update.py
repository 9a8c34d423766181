"""What a silo sends at the end of a round, and the guard that lets nothing undeclared leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedloom.errors import EgressError, FedloomError
from fedloom.federation.rounds import Site
from fedloom.outline import in_outline
from fedloom.sharing.codec import BLOCKS, PAYLOADS, placed, under
from fedloom.sharing.compression import check_codes, moved
from fedloom.sharing.plan import BlockKey, SharingPlan, Tensors


@dataclass(frozen=True)
class Update:
    """Blocks by owner and payloads by name, from one silo in one round."""

    __repr__ = in_outline

    silo: str
    round: int
    blocks: Mapping[BlockKey, Tensors]
    counts: Mapping[str, float]  # the silo's number of records or subjects, in all ("all") and per group ("group=...")
    payloads: Mapping[str, Tensors] = field(default_factory=dict)  # payload -> its tensors, by name
    coded: Mapping[BlockKey, Tensors] = field(default_factory=dict)  # as blocks travel that are compressed

    @property
    def parts(self) -> dict[str, Tensors]:
        """Blocks and payloads beside each other, as they travel."""
        blocks = {str(key): self.coded.get(key, part) for key, part in self.blocks.items()}
        return placed(BLOCKS, blocks) | placed(PAYLOADS, self.payloads)

    def holding(self, parts: Mapping[str, Tensors]) -> Update:
        """The same update with these parts; whatever is no block is a payload, and declared or not."""
        blocks = {BlockKey.of(key): part for key, part in under(BLOCKS, parts).items()}
        payloads = {n.removeprefix(PAYLOADS): part for n, part in parts.items() if not n.startswith(BLOCKS)}
        return replace(self, blocks=blocks, payloads=payloads)


@dataclass(frozen=True)
class EgressRecord:
    """One line of the egress log: what left, from whom, when, and how large it was."""

    round: int
    silo: str
    blocks: Mapping[str, Mapping[str, tuple[int, ...]]]  # block@owner -> tensor name -> shape
    payloads: Mapping[str, Mapping[str, tuple[int, ...]]]  # payload -> tensor name -> shape
    bytes: int
    sha256: str = ""  # only where bytes crossed a process
    masked: bool = False  # what left says nothing by itself: the server sees the sum alone

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for the log."""

        def plain(parts: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, dict[str, list[int]]]:
            return {key: {name: list(shape) for name, shape in part.items()} for key, part in parts.items()}

        return {
            "round": self.round,
            "silo": self.silo,
            "bytes": self.bytes,
            "blocks": plain(self.blocks),
            "payloads": plain(self.payloads),
            "sha256": self.sha256,
            **({"masked": True} if self.masked else {}),
        }

    @classmethod
    def of_mapping(cls, line: Mapping[str, Any]) -> EgressRecord:
        """The inverse of :meth:`to_mapping`."""

        def shapes(parts: Mapping[str, Mapping[str, list[int]]]) -> dict[str, dict[str, tuple[int, ...]]]:
            return {key: {name: tuple(shape) for name, shape in part.items()} for key, part in parts.items()}

        return cls(**{**line, "blocks": shapes(line["blocks"]), "payloads": shapes(line["payloads"])})


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor by its name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def landed(
    update: Update, plan: SharingPlan, forms: Mapping[BlockKey, Tensors], origin: Mapping[BlockKey, Tensors]
) -> Update:
    """What came of a silo, with weights where codes of their moves from ``origin`` travelled.

    ``forms`` are the blocks of the silo's model; what is not among them is left to the egress guard.
    """
    coded = {key: part for key, part in update.blocks.items() if key.block in plan.compressed.blocks and key in forms}
    weights = {key: moved(plan.compression, origin[key], part, forms[key]) for key, part in coded.items()}
    return replace(update, blocks={**update.blocks, **weights}, coded=coded)


def pass_egress(update: Update, plan: SharingPlan, site: Site, shapes: Mapping[BlockKey, Tensors]) -> EgressRecord:
    """The one door: raise unless everything in the update is declared, and say what left.

    ``shapes`` are the blocks as the silo's own model has them; a tensor of another name or shape is not declared.
    """
    declared = {key for block, rule in plan.blocks.items() if rule.up for key in plan.prefixes(block, site).values()}
    left: dict[str, dict[str, tuple[int, ...]]] = {}
    size = 8 * len(update.counts)
    for key, tensors in update.blocks.items():
        if key not in declared:
            raise EgressError(
                f"silo '{update.silo}' tried to send block '{key}', which its sharing plan does not send up"
            )
        for name, tensor in tensors.items():
            expected = shapes[key].get(name)
            if expected is None or expected.shape != tensor.shape:
                raise EgressError(
                    f"silo '{update.silo}' tried to send tensor '{name}' of shape {tuple(tensor.shape)} in block "
                    f"'{key}', which its sharing plan does not declare"
                )
        if key in update.coded:
            check_codes(plan.compression, update.coded[key], shapes[key])
        left[str(key)] = shapes_of(tensors)
        size += sum(tensor.nbytes for tensor in update.coded.get(key, tensors).values())
    allowed = {payload.name: payload.shapes for payload in plan.payloads}
    undeclared = sorted(set(update.payloads) - set(allowed))
    if update.counts and "records" not in allowed:
        undeclared.append("records")
    counted = {"all", *(f"group={plan.groups[group]}" for group in site.groups)}
    undeclared += [f"records of {owner}" for owner in sorted(set(update.counts) - counted)]
    if undeclared:
        raise EgressError(
            f"silo '{update.silo}' tried to send payload '{undeclared[0]}', which its sharing plan does not declare"
        )
    sent: dict[str, dict[str, tuple[int, ...]]] = {"records": {}} if update.counts else {}
    for payload, tensors in sorted(update.payloads.items()):
        for name, tensor in tensors.items():
            if allowed[payload].get(name) != tuple(tensor.shape):
                raise EgressError(
                    f"silo '{update.silo}' tried to send tensor '{name}' of shape {tuple(tensor.shape)} in payload "
                    f"'{payload}', which its sharing plan does not declare"
                )
            size += tensor.numel() * tensor.element_size()
        sent[payload] = shapes_of(tensors)
    return EgressRecord(update.round, update.silo, left, sent, size)


class DivergedError(FedloomError):
    """Training left the finite numbers."""


def _finite(tensor: Tensor) -> bool:
    """Whether every value is finite; the extremes tell it, many times faster than a look at each value."""
    return tensor.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())


def check_update(update: Update, known: Mapping[BlockKey, Tensors]) -> None:
    """The server's own look at an update: names and shapes it knows, finite values."""
    for key, tensors in update.blocks.items():
        missing = sorted(set(known.get(key, ())) - set(tensors))
        if missing:
            raise FedloomError(f"silo '{update.silo}' sent '{key}' without '{missing[0]}': refused")
        for name, tensor in tensors.items():
            if key in known and (name not in known[key] or known[key][name].shape != tensor.shape):
                raise FedloomError(
                    f"silo '{update.silo}' sent '{key}/{name}' with shape {tuple(tensor.shape)}: refused"
                )
            if not _finite(tensor):
                raise DivergedError(
                    f"silo '{update.silo}' sent values that are not finite in '{key}/{name}' in round {update.round}"
                )
    for payload, tensors in update.payloads.items():
        for name, tensor in tensors.items():
            if not _finite(tensor):
                raise DivergedError(
                    f"silo '{update.silo}' sent values that are not finite in payload '{payload}/{name}' in round "
                    f"{update.round}"
                )
