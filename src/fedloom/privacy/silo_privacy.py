"""What the data of each silo will be used for: planned in public before a run, so that its noise can be calibrated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from torch import Tensor

from fedloom.config import PrivacyConfig
from fedloom.errors import ConfigError
from fedloom.federation.records import Silo
from fedloom.privacy.accounting import (
    Budget,
    Event,
    Gaussian,
    NoGuarantee,
    allocation,
    calibrate,
    check_delta,
    default_delta,
    noise_by_round,
    noise_multiplier,
)
from fedloom.privacy.clipping import SMALLEST, Clipping, Fixed, MedianNorm, Quantile
from fedloom.privacy.dp_sgd import DPSGD, compact
from fedloom.privacy.grids import Grid, SharedSum
from fedloom.privacy.ledger import BEFORE, PRETRAINING, UPDATE
from fedloom.privacy.payload_sums import Statistic, cost_of
from fedloom.privacy.sampling import sampling_rate
from fedloom.privacy.trust import Distributed, Local, Trust

PRETRAINING_SHARE = 0.1  # of the budget
REPEATABLE = "its noise comes from the experiment's seed, so that anybody can take it away again"
CLIPPINGS: dict[str, Callable[[float, float], Clipping]] = {  # of the first bound, and the least
    "fixed": lambda bound, _: Fixed(bound),
    "quantile": lambda bound, least: Quantile(initial=bound, floor=least),
    "median": lambda *_: MedianNorm(),
}


def check_settings(settings: PrivacyConfig) -> None:
    """What can be told of the settings before any silo is met."""
    for silo, epsilon in settings.budgets.items():
        if not epsilon > 0:
            raise ConfigError(f"privacy.budgets.{silo} = {epsilon:g} must be greater than 0")
    for payload, share in settings.shares.items():
        if not 0 < share <= 1:
            raise ConfigError(f"privacy.shares.{payload} = {share:g} must be greater than 0 and at most 1")
    if not settings.epsilon and not settings.noise_multiplier:
        raise ConfigError(
            "privacy.mechanism = 'dp-sgd' needs privacy.epsilon, or privacy.noise_multiplier, greater than 0"
        )


def unit_numbers(silo: Silo, unit: str) -> Tensor | None:
    """For the unit ``subject`` the subjects of a silo's records, numbered from 0; None where each record counts."""
    if unit == "record":
        return None
    if silo.train.subject is None:
        raise ConfigError(
            f"privacy.unit = 'subject', but the records of silo '{silo.name}' do not say whose they are; use 'record'"
        )
    return compact(silo.train.subject)


def number_of_units(silo: Silo, unit: str) -> int:
    """How many records or subjects a silo holds, which is public."""
    subject = unit_numbers(silo, unit)
    return len(silo) if subject is None else int(subject.max()) + 1


@lru_cache(maxsize=1024)  # silos are often alike
def _calibrated(
    budget: Budget, rounds: int, kind: str, rate: float, steps: int, given: float, releases: tuple[Event, ...]
) -> tuple[float, ...]:
    weights = allocation(rounds, kind)  # type: ignore[arg-type]
    if given:
        return tuple(given / math.sqrt(weight) for weight in weights)
    return tuple(noise_by_round(budget, weights, rate=rate, steps=steps, releases=releases))


@lru_cache(maxsize=1024)
def whole_noise(budget: Budget) -> float:
    """The noise multiplier of a single sum that spends the whole budget."""
    return calibrate(lambda noise: [Gaussian(noise)], budget)


@lru_cache(maxsize=1024)
def _pretraining_noise(budget: Budget, share: float, rate: float, steps: int) -> float:
    """For so many steps together as private as a single sum that has a share of the budget."""
    part = budget.spent([Gaussian(whole_noise(budget) / math.sqrt(share))])
    return noise_multiplier(replace(budget, epsilon=part), rate=rate, steps=steps)


@dataclass(frozen=True)
class PlannedPayload:
    """A payload that will be computed from a silo's records."""

    name: str
    statistic: Statistic
    rounds: tuple[int, ...]  # in which it is sent
    share: float  # of the budget: normal noise of a share s has 1/s of the variance that the whole would buy
    size: int = 0  # how many numbers it has


