"""What somebody can do with released generators: score a record by their loss, or search for it among their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.likelihood import likelihoods
from fedloom.evaluation.neighbours import nearest
from fedloom.federation.outliers import is_outlier
from fedloom.federation.records import Canaries, Federation, Records, concatenate
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, Pathway, SampleInputs
from fedloom.methods.teachers import MERGED
from fedloom.modalities.base import Modality
from fedloom.models.gan import GAN
from fedloom.models.product_mixture import ProductMixture
from fedloom.models.vae import VAE
from fedloom.sharing.plan import Scope, Tensors
from fedloom.streams import Streams

DRAWS = 16  # of the latents, for the loss of a record
STARTS = 512  # outputs of which the nearest is where a search begins
STEPS = 200
RATE = 0.05
ROWS = 500  # records at once


class SampleKind(NamedTuple):
    """What a generator is asked for: outputs of a group, and of a class or from a group's prior."""

    group: int
    condition: int


@dataclass(frozen=True, eq=False)
class Target:
    """One generator that left its silos: a group's on the server, or one that a silo uploaded for itself."""

    name: str
    groups: tuple[int, ...]
    silos: tuple[int, ...]  # whose records it learned from
    model: nn.Module
    pathway: Pathway
    whole: bool  # whether every block of the model left its silo, not only those that generate
    device: torch.device
    streams: Streams
    modality: Modality  # of what it makes

    def conditions(self, records: Records) -> Tensor:
        """What the pathway is told of each record: its class, or the group whose prior it draws from."""
        return records.y if self.pathway.labelled else records.group

    def kinds(self, records: Records) -> list[SampleKind]:
        """Every group with every condition that occurs."""
        pairs = torch.stack([records.group, self.conditions(records)], dim=1)
        return [SampleKind(*pair) for pair in torch.unique(pairs, dim=0).tolist()]

    def of_kind(self, records: Records, kind: SampleKind) -> Tensor:
        """The places of a kind's records."""
        return torch.nonzero((records.group == kind.group) & (self.conditions(records) == kind.condition)).flatten()

    def generate(self, noise: Mapping[str, Tensor], kind: SampleKind) -> Tensor:
        """Outputs for such noise, all of one group and one condition."""
        rows = len(next(iter(noise.values())))
        group, condition = (torch.full((rows,), number, device=self.device) for number in kind)
        return self.pathway.generate(self.model, SampleInputs(noise, group, condition))

    def noise(self, purpose: str, rows: int, kind: SampleKind) -> dict[str, Tensor]:
        """Standard normal noise for so many outputs."""
        return {
            key: self.streams.normal(
                f"audit/{purpose}/{key}",
                rows,
                math.prod(shape),
                silo=kind.group,
                round=kind.condition,
                device=self.device,
            ).reshape(rows, *shape)
            for key, shape in self.pathway.noise.items()
        }

    def inputs(self, records: Records) -> Tensor:
        """Records as the model sees them."""
        return records.modality.decode(records.x.to(self.device))

    def values(self, records: Records) -> Tensor:
        """Records as they are compared: as the model sees them, unless their modality says otherwise."""
        coordinates = records.modality.coordinates
        return self.inputs(records) if coordinates is None else coordinates(records.x.to(self.device))

    @torch.no_grad()
    def samples(self, count: int, kind: SampleKind) -> Tensor:
        """Outputs for random noise, as records are compared."""
        noise = self.noise("samples", count, kind)
        rows = torch.split(torch.arange(count, device=self.device), ROWS)
        made = torch.cat([self.generate({k: v[part] for k, v in noise.items()}, kind) for part in rows])
        return made if self.modality.coordinates is None else self.modality.coordinates(made)

    def samples_like(self, records: Records, count: int) -> Tensor:
        """For each record the nearest of ``count`` outputs of its kind."""

        def nearest_sample(x: Tensor, kind: SampleKind) -> Tensor:
            made = self.samples(count, kind)
            return made[nearest(x, made)[1]]

        return self._by_kind(records, nearest_sample)

    def reconstructions(self, records: Records) -> Tensor:
        """For each record the closest output that a search over the noise finds, wherever the noise has to go."""
        return self._by_kind(
            records, lambda x, kind: torch.cat([self._searched(rows, kind) for rows in torch.split(x, ROWS)])
        )

    def _searched(self, x: Tensor, kind: SampleKind) -> Tensor:
        start = self.noise("search", STARTS, kind)
        with torch.no_grad():
            first = self.generate(start, kind)
            chosen = nearest(x, first)[1]
        noise = {name: tensor[chosen].clone().requires_grad_() for name, tensor in start.items()}
        optimizer = torch.optim.Adam(noise.values(), lr=RATE)
        best, least = first[chosen], torch.full((len(x),), torch.inf, device=self.device)
        for _ in range(STEPS):
            output = self.generate(noise, kind)
            errors = (output - x).square().flatten(1).sum(dim=1)
            better = errors.detach() < least
            least = torch.where(better, errors.detach(), least)
            best = torch.where(better.reshape(-1, *[1] * (x.dim() - 1)), output.detach(), best)
            if not errors.requires_grad:  # outputs that do not follow the noise: there is nowhere to go
                break
            gradients = torch.autograd.grad(
                errors.sum(), list(noise.values()), allow_unused=True, materialize_grads=True
            )
            for tensor, gradient in zip(noise.values(), gradients, strict=True):
                tensor.grad = gradient
            optimizer.step()
        return best

    def _by_kind(self, records: Records, outputs: Callable[[Tensor, SampleKind], Tensor]) -> Tensor:
        x = self.values(records)
        found = torch.empty_like(x)
        for kind in self.kinds(records):
            rows = self.of_kind(records, kind).to(self.device)
            found[rows] = outputs(x[rows], kind)
        return found

    @property
    def has_loss(self) -> bool:
        """Whether what left the silos is enough to compute a loss."""
        return self.whole and isinstance(self.model, VAE | GAN | ProductMixture)

    def losses(self, records: Records) -> Tensor:
        """Of each record, in nats: its negative evidence, or a bound, or how surely a discriminator calls it a fake."""
        x, group = self.inputs(records), records.group.to(self.device)
        if isinstance(self.model, VAE):
            return -likelihoods(self.model, x, group, DRAWS, self.streams).elbo
        if isinstance(self.model, ProductMixture):
            return self.model.negative_log(x)
        assert isinstance(self.model, GAN)
        with torch.no_grad():
            return torch.cat(
                [
                    functional.softplus(-self.model.judge(rows, groups, torch.ones_like(groups)))
                    for rows, groups in zip(torch.split(x, ROWS), torch.split(group, ROWS), strict=True)
                ]
            )


