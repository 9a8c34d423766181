"""What metrics look at: real records, samples, features and whole models, each computed once and shared by all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedloom.backbones.catalogue import load_backbone
from fedloom.config import EvaluationConfig
from fedloom.errors import FedloomWarning
from fedloom.evaluation.domain import DomainClassifier
from fedloom.evaluation.features import FeatureCache
from fedloom.evaluation.frechet import Moments
from fedloom.evaluation.likelihood import codes, reconstructions
from fedloom.evaluation.memorisation import Memorisation, memorisation
from fedloom.federation.archives import cache_folder
from fedloom.federation.records import Federation, Records, Silo, concatenate
from fedloom.federation.rounds import Site
from fedloom.methods.generator import Generator
from fedloom.models.vae import VAE
from fedloom.outline import in_outline
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

Group = str | None  # a group by its name; None: all groups together

# Held-out records are chosen alike in all runs, whatever their seed: comparable, and extracted only once.
_CHOICE = Streams(0)

# Domain classifiers that have been fitted, for other runs of the same federation and seed.
_FITTED: WeakKeyDictionary[Federation, dict[tuple[Streams, torch.device], DomainClassifier]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Real:
    """The real side of every comparison; it depends on the federation alone, so a run computes it once."""

    federation: Federation
    config: EvaluationConfig
    streams: Streams
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    skipped: set[str] = field(default_factory=set)  # metrics of which a warning has been given

    @cached_property
    def held_out(self) -> dict[str, Records]:
        """At most ``evaluation.samples`` random held-out records of each group."""
        tables = {}
        for index, group in enumerate(self.federation.groups):
            table = self.federation.test.of_group(index)
            rows = _CHOICE.permutation("held-out", len(table))[: self.config.samples]
            tables[group] = table.take(rows.sort().values)
        return tables

    @cached_property
    def training(self) -> dict[str, Records]:
        """The pooled training records of each group: only a simulation can do this."""
        pooled = self.federation.training
        return {group: pooled.of_group(index) for index, group in enumerate(self.federation.groups)}

    @cached_property
    def domain_classifier(self) -> DomainClassifier:
        """Tells the groups apart; trained on the held-out records."""
        fitted, key = _FITTED.setdefault(self.federation, {}), (self.streams, self.device)
        if key not in fitted:
            found = DomainClassifier.fit(self.federation.test, len(self.federation.groups), self.streams)
            fitted[key] = found.to(self.device)
        return fitted[key]

    @cached_property
    def class_classifier(self) -> DomainClassifier:
        """Tells the classes apart, in the same way."""
        table = self.federation.test
        labelled = table.take(torch.nonzero(table.y >= 0).flatten())
        table = replace(labelled, group=labelled.y)
        return DomainClassifier.fit(table, len(self.federation.classes), self.streams).to(self.device)

    @cached_property
    def extractor(self) -> FeatureCache:
        """The configured backbone; what it sees in real records is kept on disk for later runs."""
        config = self.config
        backbone = load_backbone(
            config.backbone, device=self.device, resolution=config.resolution, weights=config.weights
        )
        return FeatureCache(backbone, cache_folder() / "features", self.federation.modality.decode)

    @cached_property
    def trial(self) -> Tensor:
        """The features of one record: whether the backbone works here at all."""
        return self.extractor.backbone.features(self.federation.test.take(torch.arange(1)).values)

    @cached_property
    def features(self) -> dict[Group, Tensor]:
        """The held-out records' features, of each group and of all."""
        # Without a network there is nothing that would be worth a file.
        stored = self.extractor.backbone.dimension is not None
        return _with_all({g: self.extractor.features(table.x, stored=stored) for g, table in self.held_out.items()})

    @cached_property
    def moments(self) -> dict[Group, Moments]:
        """Mean and covariance of those features."""
        return {group: Moments.of(features) for group, features in self.features.items()}


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A whole VAE with the held-out and training records of whoever it belongs to: a group, or a single silo."""

    model: VAE
    held_out: Records
    training: Records
    device: torch.device
    group: str | None = None
    silo: str | None = None

    def inputs(self, records: Records) -> tuple[Tensor, Tensor]:
        """Values and groups as the model takes them."""
        return records.modality.decode(records.x.to(self.device)), records.group.to(self.device)

    @cached_property
    def reconstructions(self) -> Tensor:
        """The held-out records through encoder and decoder, in [0, 1]."""
        return reconstructions(self.model, *self.inputs(self.held_out))

    def codes(self, records: Records) -> Tensor:
        """The encoder's means of any records, where the records are."""
        return codes(self.model, *self.inputs(records)).to(records.x.device)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A run at one moment, and all that is derived from it; nothing is computed before a metric asks for it."""

    __repr__ = in_outline

    real: Real
    generator: Generator
    # What silos keep of their models, by silo and parameter; only a simulation knows it.
    silos: Mapping[str, Tensors] = field(default_factory=dict)
    rounds: Sequence[Mapping[str, Any]] = ()  # rows of metrics.jsonl
    egress: Sequence[Mapping[str, Any]] = ()  # rows of egress.jsonl

    @property
    def config(self) -> EvaluationConfig:
        """How many samples, which backbone."""
        return self.real.config

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups by name."""
        return self.real.federation.groups

    @property
    def streams(self) -> Streams:
        """The run's random streams."""
        return self.real.streams

    @property
    def backbone(self) -> str:
        """Network and resolution, as they stand in keys."""
        return self.real.extractor.backbone.name

    @property
    def generates(self) -> bool:
        """Whether the server can sample every group along the method's first pathway."""
        return next(iter(self.generator.method.pathways), None) in self.generator.pathways

    def sample(self, group: str, pathway: str = "", prior_of: str = "") -> Tensor:
        """``evaluation.samples`` images of a group along any pathway, on the evaluation's device."""
        return self.generator.sample(
            self.config.samples,
            group=group,
            seed=self.streams.seed,
            pathway=pathway,
            prior_of=prior_of,
            device=self.real.device,
        )

    @property
    def participants(self) -> Sequence[Silo]:
        """The silos; where these are made on demand, those that have sent something."""
        federation = self.real.federation
        if not federation.on_demand:
            return federation.silos
        sent = federation.numbers_of({row["silo"] for row in self.egress})
        return [federation.silos[number] for number in sorted(sent.values())]

    @cached_property
    def samples(self) -> dict[str, Tensor]:
        """Images of each group along the method's first pathway."""
        return {group: self.sample(group) for group in self.groups}

    @cached_property
    def labels(self) -> dict[str, Tensor]:
        """The classes that the samples of each group were told, where the pathway is told one."""
        generator, count, seed = self.generator, self.config.samples, self.streams.seed
        return {g: generator.labels(count, seed=seed, shares=generator.label_shares_of(g)) for g in self.groups}

    @cached_property
    def features(self) -> dict[Group, Tensor]:
        """The features of samples, as many as there are held-out records, of each group and of all."""
        held_out, extractor = self.real.held_out, self.real.extractor
        return _with_all({g: extractor.features(x[: len(held_out[g])]) for g, x in self.samples.items()})

    @cached_property
    def memorisation(self) -> dict[str, Memorisation]:
        """Nearest training records of samples and of held-out records by pixels: indices into ``real.training``."""
        real, found = self.real, {}
        for group, x in self.samples.items():
            tables = x[: len(real.held_out[group])], real.held_out[group].x, real.training[group].x
            found[group] = memorisation(*(real.federation.modality.decode(table.to(real.device)) for table in tables))
        return found

    @cached_property
    def autoencoders(self) -> tuple[Autoencoder, ...]:
        """The VAEs that are known whole: the server's for each group, else each silo's own in a simulation."""
        if not isinstance(self.generator.method.build(Site("server", (0,))), VAE):
            return ()
        return self._of_groups() or self._of_silos()

    def _of_groups(self) -> tuple[Autoencoder, ...]:
        found = []
        for index, group in enumerate(self.groups):
            if (model := self.whole(Site("server", (index,)), {})) is None:
                return ()
            assert isinstance(model, VAE)
            tables = self.real.held_out[group], self.real.training[group]
            found.append(Autoencoder(model, *tables, self.real.device, group=group))
        return tuple(found)

    def _of_silos(self) -> tuple[Autoencoder, ...]:
        found = []
        for silo in self.participants:
            model = self.silo_model(silo)
            if model is not None:
                assert isinstance(model, VAE)
                held_out = concatenate([self.real.held_out[self.groups[group]] for group in silo.groups])
                found.append(Autoencoder(model, held_out, silo.train, self.real.device, silo=silo.name))
        return tuple(found)

    def silo_model(self, silo: Silo) -> nn.Module | None:
        """A silo's model with all its blocks, where they are known."""
        return self.whole(Site(silo.name, silo.groups), self.silos.get(silo.name, {}))

    def whole(self, site: Site, kept: Tensors) -> nn.Module | None:
        """The model of a site, if the server and the site's own memory have every block of it."""
        method = self.generator.method
        model = method.build(site)
        plan = method.generating if site.name == "server" else method.plan
        state = {**plan.join(self.generator.server.sampled, site), **kept}
        if set(model.state_dict()) - set(state):
            return None
        model.load_state_dict(state)
        return model.eval().to(self.real.device)

    def skip(self, metric: str, reason: str) -> dict[str, float]:
        """Say, once in a run, why a metric does not apply; find nothing."""
        if metric not in self.real.skipped:
            self.real.skipped.add(metric)
            warnings.warn(f"metric '{metric}' is left out: {reason}", FedloomWarning, stacklevel=3)
        return {}


def _with_all(tables: Mapping[str, Tensor]) -> dict[Group, Tensor]:
    """All groups together first, then each."""
    found: dict[Group, Tensor] = {None: torch.cat(list(tables.values()))}
    found.update(tables)
    return found