@dataclass(frozen=True)
class SiloPrivacy:
    """All that one silo's data will be used for; nothing here depends on more than their public number."""

    silo: str
    units: int  # records, or subjects: declared public
    rounds: tuple[int, ...]  # drawn before the run; no amplification by this draw is claimed
    steps: int  # noisy sums in a round
    batch_size: int
    settings: PrivacyConfig
    payloads: tuple[PlannedPayload, ...] = ()  # beside the update
    trust: Trust = field(default_factory=Local)
    partners: tuple[SiloPrivacy, ...] = ()  # those whose noise is its own: it must suffice for the strictest of them
    pretraining: int = 0  # noisy sums before the first round
    min_clip: float = SMALLEST  # that no bound falls below, whatever it follows

    @cached_property
    def rate(self) -> float:
        """Each record's probability to be in a batch; where nothing is trained on records, there are none."""
        return sampling_rate(self.batch_size, self.units, self.silo) if self.steps else 1.0

    @cached_property
    def granted(self) -> Budget:
        """What the configuration grants; an infinite epsilon is only counted."""
        settings = self.settings
        delta = check_delta(settings.delta, self.units) if settings.delta else default_delta(self.units)
        epsilon = settings.budgets.get(self.silo, settings.epsilon) or math.inf
        return Budget(epsilon, delta, settings.accountant, settings.unit)

    @property
    def budget(self) -> Budget:
        """What the ledger holds the silo to; where there is no guarantee, no budget could ever be kept."""
        return replace(self.granted, epsilon=math.inf) if self.problem else self.granted

    @cached_property
    def noise(self) -> dict[int, float]:
        """The noise multiplier of each planned round."""
        if not self.rounds or not self.steps:
            return {}
        settings = self.settings
        beside: tuple[Event, ...] = tuple(
            cost_of(each.statistic, self.payload_noise[each.name]) for each in self._guarded for _ in each.rounds
        )
        if self.pretraining:
            beside += (self.pretraining_mechanism.event(self.pretraining),)
        noises = _calibrated(
            self.granted,
            len(self.rounds),
            settings.allocation,
            self.rate,
            self.steps,
            settings.noise_multiplier,
            beside,
        )
        own = dict(zip(self.rounds, noises, strict=True))
        return {r: max([noise, *(partner.noise[r] for partner in self.partners)]) for r, noise in own.items()}

    @property
    def _guarded(self) -> list[PlannedPayload]:
        """Those releases that noise makes private."""
        return [release for release in self.payloads if release.rounds and not release.statistic.problem]

    @cached_property
    def payload_noise(self) -> dict[str, float]:
        """The noise multiplier of each payload; where nothing else is paid for, their shares make up the whole."""
        if self.settings.noise_multiplier:
            return {release.name: self.settings.noise_multiplier for release in self._guarded}
        total = sum(release.share for release in self._guarded) + (self._pretraining_share if self.pretraining else 0)
        if self.steps and total >= 1:
            raise ConfigError(
                f"privacy.shares: other releases take {total:g} of the budget of silo '{self.silo}', which leaves "
                "nothing for its training; together they must stay below 1"
            )
        whole = 1.0 if self.steps else total
        own = {
            release.name: whole_noise(self.granted) * math.sqrt(len(release.rounds) * whole / release.share)
            for release in self._guarded
        }
        return {n: max([noise, *(partner.payload_noise[n] for partner in self.partners)]) for n, noise in own.items()}

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The grid of each payload whose sum alone is seen; none where each silo adds all the noise."""
        if not isinstance(self.trust, Distributed):
            return {}
        return {
            each.name: self._grid(each.statistic.bound, self.payload_noise[each.name], each.size)
            for each in self._guarded
        }

    def update_grid(self, round: int, size: int) -> Grid:
        """The grid of the clipped gradients of a round's one step, over the expected batch: so many numbers."""
        return self._grid(self.settings.clip / self.batch_size, self.noise[round], size)

    def _grid(self, bound: float, multiplier: float, size: int) -> Grid:
        assert isinstance(self.trust, Distributed)
        units = sum(partner.units for partner in self.partners)
        shared = SharedSum(self.settings.bits, self.trust, units, bound, multiplier, size)
        return shared.grid()

    @property
    def _pretraining_share(self) -> float:
        return self.settings.shares.get(PRETRAINING, PRETRAINING_SHARE)

    @cached_property
    def pretraining_mechanism(self) -> DPSGD:
        """DP-SGD as it is before the first round."""
        given, share = self.settings.noise_multiplier, self._pretraining_share
        return self._mechanism(given or _pretraining_noise(self.granted, share, self.rate, self.pretraining))

    @property
    def least_noise(self) -> float:
        """The least noise multiplier of all that is released; infinite where nothing is."""
        pretraining = [self.pretraining_mechanism.noise_multiplier] if self.pretraining else []
        return min([*self.noise.values(), *self.payload_noise.values(), *pretraining], default=math.inf)

    def pretrains(self, round: int) -> bool:
        """Whether private steps come before those of a round: it must be the first."""
        return self.pretraining > 0 and self.rounds[:1] == (round,)

    def mechanism(self, round: int) -> DPSGD:
        """DP-SGD as it is in a round; in one that is not planned it is only tried, and nothing of that is kept."""
        return self._mechanism(self.noise.get(round, 1.0))

    def events(self, round: int) -> dict[str, Event]:
        """What a round costs: the update, if the silo trains on records, pretraining the first time, and payloads."""
        due = [release for release in self.payloads if round in release.rounds]
        steps = 0 if round == BEFORE else self.steps
        update: dict[str, Event] = {UPDATE: self.mechanism(round).event(steps)} if steps else {}
        if self.pretrains(round):
            update[PRETRAINING] = self.pretraining_mechanism.event(self.pretraining)
        update |= {each.name: cost_of(each.statistic, self.payload_noise.get(each.name, 0.0)) for each in due}
        return dict.fromkeys(update, NoGuarantee(self.problem)) if self.settings.noise == "test" else update

    @property
    def problem(self) -> str:
        """Why there is no DP guarantee; empty where there is one."""
        problems = (
            f"payload '{each.name}': {each.statistic.problem}" for each in self.payloads if each.statistic.problem
        )
        repeatable = REPEATABLE if self.settings.noise == "test" else ""
        return (self._mechanism(1.0).problem if self.steps else "") or next(problems, repeatable)

    def _mechanism(self, noise: float) -> DPSGD:
        settings = self.settings
        return DPSGD(
            noise_multiplier=noise,
            rate=self.rate,
            expected=self.batch_size,
            clipping=CLIPPINGS[settings.clipping](settings.clip, self.min_clip),
            unit=settings.unit,
            blocks=settings.blocks,
            trust=self.trust,
        )
