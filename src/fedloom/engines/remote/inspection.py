"""The server's own look at every update: names, shapes, dtypes, finite values, and norms beside what is possible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fedloom.engines.base import sent_down, site_of
from fedloom.engines.charging import privacy_of_silo
from fedloom.engines.training import Trainer
from fedloom.errors import FedloomError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, some_model
from fedloom.methods.steps import ServerState
from fedloom.privacy.ledger import BEFORE
from fedloom.privacy.payload_sums import largest
from fedloom.sharing.plan import BlockKey, Tensors
from fedloom.sharing.update import EgressRecord, Update, check_update, landed, pass_egress

ROUNDING = 1e-6  # of sums that are sent in single precision
SPARE = 2**20  # bytes
PIECE = 2**18  # values whose norm is taken at once
ENOUGH = 3  # updates of a block, below which nobody can say whose norm is the odd one


class RejectedError(FedloomError):
    """An update that is not taken."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """What each silo of a federation may send in an experiment."""

    trainer: Trainer
    max_records: int  # that a silo is believed to hold where nothing was declared
    records: Mapping[str, int] = field(default_factory=dict)  # the most that each silo declared; empty: nobody did

    @property
    def method(self) -> Method:
        """The experiment's method, whose plan says what may come."""
        return self.trainer.method

    @cached_property
    def _declared(self) -> dict[int, dict[BlockKey, Tensors]]:
        return {}

    def declared(self, silo: int) -> dict[BlockKey, Tensors]:
        """All blocks of a silo's model, with the names, shapes and dtypes that they must have."""
        if silo not in self._declared:
            site = site_of(self.trainer.federation, silo)
            self._declared[silo] = self.method.plan.split(some_model(self.method, site).state_dict(), site)
        return self._declared[silo]

    def most(self, silo: int) -> int:
        """Bytes that an update of a silo may have: what is declared, and as much again for names and forms."""
        plan = self.method.plan
        blocks = (tensors for key, tensors in self.declared(silo).items() if plan.blocks[key.block].up)
        size = sum(tensor.nbytes for tensors in blocks for tensor in tensors.values())
        size += sum(4 * math.prod(shape) for payload in plan.payloads for shape in payload.shapes.values())
        return 2 * size + SPARE

    def landed(self, silo: int, update: Update, server: ServerState) -> Update:
        """An update with weights where codes came; it moved from what its silo was sent in this round."""
        plan = self.method.plan
        if not plan.compressed.blocks:
            return update
        origin = sent_down(plan, server, site_of(self.trainer.federation, silo))
        return landed(update, plan, self.declared(silo), origin)

    def passed(
        self, silo: int, update: Update, due: Collection[str], known: Mapping[BlockKey, Tensors], sha256: str
    ) -> EgressRecord:
        """Raise unless the update is all that the plan sends up and nothing else; say what came.

        ``due`` are the payloads of this round, ``known`` the server's own copies.
        """
        plan, site, declared = self.method.plan, site_of(self.trainer.federation, silo), self.declared(silo)
        record = pass_egress(update, plan, site, declared)
        if update.round == BEFORE:
            declared = {}
            if update.blocks:
                raise RejectedError(f"silo '{update.silo}' sent blocks before the first round")
        for key, tensors in declared.items():
            if not plan.blocks[key.block].up:
                continue
            sent = update.blocks.get(key, {})
            for name, tensor in tensors.items():
                if name not in sent:
                    raise RejectedError(f"silo '{update.silo}' sent no tensor '{name}' of block '{key}'")
                if sent[name].dtype != tensor.dtype:
                    raise RejectedError(
                        f"silo '{update.silo}' sent tensor '{name}' of block '{key}' as {sent[name].dtype}, not as "
                        f"{tensor.dtype}"
                    )
        self._check_payloads(update, due)
        self._check_counts(update, site)
        check_update(update, known)
        self._check_sizes(silo, update)
        return replace(record, sha256=sha256)

    def weighed(self, update: Update) -> Update:
        """An update that passed, with its silo's weights in every mean: its numbers where they are bounded, else one.

        Where there is nothing to average, the numbers say how many records the sums in its payloads are of.
        """
        if self.records or not update.blocks:
            return update
        return replace(update, counts=dict.fromkeys(update.counts, 1.0))

    def _check_payloads(self, update: Update, due: Collection[str]) -> None:
        """Their names and shapes are declared, or they would not have got here; nothing may lack."""
        if set(update.payloads) != set(due):
            raise RejectedError(
                f"silo '{update.silo}' sent the payloads {sorted(update.payloads)}; round {update.round} asks for "
                f"{sorted(due)}"
            )
        shapes = {payload.name: payload.shapes for payload in self.method.plan.payloads}
        for payload, tensors in update.payloads.items():
            for name in shapes[payload]:
                dtype = tensors[name].dtype if name in tensors else None
                if dtype != torch.float32:
                    raise RejectedError(
                        f"silo '{update.silo}' sent tensor '{name}' of payload '{payload}' as {dtype}, not as float32"
                    )

    def _check_sizes(self, silo: int, update: Update) -> None:
        """Under DP-SGD a payload is clipped at the silo: its length is bounded by how many it is of, and the noise."""
        if not update.payloads or self.trainer.config.privacy.mechanism == "none":
            return
        units = int(update.counts["all"])
        privacy = privacy_of_silo(self.trainer.config, self.method, update.silo, units, self.trainer.attended[silo])
        for payload in privacy.payloads:
            tensors = update.payloads.get(payload.name, {})
            size, norm = sum(tensor.numel() for tensor in tensors.values()), _norm(tensors, {})
            most = largest(payload.statistic, units, privacy.payload_noise.get(payload.name, 0.0), size)
            if norm > most * (1 + ROUNDING):
                raise RejectedError(
                    f"silo '{update.silo}' sent payload '{payload.name}' with norm {norm:.3g}; {units} records or "
                    f"subjects and their noise can give {most:.3g}"
                )

    def _check_counts(self, update: Update, site: Site) -> None:
        """A silo's numbers are its weights in the mean: records add up, a subject may be of several groups."""
        counts = dict(update.counts)
        most = self.records[update.silo] if self.records else self.max_records
        groups = {f"group={self.method.plan.groups[group]}" for group in site.groups}
        believable = (
            counts.keys() == {"all", *groups}
            and all(count.is_integer() and 1 <= count <= most for count in counts.values())
            and max(counts[group] for group in groups) <= counts["all"] <= sum(counts[group] for group in groups)
        )
        if not believable:
            source = "as the charter declares" if self.records else "rounds.max_records in federation.toml"
            raise RejectedError(
                f"silo '{update.silo}' says that it holds {counts} records; whole numbers for {sorted(groups)} and "
                f"at most their sum are allowed, up to {most} ({source})"
            )


