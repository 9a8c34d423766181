"""What releases cost: events as plain values, and the epsilon that any number of them spend together.

Neighbours differ by one record (or one subject) that is added or removed. Two accountants: privacy loss
distributions (``pld``, tight) and Renyi divergences (``rdp``, looser). Both hold for events that were planned in
advance; where later events are chosen after looking at earlier results, as across runs, only ``filter`` holds: a
Renyi filter at one order fixed by the budget (Feldman, Zrnic, "Individual Privacy Accounting via a Renyi Filter",
NeurIPS 2021). What the same events cost where one record is replaced by another is :func:`replaced`.
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

ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 80, 96, 128, 192, 256, 512, 1024)
BEYOND_DIGITS = 1000.0  # an epsilon above this is told by RDP: its exact distribution would take gigabytes
TAILS, NODES = 12.0, 2001  # of the integral behind RDP
WITHIN = 0.99  # calibration spends at least this part of its target
WIDEST = 16.0  # a search for noise goes from e^-16 to e^16
STEEPEST = 1e9  # an epsilon for replaced records above this is called infinite


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


def spent(events: Iterable[Event], delta: float, accountant: Accountant = "pld") -> float:
    """The epsilon of all these events together at ``delta``; infinite if one of them has no guarantee."""
    accountants: dict[str, Account] = {"pld": _spent_pld, "rdp": _spent_rdp}
    if accountant not in accountants:
        raise ConfigError(unknown("accountant", accountant, accountants))
    return _spent(events, delta, accountants[accountant])


Account = Callable[[tuple[Gaussian, ...], float], float]


def _spent(events: Iterable[Event], delta: float, account: Account) -> float:
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
    return account(tuple(Gaussian(*kind, steps) for kind, steps in sorted(merged.items())), delta) if merged else 0.0


@lru_cache(maxsize=1024)  # the silos of a run often have the same history
def _spent_pld(events: tuple[Gaussian, ...], delta: float) -> float:
    rough = _spent_rdp(events, delta)
    if rough > BEYOND_DIGITS:
        return rough
    # Rounding losses up to this grid adds less than 0.1 % to epsilon; a finer one takes seconds for large epsilons.
    return float(_composed(events, 1e-4 * min(max(rough, 1.0), 100.0)).get_epsilon(delta))


@lru_cache(maxsize=4)  # a silo's epsilon for replaced records is often asked for right after that for added ones
def _composed(events: tuple[Gaussian, ...], grid: float) -> Any:
    """A PLDAccountant that has met all events."""
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent  # type: ignore[import-untyped]
        from dp_accounting.pld import PLDAccountant  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"accounting by 'pld' needs the package '{error.name}'; pip install 'fedloom[privacy]'"
        ) from error
    accountant = PLDAccountant(value_discretization_interval=grid)
    for event in events:
        one = GaussianDpEvent(event.noise_multiplier)
        accountant.compose(one if event.rate == 1 else PoissonSampledDpEvent(event.rate, one), event.steps)
    return accountant


def _spent_rdp(events: tuple[Gaussian, ...], delta: float, orders: Sequence[float] = ORDERS) -> float:
    """The best order's divergence, converted to epsilon (Canonne, Kamath, Steinke 2020, proposition 12)."""
    order = np.asarray(orders, dtype=np.float64)
    divergence = sum(event.steps * renyi_divergence(event.noise_multiplier, event.rate, order) for event in events)
    epsilon = divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1)
    # Where numbers run out nothing is promised: not a number must never read as 0.
    return max(0.0, float(np.where(np.isnan(epsilon), np.inf, epsilon).min()))


def renyi_divergence(noise: float, rate: float, order: Vector) -> Vector:
    """Of one noisy sum over a Poisson sample, at each order (Mironov, Talwar, Zhang 2019).

    log E[(1 - q + q exp((2z - 1) / 2s^2))^a] / (a - 1) for z ~ N(0, s^2), by the trapezoid rule, whose error for such
    an integrand vanishes faster than any power of the spacing.
    """
    if rate == 1:
        return order / (2 * noise**2)
    a = order[:, None]
    z = np.linspace(-TAILS * noise, a + TAILS * noise, NODES, axis=-1).squeeze(1)
    ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * z - 1) / (2 * noise**2))
    exponent = a * ratio - z**2 / (2 * noise**2)
    peak = exponent.max(axis=1, keepdims=True)
    density = (z[:, 1] - z[:, 0]) / (noise * math.sqrt(2 * math.pi))
    moment = peak[:, 0] + np.log(np.exp(exponent - peak).sum(axis=1) * density)
    divergence: Vector = np.maximum(moment, 0.0) / (order - 1)
    return divergence


