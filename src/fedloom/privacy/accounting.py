"""What releases cost: events as plain values, and the epsilon that any number of them spend together.

Neighbours differ by one record (or one subject) that is added or removed. Two accountants: privacy loss
distributions (``pld``, tight) and Renyi divergences (``rdp``, looser). Both hold for events that were planned in
advance; where later events are chosen after looking at earlier results, as across runs, only ``filter`` holds: a
Renyi filter at one order fixed by the budget (Feldman, Zrnic, "Individual Privacy Accounting via a Renyi Filter",
NeurIPS 2021).

The same events cost more where one record is replaced by another, whose contributions are v and w, of length at most
1, and whose coins are heads with probability q. By how much (1 - q) N(0) + q N(v) exceeds e times (1 - q) N(0) + q N(w)
is the price of an option on the spread of two lognormal variables, the densities of N(v) and N(w) by that of N(0): it
falls with their correlation (Plackett 1954), and where that is -1, rises with both variances. So no two records cost
more, at any e, than opposite ones of full length, and neither do compositions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedloom.errors import ConfigError, FedloomError, FedloomWarning, MissingExtraError, unknown

Vector = npt.NDArray[np.float64]
Accountant = Literal["pld", "rdp"]
Neighbours = Literal["added", "replaced"]  # one record more (or less), or another in its place

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 80, 96, 128, 192, 256, 512, 1024)
BEYOND_DIGITS = 1000.0  # an epsilon above this is told by RDP: its exact distribution would take gigabytes
TAILS, NODES = 12.0, 2001  # of the integral behind RDP
WITHIN = 0.99  # calibration spends at least this part of its target
WIDEST = 16.0  # a search for noise goes from e^-16 to e^16


@dataclass(frozen=True)
class Gaussian:
    """``steps`` sums over Poisson samples at ``rate``, with normal noise ``noise_multiplier`` sensitivities wide."""

    noise_multiplier: float
    rate: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ConfigError(f"noise_multiplier is {self.noise_multiplier}; it must be a finite number of at least 0")
        if not 0 < self.rate <= 1:
            raise ConfigError(f"rate is {self.rate}; a sampling rate must be greater than 0 and at most 1")
        if self.steps < 0:
            raise ConfigError(f"steps is {self.steps}; it must be at least 0")


@dataclass(frozen=True)
class NoGuarantee:
    """A release that no finite epsilon covers."""

    reason: str


Event = Gaussian | NoGuarantee

_KINDS: dict[str, type[Gaussian] | type[NoGuarantee]] = {"gaussian": Gaussian, "no-guarantee": NoGuarantee}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def to_mapping(event: Event) -> dict[str, Any]:
    """An event as plain JSON values; what a kind means never changes, because ledgers keep these for good."""
    return {"kind": _NAMES[type(event)], **asdict(event)}


def event_of(mapping: Mapping[str, Any]) -> Event:
    """Read back what :func:`to_mapping` gave."""
    values = dict(mapping)
    kind = values.pop("kind", None)
    if kind not in _KINDS:
        raise FedloomError(unknown("privacy event", str(kind), _KINDS))
    return _KINDS[kind](**values)


def spent(
    events: Iterable[Event], delta: float, accountant: Accountant = "pld", neighbours: Neighbours = "added"
) -> float:
    """The epsilon of all these events together at ``delta``; infinite if one of them has no guarantee."""
    accountants: dict[str, Account] = {"pld": _spent_pld, "rdp": _spent_rdp}
    if accountant not in accountants:
        raise ConfigError(unknown("accountant", accountant, accountants))
    return _spent(events, delta, accountants[accountant], neighbours)


Account = Callable[[tuple[Gaussian, ...], float, Neighbours], float]


def _spent(events: Iterable[Event], delta: float, account: Account, neighbours: Neighbours) -> float:
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must lie between 0 and 1")
    merged: dict[tuple[float, float], int] = {}
    for event in events:
        if isinstance(event, NoGuarantee):
            return math.inf
        if event.steps:
            kind = (event.noise_multiplier, event.rate)
            merged[kind] = merged.get(kind, 0) + event.steps
    if any(noise == 0 for noise, _ in merged):
        return math.inf
    if not merged:
        return 0.0
    return account(tuple(Gaussian(*kind, steps) for kind, steps in sorted(merged.items())), delta, neighbours)


@lru_cache(maxsize=1024)  # the silos of a run often have the same history
def _spent_pld(events: tuple[Gaussian, ...], delta: float, neighbours: Neighbours) -> float:
    rough = _spent_rdp(events, delta, neighbours)
    if rough > BEYOND_DIGITS:
        return rough
    try:
        from dp_accounting import (  # type: ignore[import-untyped]
            GaussianDpEvent,
            NeighboringRelation,
            PoissonSampledDpEvent,
        )
        from dp_accounting.pld import PLDAccountant  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"accounting by 'pld' needs the package '{error.name}'; pip install 'fedloom[privacy]'"
        ) from error
    # Rounding losses up to this grid adds less than 0.1 % to epsilon; a finer one takes seconds for large epsilons.
    grid = 1e-4 * min(max(rough, 1.0), 100.0)
    relations = {"added": NeighboringRelation.ADD_OR_REMOVE_ONE, "replaced": NeighboringRelation.REPLACE_ONE}
    accountant = PLDAccountant(relations[neighbours], value_discretization_interval=grid)
    for event in events:
        one = GaussianDpEvent(event.noise_multiplier)
        accountant.compose(one if event.rate == 1 else PoissonSampledDpEvent(event.rate, one), event.steps)
    return float(accountant.get_epsilon(delta))


def _spent_rdp(
    events: tuple[Gaussian, ...], delta: float, neighbours: Neighbours, orders: Sequence[float] = ORDERS
) -> float:
    """The best order's divergence, converted to epsilon (Canonne, Kamath, Steinke 2020, proposition 12)."""
    order = np.asarray(orders, dtype=np.float64)
    divergence = sum(
        event.steps * renyi_divergence(event.noise_multiplier, event.rate, order, neighbours) for event in events
    )
    epsilon = divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    # Where numbers run out nothing is promised: not a number must never read as 0.
    return max(0.0, float(np.where(np.isnan(epsilon), np.inf, epsilon).min()))


