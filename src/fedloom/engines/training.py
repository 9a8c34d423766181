"""Local training of one silo, the plain way: this loop is the truth that faster engines must equal."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedloom.config import Config
from fedloom.engines.base import (
    Result,
    SharedStep,
    SiloState,
    Task,
    attendance_of,
    counts_of,
    pretraining_phases,
    result_of_gradients,
    site_of,
)
from fedloom.engines.batches import EpochBatches, crew_of_one
from fedloom.engines.local_state import LocalState
from fedloom.engines.optimizers import gradients_of_mean
from fedloom.engines.private_training import (
    Learner,
    PrivateTraining,
    check_private,
    learners_of,
    made_up_records,
    parameters_of,
)
from fedloom.errors import FedloomError
from fedloom.federation.records import Batch, Federation, Records, Silo, batch_of
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, Phase, some_model
from fedloom.objectives.base import Step
from fedloom.privacy.noise import NoiseKey, Randomness, StreamNoise
from fedloom.privacy.payload_sums import Query, SumNoise
from fedloom.privacy.silo_privacy import SiloPrivacy, unit_numbers
from fedloom.sharing.codec import SLOT, flat
from fedloom.sharing.compression import UNCOMPRESSED, Compressed
from fedloom.sharing.plan import Tensors
from fedloom.sharing.update import EgressRecord, Update, pass_egress
from fedloom.streams import Streams

HOST = torch.device("cpu")
PRETRAINING_ROUND = 0  # whose coins and noise no round has


def local_steps(config: Config, records: int) -> int:
    """How many steps a silo takes in a round."""
    if config.local.steps:
        return config.local.steps
    steps = config.local.epochs * math.ceil(records / config.local.batch_size)
    if config.local.updates == "matched":
        return max(1, round(config.participation.rate * steps))
    return steps


@dataclass(frozen=True)
class Trainer:
    """Everything that local training needs; a pure function from task to result, in whatever process it runs."""

    config: Config
    method: Method
    federation: Federation
    privacy: tuple[SiloPrivacy, ...] = ()  # one for each silo under DP-SGD
    secret: Randomness | None = None  # of all that records are drawn and hidden by, where no task brings its own
    sealed: bool = False  # that single records fail must not be seen from outside
    device: torch.device = HOST  # of the steps; what is drawn, sent and kept lies on the CPU

    @cached_property
    def streams(self) -> Streams:
        """The experiment's random streams."""
        return Streams(self.config.seed)

    def randomness(self, secret: Randomness | None, *, trial: bool = False) -> Randomness:
        """What a silo's records are drawn and hidden by in a round: its ``secret``, or the seed where that will do."""
        found = secret or self.secret
        if found is None and not (trial or self.config.privacy.noise == "test"):
            raise FedloomError("a round under DP-SGD was begun without a secret for its noise")
        return found or self.seeded

    @cached_property
    def seeded(self) -> StreamNoise:
        """The randomness of the experiment's seed."""
        return StreamNoise(self.streams)

    @cached_property
    def attended(self) -> list[tuple[int, ...]]:
        """For each silo the rounds that it takes part in, as drawn in public before the run."""
        return attendance_of(self.config, self.federation)

    @cached_property
    def _templates(self) -> dict[Hashable, nn.Module]:
        return {}

    def train(self, task: Task) -> Result:
        """One silo's round: load what came down, train, keep what stays, send what is declared."""
        start = time.perf_counter()
        model = self._model(site_of(self.federation, task.silo)).to(self.device)
        state = self._begun(task, model)
        received = {name: tensor.to(self.device, copy=True) for name, tensor in task.received.items()}
        learners = learners_of(self.method.phases, model, state)
        bounds = {phase: bound[0] for phase, bound in state.bounds.items()}
        if task.step is not None:
            gradients = self._gradients(task, task.step, model, learners[0], received, bounds)
            # Payloads come from the model as it came down: a silo alone never has the next one.
            weights = model.cpu().state_dict()
            update, egress = self.sent(task, weights, codes={})
            return result_of_gradients(task, update, egress, gradients, time.perf_counter() - start)
        self._pretrain(task, model, received, bounds)

        sums: dict[str, Tensor] = {}
        steps = 0
        for terms in self._steps(task, model, learners, received, bounds):
            for name, value in terms.items():
                sums[name] = sums.get(name, torch.zeros(())) + value
            steps += 1

        model.load_state_dict(self.method.settle({name: w.clone() for name, w in model.state_dict().items()}))
        codes = state.compress({name: tensor.unsqueeze(0) for name, tensor in received.items()}, 1)
        weights, codes = model.cpu().state_dict(), {name: code[0].cpu() for name, code in codes.items()}
        update, egress = self.sent(task, weights, codes)
        return Result(
            silo=task.silo,
            update=update,
            egress=egress,
            state=state.kept(1)[0],
            terms={name: total.item() / steps for name, total in sums.items()},
            steps=steps,
            seconds=time.perf_counter() - start,
        )

    def _gradients(
        self, task: Task, step: SharedStep, model: nn.Module, learner: Learner, received: Tensors, bounds: Tensors
    ) -> Tensors:
        """Those of the one step, as whole steps of a grid: whoever sees the sum of all silos' takes it.

        Of other groups' copies they are zero, but for the noise: everybody's covers every record.
        """
        private = self._private(task, bounds)
        words = private.randomness.words(NoiseKey(task.silo, task.context.round, 0))
        site = site_of(self.federation, task.silo)
        own = flat("", self.method.plan.split(private.total(model, learner, received), site), SLOT)
        total = {name: own.get(name, torch.zeros(shape)) for name, shape in step.shapes.items()}
        return step.grid.released(total, self.privacy[task.silo].units, words)

    def step_by(self, silo: int, received: Tensors, gradients: Tensors, context: RoundContext) -> Tensors:
        """A model's weights after the one step of a round that these gradients make."""
        task = Task(silo, context, received, SiloState())
        model = self._model(site_of(self.federation, silo))
        state = self._begun(task, model)
        (learner,) = learners_of(self.method.phases, model, state)
        learner.step(gradients[name] for name in learner.parameters)
        return model.state_dict()

    def _begun(self, task: Task, model: nn.Module) -> LocalState:
        """What came down, else what the silo kept, else (first round of a private block) fresh weights."""
        state = state_of(self.method.phases, model, task, self.method.plan.compressed)
        for name, tensor in task.received.items():
            state.weights[name][0] = tensor
        kept = task.state.tensors
        state.load(0, kept, self.method, site_of(self.federation, task.silo), self.streams)
        state.load_bounds([kept], [task.mechanism] if task.mechanism else [])
        return state

    def sent(self, task: Task, weights: Tensors, codes: Tensors) -> tuple[Update, EgressRecord]:
        """What leaves a silo at the end of a round, through the egress guard.

        Of a trial only its blocks; of a step that is taken with a sum all but these. ``codes`` stand for weights that
        travel compressed.
        """
        plan, site, silo = self.method.plan, site_of(self.federation, task.silo), task.silo
        trial, summed = task.step_limit is not None, task.step is not None
        parts, coded = {} if summed else plan.split(weights, site), plan.split(codes, site)
        update = Update(
            silo=site.name,
            round=task.context.round,
            blocks={key: part for key, part in parts.items() if plan.blocks[key.block].up},
            counts=self.counts(silo),
            payloads={} if trial else self.payloads(silo, weights, task.context, task.secret),
            coded={key: part | coded[key] for key, part in parts.items() if key.block in plan.compressed.blocks},
        )
        return update, pass_egress(update, plan, site, parts)

    def steps(self, silo: int) -> int:
        """How many steps a silo takes in a round: batches of its records, under DP-SGD of its units."""
        units = self.privacy[silo].units if self.privacy else len(self.federation.silos[silo])
        return local_steps(self.config, units)

    def _model(self, site: Site) -> nn.Module:
        """A model for a site; copied from one of its kind, because drawing weights takes as long as a step."""
        kind = self.method.kind(site)
        if kind not in self._templates:
            self._templates[kind] = some_model(self.method, site)
        return copy.deepcopy(self._templates[kind])

    def _steps(
        self, task: Task, model: nn.Module, learners: list[Learner], received: Tensors, bounds: Tensors
    ) -> Iterator[dict[str, Tensor]]:
        """The round, step by step: the mean of each term of each phase."""

        def plain_step(learner: Learner, batch: Batch, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return self._step(learner, model, Step(batch, noise, received, task.context))

        if not learners:
            return
        silo = self.federation.silos[task.silo]
        limit = self.steps(task.silo) if task.step_limit is None else task.step_limit
        if task.mechanism is not None:
            private = self._private(task, bounds)
            yield from private.steps(limit, model, learners, received, plain_step)
            return
        for batch, noises in self._batches(silo, task, limit):
            terms: dict[str, Tensor] = {}
            for learner, noise in zip(learners, noises, strict=True):
                found = plain_step(learner, batch, noise) if learner.phase.trains_in(task.context) else {}
                terms |= {f"{learner.phase.name}/{term}": value for term, value in found.items()}
            yield terms

    def _private(self, task: Task, bounds: Tensors) -> PrivateTraining:
        assert task.mechanism is not None
        return PrivateTraining(
            task.mechanism,
            self.federation.silos[task.silo],
            task,
            self.streams,
            self.randomness(task.secret, trial=task.step_limit is not None),
            self.config.local.batch_size,
            bounds,
            self.made_up(task.silo),
            self.sealed,
            len(self.federation.classes) if self.method.labelled else 0,
        )

    def _pretrain(self, task: Task, model: nn.Module, received: Tensors, bounds: Tensors) -> None:
        """In a silo's first round, before its other steps: private ones on what nothing comes down for."""
        if task.step_limit is not None or not self.privacy or not self.privacy[task.silo].pretrains(task.context.round):
            return
        before = replace(
            task,
            context=replace(task.context, round=PRETRAINING_ROUND),
            mechanism=self.privacy[task.silo].pretraining_mechanism,
            step_limit=self.config.privacy.pretraining,
        )
        phases = pretraining_phases(self.method)
        learners = learners_of(phases, model, state_of(phases, model, before))
        for _ in self._steps(before, model, learners, received, bounds):
            pass

    def _step(self, learner: Learner, model: nn.Module, step: Step) -> dict[str, Tensor]:
        """One optimiser step of one phase; returns the mean of each term over the batch."""
        mask, parameters = step.batch.mask, list(learner.parameters.values())
        gradients: list[Tensor] = []
        sums: dict[str, Tensor] = {}
        for part in step.passes(learner.phase.at_once):
            losses = learner.phase.objective(model, part)
            found = gradients_of_mean(losses.total, part.batch.mask, parameters, mask)
            gradients = list(torch._foreach_add(gradients, found)) if gradients else list(found)
            for name, term in {"loss": losses.total, **losses.terms}.items():
                sums[name] = sums.get(name, 0.0) + (term.detach() * part.batch.mask).sum()
        learner.step(gradients)
        return {name: total / mask.sum() for name, total in sums.items()}

    def _batches(self, silo: Silo, task: Task, limit: int) -> Iterator[tuple[Batch, list[Tensors]]]:
        """Batches with the noise of each phase; both are functions of (silo, round, step) alone."""
        phases, size = self.method.phases, min(self.config.local.batch_size, len(silo))
        per_epoch = math.ceil(len(silo) / size)
        for first in range(0, limit, per_epoch):  # orders and noise of one epoch at a time
            crew = crew_of_one(phases, size, task, min(first + per_epoch, limit), len(silo), self.config.seed, first)
            for window in EpochBatches(crew).windows(per_epoch):
                index, mask, noises = window.inputs
                counts = mask.sum(dim=(1, 2), dtype=torch.int64).tolist()
                indices = index[:, 0].unbind()  # one call for the views of all steps
                drawn = [{name: tensor[:, 0].unbind() for name, tensor in noise.items()} for noise in noises]
                for step, rows in enumerate(counts):
                    yield (  # shapes need not be fixed here
                        batch_of(silo.train, indices[step][:rows]).to(self.device),
                        [{n: views[step][:rows].to(self.device) for n, views in noise.items()} for noise in drawn],
                    )

    def check_privacy(self) -> None:
        """Refuse what DP-SGD cannot guard, before anything is trained."""
        silos = range(len(self.federation)) if self.privacy else ()
        for index in {self.method.kind(site_of(self.federation, i)): i for i in silos}.values():
            made_up, model = self.made_up(index), self._model(site_of(self.federation, index))
            for phase in self.method.phases:
                if phase.touches_records:
                    check_private(model, phase, made_up, self.streams)
            for rule in self.method.payloads:
                rule.statistic.check(made_up, model)

    def made_up(self, silo: int) -> Records:
        """A few rows like those of a silo, to try things on."""
        return made_up_records(self.federation.silos[silo], len(self.federation.classes), self.streams)

    def payloads(
        self, silo: int, weights: Tensors, context: RoundContext, secret: Randomness | None, step: int = 0
    ) -> dict[str, Tensors]:
        """What a silo sends beside its blocks in a round, given its model's weights after training.

        Under a mechanism it must have been charged before this is called.
        """
        due = [rule for rule in self.method.payloads if context.round in rule.rounds(self.attended[silo])]
        if not due:
            return {}
        owner, model = self.federation.silos[silo], self._model(site_of(self.federation, silo))
        model.load_state_dict(weights or model.state_dict())
        found: dict[str, Tensors] = {}
        for rule in due:
            noise, noise_key = None, NoiseKey(silo, context.round, step, rule.name)
            if self.privacy and not rule.statistic.problem:
                privacy = self.privacy[silo]
                unit = unit_numbers(owner, privacy.settings.unit)
                multiplier = privacy.trust.share * privacy.payload_noise[rule.name]
                shapes = rule.payload.shapes if self.sealed else None
                noise = SumNoise(multiplier, unit, self.randomness(secret), shapes, privacy.grids.get(rule.name))
            found[rule.name] = rule.statistic.value(Query(owner.train, model, self.streams, noise_key, noise))
        return found

    def counts(self, silo: int) -> dict[str, float]:
        """How many records, or subjects where they are protected, are behind a silo's copies: in all and per group."""
        if silo not in self._counted:
            owner = self.federation.silos[silo]
            subject = unit_numbers(owner, self.privacy[silo].settings.unit) if self.privacy else None
            self._counted[silo] = counts_of(owner, self.federation.groups, subject)
        return self._counted[silo]

    @cached_property
    def _counted(self) -> dict[int, dict[str, float]]:
        return {}


def state_of(
    phases: Sequence[Phase], model: nn.Module, task: Task, compressed: Compressed = UNCOMPRESSED
) -> LocalState:
    """The weights of a silo's model as a stack of one, with optimisers that have not seen a step."""
    weights = {name: tensor.unsqueeze(0) for name, tensor in model.state_dict().items()}
    trained = [parameters_of(phase, model) for phase in phases]
    state = LocalState(phases, weights, trained, task.received, task.mechanism, compressed=compressed)
    state.begin(task.context)
    return state