def replaced(events: Iterable[Event], delta: float, accountant: Accountant = "pld") -> float:
    """An epsilon of all these events together at ``delta`` for one record replaced by another: the least of two bounds.

    1. Without the coins of the sampling, which only help, a record adds v to a sum and another w, and v - w is at most
       twice as long as either. So the events cost at most what plain sums with half of the noise cost. Where nothing
       is sampled, this is exact.
    2. Replacing is removing, then adding. Let D_e(P, Q) be the largest P(S) - exp(e) Q(S) over all events S. For any R
       between them, P(S) <= D_e(P, R) + exp(e) R(S) and R(S) <= D_f(R, Q) + exp(f) Q(S), so that
       D_{e+f}(P, Q) <= D_e(P, R) + exp(e) D_f(R, Q). Both are at most delta(e), the accountant's own curve for one
       record added or removed, at f = e: epsilon is 2e for the least e with (1 + exp(e)) delta(e) <= ``delta``.
    """
    accountants: dict[str, Account] = {"pld": _replaced_pld, "rdp": _replaced_rdp}
    if accountant not in accountants:
        raise ConfigError(unknown("accountant", accountant, accountants))
    return _spent(events, delta, accountants[accountant])


@lru_cache(maxsize=1024)
def _replaced_pld(events: tuple[Gaussian, ...], delta: float) -> float:
    plain = _spent_pld(_with_half_the_noise(events), delta)
    if all(event.rate == 1 for event in events):
        return plain
    rough, added = _twice_rdp(events, delta), _spent_rdp(events, delta)
    if rough > BEYOND_DIGITS:
        return min(plain, rough)
    curve = _composed(events, 1e-4 * min(max(added, 1.0), 100.0)).get_delta
    return min(plain, 2 * _least(lambda e: (1 + math.exp(e)) * float(curve(e)) <= delta, rough / 2))


def _replaced_rdp(events: tuple[Gaussian, ...], delta: float, orders: Sequence[float] = ORDERS) -> float:
    return min(_spent_rdp(_with_half_the_noise(events), delta, orders), _twice_rdp(events, delta, orders))


def _with_half_the_noise(events: tuple[Gaussian, ...]) -> tuple[Gaussian, ...]:
    """All events as one plain sum, which costs as much as all of them without their coins."""
    return (Gaussian(0.5 / math.sqrt(sum(event.steps / event.noise_multiplier**2 for event in events))),)


def _twice_rdp(events: tuple[Gaussian, ...], delta: float, orders: Sequence[float] = ORDERS) -> float:
    """Removing and adding, by Renyi divergences."""
    # At orders of at most 2 a larger e need not do where a smaller one does, and the search would miss it.
    order = np.asarray([order for order in orders if order > 2], dtype=np.float64)
    divergence = sum(event.steps * renyi_divergence(event.noise_multiplier, event.rate, order) for event in events)
    exponent = divergence + np.log1p(-1 / order)

    def suffices(e: float) -> bool:
        log_delta = (order - 1) * (exponent - e) - np.log(order)  # the conversion of _spent_rdp, for delta
        return bool((np.logaddexp(0.0, e) + log_delta <= math.log(delta)).any())  # never, where numbers run out

    high = 1.0
    while not suffices(high):
        high *= 2
        if high > STEEPEST:
            return math.inf
    return 2 * _least(suffices, high)


def _least(suffices: Callable[[float], bool], high: float) -> float:
    """The least number of 0 or more that suffices, by halving; ``high`` where not even that does."""
    if suffices(0.0):
        return 0.0
    low, best = 0.0, high
    while suffices(best) and best - low > 1e-6 * best:
        middle = (low + best) / 2
        low, best = (low, middle) if suffices(middle) else (middle, best)
    return best


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

    def spent(self, events: Iterable[Event]) -> float:
        """The epsilon of these events, as this budget counts."""
        if self.accountant == "filter":
            return _spent(events, self.delta, lambda each, delta: _spent_rdp(each, delta, (self.order,)))
        return spent(events, self.delta, self.accountant)

    def replaced(self, events: Iterable[Event]) -> float:
        """The same for one record (or subject) replaced by another, see :func:`replaced`."""
        if self.accountant == "filter":
            return _spent(events, self.delta, lambda each, delta: _replaced_rdp(each, delta, (self.order,)))
        return replaced(events, self.delta, self.accountant)

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