def renyi_divergence(noise: float, rate: float, order: Vector, neighbours: Neighbours = "added") -> Vector:
    """Of one noisy sum over a Poisson sample, at each order (Mironov, Talwar, Zhang 2019).

    log E[p(z)^a r(z)^(1 - a)] / (a - 1) for z ~ N(0, s^2), where p(z) = 1 - q + q exp((2z - 1) / 2s^2) is how much
    likelier z is with the record, and r is 1 without it, p(-z) with another in its place. By the trapezoid rule, whose
    error for such an integrand vanishes faster than any power of the spacing.
    """
    other = neighbours == "replaced"
    if rate == 1:
        return order * (1 + other) ** 2 / (2 * noise**2)
    a = order[:, None]
    farthest = a + other * (a - 1)  # where a Gaussian peak of the integrand may lie
    z = np.linspace(-TAILS * noise, farthest + TAILS * noise, NODES, axis=-1).squeeze(1)

    def likelihood(z: Vector) -> Vector:
        found: Vector = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * z - 1) / (2 * noise**2))
        return found

    exponent = a * likelihood(z) - z**2 / (2 * noise**2)
    if other:
        exponent -= (a - 1) * likelihood(-z)
    peak = exponent.max(axis=1, keepdims=True)
    density = (z[:, 1] - z[:, 0]) / (noise * math.sqrt(2 * math.pi))
    moment = peak[:, 0] + np.log(np.exp(exponent - peak).sum(axis=1) * density)
    divergence: Vector = np.maximum(moment, 0.0) / (order - 1)
    return divergence


Unit = Literal["record", "subject", "unknown"]  # unknown: of ledgers that did not note it


@dataclass(frozen=True)
class Budget:
    """How much may be spent on one silo's data, and by whose reckoning; an infinite epsilon is only counted."""

    epsilon: float
    delta: float
    accountant: Literal["pld", "rdp", "filter"] = "pld"
    unit: Unit = "record"  # whose coming or going it hides; costs for different units do not add up

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ConfigError(f"epsilon is {self.epsilon}; it must be greater than 0")
        if not 0 < self.delta < 1:
            raise ConfigError(f"delta is {self.delta}; it must lie between 0 and 1")
        if self.accountant not in ("pld", "rdp", "filter"):
            raise ConfigError(unknown("accountant", self.accountant, ("pld", "rdp", "filter")))

    @property
    def order(self) -> float:
        """The filter's Renyi order: the best one for Gaussian noise that spends exactly this budget."""
        log = math.log(1 / self.delta)
        cost = (math.sqrt(self.epsilon + log) - math.sqrt(log)) ** 2
        return 1 + math.sqrt(log / cost)

    def spent(self, events: Iterable[Event], neighbours: Neighbours = "added") -> float:
        """The epsilon of these events, as this budget counts; what it allows is counted for records added."""
        if self.accountant == "filter":
            return _spent(
                events,
                self.delta,
                lambda each, delta, which: _spent_rdp(each, delta, which, (self.order,)),
                neighbours,
            )
        return spent(events, self.delta, self.accountant, neighbours)

    def allows(self, events: Iterable[Event]) -> bool:
        """Whether all these events together stay within the budget."""
        events = list(events)
        if self.accountant == "pld" and spent(events, self.delta, "rdp") <= self.epsilon:
            return True  # RDP promises less than PLD, and is quicker
        return self.spent(events) <= self.epsilon


