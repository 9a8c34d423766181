"""Local training of one silo under DP-SGD: the plain loop again, with Poisson batches and noisy sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedloom.engines.base import Task
from fedloom.errors import ConfigError
from fedloom.federation.records import UNLABELLED, Batch, Silo, batch_of
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.privacy.dp_sgd import DPSGD, ClippedSum, compact, total_of
from fedloom.privacy.noise import Moment, StreamNoise
from fedloom.privacy.per_example import Watch, require_faithful, require_separate_examples
from fedloom.privacy.planning import unit_numbers
from fedloom.privacy.sampling import Pass, capacity, passes, poisson_sample, subject_passes
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

TRIED_ROWS = 4


@dataclass(frozen=True, eq=False)
class Learner:
    """A phase at work: the parameters that it trains, by their names in the model, and their optimiser."""

    phase: Phase
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.Optimizer


PlainStep = Callable[[Learner, Batch, Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class PrivateTraining:
    """One silo's round under DP-SGD, with the coins and the noise of a simulation."""

    mechanism: DPSGD
    silo: Silo
    task: Task
    streams: Streams
    batch_size: int
    bounds: Tensors  # phase -> the clip bound of its next step; the steps move it on

    def steps(
        self, count: int, model: nn.Module, learners: list[Learner], received: Tensors, plain_step: PlainStep
    ) -> Iterator[dict[str, Tensor]]:
        """``count`` steps, each with the mean terms of all its phases.

        Every phase that touches records draws a batch of its own: two sums over one sample would cost more than they
        are accounted for. The others see as many rows in every step, whoever was drawn.
        """
        private = [learner for learner in learners if learner.phase.touches_records]
        for step in range(count):
            terms: dict[str, Tensor] = {}
            for learner in learners:
                if learner.phase.touches_records:
                    moment = step * len(private) + private.index(learner)
                    found = self._private_step(learner, model, received, step, self._moment(moment))
                else:
                    noise = self._noise(learner.phase, step, self.batch_size)
                    found = plain_step(learner, public_batch(self.silo, self.batch_size), noise)
                terms |= {f"{learner.phase.name}/{name}": value for name, value in found.items()}
            yield terms

    def _private_step(
        self, learner: Learner, model: nn.Module, received: Tensors, step: int, moment: Moment
    ) -> dict[str, Tensor]:
        phase, mechanism = learner.phase, self.mechanism
        bound = self.bounds.setdefault(phase.name, mechanism.clipping.start())
        drawn = self._drawn(moment)
        rows = len(drawn[0].index)
        noise = self._noise(phase, step, rows * len(drawn))
        sums: list[ClippedSum] = []
        terms: Tensors = {}
        for number, each in enumerate(drawn):
            batch = batch_of(self.silo.train, each.index, each.mask)
            part = {name: tensor[number * rows : (number + 1) * rows] for name, tensor in noise.items()}
            with Watch(model, list(learner.parameters)) as watch:
                losses = phase.objective(model, batch, part, received, self.task.context)
            subject = None if batch.subject is None else compact(batch.subject)
            sums.append(
                mechanism.clipped_sum(losses.total, each.mask, learner.parameters, bound, watch=watch, subject=subject)
            )
            for name, term in {"loss": losses.total, **losses.terms}.items():
                terms[name] = terms.get(name, torch.zeros(())) + (term.detach() * each.mask).sum()
        secret = StreamNoise(self.streams)
        gradients, following = mechanism.release(total_of(sums), mechanism.draw(learner.parameters, secret, moment))
        self.bounds[phase.name] = following
        for name, parameter in learner.parameters.items():
            parameter.grad = gradients[name]
        learner.optimizer.step()
        learner.optimizer.zero_grad()
        real = torch.stack([each.mask.sum() for each in drawn]).sum().clamp_min(1.0)
        return {name: total / real for name, total in terms.items()}

    @cached_property
    def _subject(self) -> Tensor | None:
        return unit_numbers(self.silo, self.mechanism.unit)

    def _moment(self, step: int) -> Moment:
        return Moment(self.task.silo, self.task.context.round, step)

    def _drawn(self, moment: Moment) -> list[Pass]:
        """The batch of a moment, whole."""
        subject, rate = self._subject, self.mechanism.rate
        units = len(self.silo) if subject is None else int(subject.max()) + 1
        chosen, rows = poisson_sample(StreamNoise(self.streams), units, rate, moment), capacity(units, rate)
        return passes(chosen, rows) if subject is None else subject_passes(chosen, subject, rows)

    def _noise(self, phase: Phase, step: int, rows: int) -> dict[str, Tensor]:
        """An objective's own noise; its rows run on from pass to pass."""
        return objective_noise(self.streams, phase, rows, self._moment(step))


def objective_noise(streams: Streams, phase: Phase, rows: int, moment: Moment) -> dict[str, Tensor]:
    """The noise that ``rows`` examples need in one step."""
    found = {}
    for name, shape in phase.objective.noise.items():
        flat = streams.normal(
            f"noise/{phase.name}/{name}",
            rows,
            math.prod(shape),
            silo=moment.silo,
            round=moment.round,
            step=moment.step,
        )
        found[name] = flat.reshape(rows, *shape)
    return found


def public_batch(silo: Silo, rows: int) -> Batch:
    """Rows for a phase that touches no records: none of them is one, and the silo's groups take turns."""
    groups = torch.tensor(silo.groups)
    return Batch(
        x=torch.zeros(rows, *silo.train.shape),
        y=torch.full((rows,), UNLABELLED),
        group=groups[torch.arange(rows) % len(groups)],
        mask=torch.ones(rows),
    )


def check_private(
    model: nn.Module, phase: Phase, parameters: Mapping[str, nn.Parameter], silo: Silo, streams: Streams
) -> None:
    """Refuse, by name, what DP-SGD cannot bound: mixed examples, buffers that learn, parameters used behind a layer."""
    batch = batch_of(silo.train, torch.arange(TRIED_ROWS) % len(silo))
    noise = objective_noise(streams, phase, TRIED_ROWS, Moment(0, 0, 0))
    received = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    context = RoundContext(1, 1, ())

    def losses(x: Tensor) -> Tensor:
        return phase.objective(model, replace(batch, x=x), noise, received, context).total

    with Watch(model, list(parameters)) as watch:
        values = losses(batch.x)
    for name, buffer in model.named_buffers():
        if name in received and not torch.equal(buffer, received[name]):
            raise ConfigError(
                f"phase '{phase.name}' changes the buffer '{name}' by what it sees, which DP-SGD does not guard; "
                "use layers without running statistics, such as group norm"
            )
    objective = type(phase.objective).__name__
    require_separate_examples(losses, batch.x, objective, "one that scores each example by itself")
    if watch.complete:
        require_faithful(values, watch, parameters)