def targets_of(evaluation: Evaluation) -> list[Target]:
    """Every generator that the server of a run holds: its own, averages of groups, and those that silos uploaded."""
    federation, method = evaluation.real.federation, evaluation.generator.method
    if not method.pathways:  # it classifies
        return []
    server, silos = evaluation.generator.server, method.server_step.of_silos or method
    blocks = server.sampled
    places = [("group", "server", method, method.generating)]
    if silos is not method and method.server_plan is not None:  # otherwise the average is the server's own
        places.append(("average", MERGED, silos, silos.plan))
    found = []
    for kind, place, made_by, plan in places:
        for index, group in enumerate(federation.groups):
            holders = tuple(i for i, silo in enumerate(federation.silos) if index in silo.groups)
            site = Site(place, (index,))
            found.append(_target(evaluation, f"{kind}={group}", site, holders, made_by, plan.join(blocks, site)))
    uploaded = any(silos.plan.blocks[block].scope is Scope.SILO for block in next(iter(silos.pathways.values())).blocks)
    for index, silo in enumerate(federation.silos):
        site = Site(silo.name, silo.groups)
        sent = blocks if uploaded else method.server_step.sent_by(server, site)
        if sent:
            found.append(_target(evaluation, f"silo={silo.name}", site, (index,), silos, silos.plan.join(sent, site)))
    return [target for target in found if target is not None]


def _target(
    evaluation: Evaluation, name: str, site: Site, silos: tuple[int, ...], method: Method, state: Tensors
) -> Target | None:
    """The generator of a site with a state from the server, if that has all that generates."""
    pathway, device, model = next(iter(method.pathways.values())), evaluation.real.device, method.build(site)
    needed = {n for n in model.state_dict() if n.partition(".")[0] in pathway.blocks}
    if not needed <= set(state):
        return None
    model.load_state_dict(state, strict=False)
    return Target(
        name=name,
        groups=site.groups,
        silos=silos,
        model=model.eval().requires_grad_(False).to(device),
        pathway=pathway,
        whole=set(model.state_dict()) <= set(state),
        device=device,
        streams=evaluation.streams,
        modality=evaluation.real.federation.modality,
    )


@dataclass(frozen=True, eq=False)
class TrainingRecords:
    """The training records behind a target: typical ones, and outliers that were put in; canaries are left out."""

    typical: Records
    outliers: Records
    canaries: tuple[Canaries, ...]


def trained_on(federation: Federation, target: Target) -> TrainingRecords:
    """What a target learned from, as far as its groups go."""
    canaries = {found.silo: found for found in federation.canaries}
    tables = []
    for index in target.silos:
        silo = federation.silos[index]
        extra = int(canaries[silo.name].included.sum()) if silo.name in canaries else 0
        own = silo.train.take(torch.arange(len(silo) - extra))
        tables.append(own.take(torch.nonzero(torch.isin(own.group, torch.tensor(target.groups))).flatten()))
    pooled = concatenate(tables)
    marked = is_outlier(federation, pooled)
    return TrainingRecords(
        typical=pooled.take(torch.nonzero(~marked).flatten()),
        outliers=pooled.take(torch.nonzero(marked).flatten()),
        canaries=tuple(found for i in target.silos if (found := canaries.get(federation.silos[i].name))),
    )