def default_delta(records: int) -> float:
    """The largest power of ten that is at most 1 / (10 n).

    >>> default_delta(1600)
    1e-05
    """
    if records < 1:
        raise ConfigError(f"the number of records is {records}; it must be at least 1")
    return float(f"1e{-len(str(10 * records - 1))}")


def check_delta(delta: float, records: int) -> float:
    """Hand back a delta that makes sense for so many records; warn of one that lets a whole record leak."""
    if not 0 < delta < 1:
        raise ConfigError(f"delta is {delta}; it must lie between 0 and 1")
    if delta > 1 / records:
        warnings.warn(
            f"delta {delta:g} is above 1/n = {1 / records:g}: publishing a random record would satisfy it; "
            f"use at most {default_delta(records):g}",
            FedloomWarning,
            stacklevel=2,
        )
    return delta


def calibrate(plan: Callable[[float], Sequence[Event]], budget: Budget) -> float:
    """The noise multiplier whose ``plan`` spends the budget: never more than it, and at least 99 % of it.

    ``plan`` gives the events for a noise multiplier; more noise must not cost more. The search is the Illinois
    variant of the false position on logarithms, where epsilon is almost a straight line of the noise.
    """
    if math.isinf(budget.epsilon):
        raise ConfigError("epsilon is inf; noise can be calibrated for a finite epsilon only")
    aim = math.log(budget.epsilon * (1 + WITHIN) / 2)
    tolerance = math.log(2 / (1 + WITHIN))

    def excess(log_noise: float) -> float:
        cost = budget.spent(plan(math.exp(log_noise)))
        return math.log(cost) - aim if cost > 0 else -math.inf

    # RDP is quick and a little dear, so its answer is a good place to start; tiny epsilons are beyond its orders.
    start = budget.accountant == "pld" and budget.epsilon > 0.1
    much = math.log(calibrate(plan, replace(budget, accountant="rdp"))) if start else 0.0
    width = 0.125
    while (under := excess(much)) > 0:
        much, width = much + width, 2 * width
        if much > WIDEST:
            raise ConfigError(
                f"no amount of noise keeps epsilon at {budget.epsilon:g} with delta {budget.delta:g}: "
                "other releases of the plan already spend it"
            )
    little, width = much - width, 0.125
    while (over := excess(little)) <= 0:
        much, under, little, width = little, over, little - width, 2 * width
        if little < -WIDEST:
            raise ConfigError("the plan to calibrate has no release that noise could make cheaper")
    while much - little > 1e-9:
        share = over / (over - under) if math.isfinite(over - under) else 0.5
        middle = little + share * (much - little)
        found = excess(middle)
        if abs(found) <= tolerance:
            return math.exp(middle)
        if found > 0:
            little, over, under = middle, found, under / 2
        else:
            much, under, over = middle, found, over / 2
    return math.exp(much)


def noise_multiplier(budget: Budget, *, rate: float, steps: int, releases: Sequence[Event] = ()) -> float:
    """The noise for ``steps`` steps at ``rate``, when the budget must also pay for other ``releases``."""
    if steps < 1:
        raise ConfigError(f"steps is {steps}; a calibration needs at least 1")
    return calibrate(lambda noise: [*releases, Gaussian(noise, rate, steps)], budget)


STAGES = 8  # accounting costs time for each distinct noise


def allocation(rounds: int, kind: Literal["uniform", "late"]) -> list[float]:
    """How much of the budget each round may take, as weights; ``late`` rises from 1 to 3 in a few stages."""
    kinds: dict[str, Callable[[int], float]] = {
        "uniform": lambda _: 1.0,
        "late": lambda i: 1 + 2 * (i * STAGES // rounds) / (STAGES - 1),
    }
    if kind not in kinds:
        raise ConfigError(unknown("allocation", kind, kinds))
    return [kinds[kind](i) for i in range(rounds)]


def noise_by_round(
    budget: Budget, weights: Sequence[float], *, rate: float, steps: int, releases: Sequence[Event] = ()
) -> list[float]:
    """A noise multiplier for each round of ``steps`` steps: one of weight w has 1/sqrt(w) of the common noise."""

    def noises(common: float) -> list[float]:
        return [common / math.sqrt(weight) for weight in weights]

    def plan(common: float) -> list[Event]:
        return [*releases, *(Gaussian(noise, rate, steps) for noise in noises(common))]

    return noises(calibrate(plan, budget))
