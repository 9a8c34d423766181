"""MOON: silos whose latents are to resemble those of the model they received, and not those of their own past.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021 (arXiv 2103.16257), equation 3, here for VAEs, after
ALIGN-FL (Gulati, Gross, Wunder, CyberC 2025, arXiv 2512.13316), Table III, with up to five earlier models:

    MOON-Base           model = "averaged"   encoder and decoder averaged
    ContrastAvgSynth    the same, with server.step = "mean+distil", server.trains = "merged" and
                        server.teachers = "silos": the average learns from samples of each silo's decoder
    ContrastSynthOnly   model = "server"     decoders go up, the server's own model comes down and replaces the silos'

In ALIGN-FL's code the weight of the term is overwritten by the encoder's output; here it is what is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fedloom.errors import ConfigError
from fedloom.methods.base import Method, Phase, Recipe, Setting
from fedloom.methods.steps import Merged
from fedloom.methods.vaes import BuildVAE, flat_vae_method
from fedloom.models.history import remembered
from fedloom.objectives.contrastive import Contrastive
from fedloom.objectives.elbo import Elbo
from fedloom.settings import above, at_least
from fedloom.sharing.plan import GLOBAL, SILO, BlockRule, Down, Scope

PLANS = {
    "averaged": (GLOBAL, GLOBAL),
    "server": (BlockRule(Scope.SILO, up=False, down=Down.SERVER), BlockRule(Scope.SILO, up=True, down=Down.SERVER)),
}


@dataclass(frozen=True, kw_only=True)
class MoonOptions:
    """``weight``, ``temperature`` and number of ``earlier`` models of the contrastive term, and what comes down."""

    weight: float = field(default=2.0, metadata=at_least(0))
    temperature: float = field(default=0.5, metadata=above(0))
    earlier: int = field(default=5, metadata=at_least(1))
    model: Literal["averaged", "server"] = "averaged"


def make(setting: Setting, options: MoonOptions) -> Method:
    """Encoder and decoder as in ``PLANS``; a silo's earlier encoders never leave it."""
    encoder, decoder = PLANS[options.model]
    method = flat_vae_method("moon", setting, encoder=encoder, decoder=decoder)
    (phase,), build = method.phases, method.build
    assert isinstance(phase.objective, Elbo)
    assert isinstance(build, BuildVAE)
    plan = replace(method.plan, blocks={**method.plan.blocks, "history": SILO})
    if any(plan.blocks[block].down is Down.NOTHING for block in ("encoder", "decoder")):
        raise ConfigError("method.name = 'moon' compares with a model that comes down: sharing.scopes must not stop it")
    if plan.blocks["encoder"].scope is Scope.GROUP:
        raise ConfigError("sharing.scopes.encoder = 'group' does not fit method.name = 'moon': use 'global'")
    objective = Contrastive(phase.objective, options.weight, options.temperature, options.earlier)
    return replace(
        method,
        plan=plan,
        build=replace(build, plan=plan, remembered=options.earlier),
        phases=(Phase(phase.name, phase.trains, objective, phase.optimizer),),
        server_step=Merged(),
        settle=remembered,
    )


RECIPE = Recipe("moon", "latents near the received model's and far from the silo's earlier ones", MoonOptions, make)
