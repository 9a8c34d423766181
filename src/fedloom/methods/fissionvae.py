"""FissionVAE: one encoder for all, and for each group a prior of its own (+L), a decoder of its own (+D), or both.

Hu, Ren, Deng, Xie, Ma: "FissionVAE: Federated Non-IID Image Generation with Latent Space and Decoder Decomposition",
IJCAI 2025 (arXiv 2408.17090). +L: equation 1, KL(q(z|x) || N(m_g, I)), section 2.2. +D: decoder branches merged inside
their group, section 2.3. Generation for group g: z ~ N(m_g, I), x = decoder_g(z).

    FedVAE   prior identical   decoder global        +D     prior identical   decoder group
    +L       prior m_g         decoder global        +L+D   prior m_g         decoder group

The printed equation 1 writes sigma where it must mean the variance; the exact form is used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fedloom.federation.rounds import Site
from fedloom.methods.base import Mean, Method, OptimizerPlan, Pathway, Phase, Recipe, Setting, branched
from fedloom.models.likelihoods import LIKELIHOODS
from fedloom.models.networks import network
from fedloom.models.priors import prior_means
from fedloom.models.vae import VAE
from fedloom.objectives.elbo import Elbo
from fedloom.sharing.plan import GLOBAL, GROUP, BlockPlan, SharingPlan


@dataclass(frozen=True, kw_only=True)
class Options:
    """+L is any prior but ``identical``; +D is ``decoder = "group"``."""

    prior: str = "identical"
    decoder: Literal["group", "global"] = "group"


@dataclass(frozen=True)
class BuildVAE:
    """The model of a site."""

    setting: Setting
    plan: SharingPlan
    prior_means: Tensor

    def __call__(self, site: Site) -> VAE:
        """Encoder and decoder, each with a branch per group where the plan says so."""
        model, shape = self.setting.config.model, self.setting.shape
        family = network(model.network)
        return VAE(
            branched(self.plan, "encoder", site, lambda _: family.encoder(model, shape)),
            branched(self.plan, "decoder", site, lambda _: family.decoder(model, shape)),
            self.prior_means,
            LIKELIHOODS[model.likelihood](),
        )


def from_prior(model: nn.Module, noise: Mapping[str, Tensor], group: Tensor) -> Tensor:
    """z ~ N(m_g, I), then the decoder's mean."""
    assert isinstance(model, VAE)
    return model.likelihood.mean(model.decode(model.prior_mean(group) + noise["z"], group))


def make_vae_method(name: str, setting: Setting, prior: str, decoder: BlockPlan) -> Method:
    """A federated VAE with a GLOBAL encoder; prior and sharing of the decoder make the variants."""
    config = setting.config
    plan = SharingPlan({"encoder": GLOBAL, "decoder": decoder}, setting.groups).with_scopes(config.sharing.scopes)
    means = prior_means(prior, len(setting.groups), config.model.latent, setting.streams)
    objective = Elbo(config.model.latent, config.model.kl_weight)
    return Method(
        name=name,
        plan=plan,
        build=BuildVAE(setting, plan, means),
        phases=(Phase("vae", ("encoder", "decoder"), objective, OptimizerPlan.of(config.local)),),
        server_step=Mean(plan, config.sharing.weights),
        pathways={"z1": Pathway(objective.noise, from_prior, "z1 ~ N(m_g, I) -> decoder")},
    )


def make(setting: Setting, options: Options) -> Method:
    """Encoder GLOBAL; decoder GROUP (+D) or GLOBAL."""
    decoder = GROUP if options.decoder == "group" else GLOBAL
    return make_vae_method("fissionvae", setting, options.prior, decoder)


RECIPE = Recipe("fissionvae", "group priors (+L), group decoders (+D), or both", Options, make)
