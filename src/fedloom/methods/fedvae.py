"""FedVAE: one VAE, averaged whole over all participants, groups ignored.

The baseline of Hu, Ren, Deng, Xie, Ma: "FissionVAE: Federated Non-IID Image Generation with Latent Space and Decoder
Decomposition", IJCAI 2025 (arXiv 2408.17090), section 2.1; averaging after McMahan et al., "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017. Loss: -log p(x|z) + KL(q(z|x) || N(0, I)).
"""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.methods.base import Method, Recipe, Setting
from fedloom.methods.vaes import flat_pathways, vae_method
from fedloom.models.priors import prior_means
from fedloom.objectives.elbo import Elbo
from fedloom.sharing.plan import GLOBAL


@dataclass(frozen=True, kw_only=True)
class Options:
    """FedVAE has none."""


def make(setting: Setting, options: Options) -> Method:  # noqa: ARG001 - every recipe has this signature
    """Encoder and decoder GLOBAL, one prior N(0, I) for all."""
    model = setting.config.model
    means = prior_means("identical", len(setting.groups), model.latent, setting.streams)
    objective = Elbo(model.latent, model.kl_weight)
    blocks = {"encoder": GLOBAL, "decoder": GLOBAL}
    return vae_method("fedvae", setting, blocks, means, objective, flat_pathways(model.latent))


RECIPE = Recipe("fedvae", "one VAE averaged over everybody, groups ignored", Options, make)