def outliers(updates: Sequence[Update], known: Mapping[BlockKey, Tensors], factor: float) -> dict[str, str]:
    """Silos whose copy of a block moved ``factor`` times as far as those of the others do, with the reason.

    The move is measured from what was sent down; where nothing comes down it is the norm of the block itself. Fewer
    than three copies cannot tell who is odd: they may move ``factor`` times the norm of the server's own copy, if it
    has one. A factor of 0 takes everything.
    """
    norms: dict[BlockKey | str, dict[str, float]] = {}
    for update in updates:
        for key, tensors in update.blocks.items():
            place = key if key in known else key.block
            norms.setdefault(place, {})[update.silo] = _norm(tensors, known.get(key, {}))
    found: dict[str, str] = {}
    for place, by_silo in norms.items():
        for silo, norm in by_silo.items():
            if len(by_silo) >= ENOUGH:
                usual, whose = statistics.median(other for name, other in by_silo.items() if name != silo), "others'"
            else:
                usual, whose = _norm(known.get(place, {}), {}) if isinstance(place, BlockKey) else 0.0, "server's"
            if factor and usual and norm > factor * usual:
                found.setdefault(
                    silo,
                    f"silo '{silo}' sent an update of '{place}' with norm {norm:.3g}, more than {factor:g} times the "
                    f"{whose} {usual:.3g}",
                )
    return found


def _norm(tensors: Tensors, origin: Mapping[str, torch.Tensor]) -> float:
    """In double precision, piece by piece: a whole model is nowhere copied for it."""
    norms = []
    for name, tensor in tensors.items():
        if name not in origin:
            norms.append(float(torch.linalg.vector_norm(tensor, dtype=torch.float64)))
            continue
        pieces = (torch.split(each.flatten(), PIECE) for each in (origin[name], tensor))
        norms += [
            float(torch.linalg.vector_norm(new.double() - old.double())) for old, new in zip(*pieces, strict=True)
        ]
    return math.hypot(*norms)
