"""A method: every silo keeps an encoder of its own, and all share one decoder.

What a silo's records look like in latent space then stays at the silo; the server still generates for all groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.base import Method, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method
from fedloom.sharing.plan import GLOBAL, SILO


@dataclass(frozen=True, kw_only=True)
class Options:
    """The keys of ``[method]`` beside its name."""

    prior: str = "circle"  # any that 'fedloom list priors' names


def make(setting: Setting, options: Options) -> Method:
    """Encoder SILO, decoder GLOBAL."""
    return flat_vae_method("local_encoders", setting, encoder=SILO, decoder=GLOBAL, prior=options.prior)


RECIPE = Recipe("local_encoders", "every silo its own encoder, one decoder for all", Options, make)
