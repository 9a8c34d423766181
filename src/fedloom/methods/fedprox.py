"""FedProx: FedAvg whose silos are held near what they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020 (arXiv
1812.06127), equation 2: loss + (mu / 2) |w - w_received|^2. With mu = 1 a baseline of ALIGN-FL (arXiv 2512.13316),
Table III, whose code computes the term without a gradient, so that it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedloom.methods.base import Method, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method
from fedloom.objectives.proximal import Proximal
from fedloom.settings import at_least
from fedloom.sharing.plan import GLOBAL


@dataclass(frozen=True, kw_only=True)
class FedProxOptions:
    """``weight`` is mu, how strongly a silo is held to what it received."""

    weight: float = field(default=1.0, metadata=at_least(0))


def make(setting: Setting, options: FedProxOptions) -> Method:
    """FedVAE with one more term."""
    method = flat_vae_method("fedprox", setting, encoder=GLOBAL, decoder=GLOBAL)
    (phase,) = method.phases
    return replace(method, phases=(replace(phase, objective=Proximal(phase.objective, options.weight)),))


RECIPE = Recipe("fedprox", "FedVAE whose silos are held near what they received", FedProxOptions, make)
