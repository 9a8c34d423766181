"""What the VAE methods have in common: models for a site, and pathways to generate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.errors import ConfigError, unknown
from fedloom.federation.rounds import Site
from fedloom.methods.base import Mean, Method, OptimizerPlan, Pathway, Phase, Setting, branched
from fedloom.models.conditional import GroupConditionalVAE
from fedloom.models.hierarchical import HierarchicalVAE
from fedloom.models.likelihoods import LIKELIHOODS
from fedloom.models.networks import Network, network, widened
from fedloom.models.priors import prior_means
from fedloom.models.vae import VAE
from fedloom.objectives.base import Objective
from fedloom.objectives.elbo import Elbo
from fedloom.sharing.plan import BlockPlan, SharingPlan


@dataclass(frozen=True)
class BuildVAE:
    """The model of a site: each block with a branch per group where the plan says so."""

    setting: Setting
    plan: SharingPlan
    prior_means: Tensor
    told_group: bool = False  # the decoder sees the group, one-hot, beside z1
    decoder_size: int = 1  # the decoder has the parameters of so many

    def __post_init__(self) -> None:
        network(self.setting.config.model.network)
        for group, name in self.setting.config.model.branches.items():
            if group not in self.setting.groups:
                raise ConfigError("model.branches: " + unknown("group", group, self.setting.groups))
            network(name, f"model.branches.{group}")

    def __call__(self, site: Site) -> VAE:
        """Fresh weights; two levels if the plan has blocks for the second."""
        model, shape, plan = self.setting.config.model, self.setting.shape, self.plan
        kind = GroupConditionalVAE if self.told_group else VAE
        likelihood = LIKELIHOODS[model.likelihood]()
        encoder = branched(plan, "encoder", site, lambda _: network(model.network).encoder(model, shape))
        decoder = branched(plan, "decoder", site, self._decoder)
        if "top_encoder" not in plan.blocks:
            return kind(encoder, decoder, self.prior_means, likelihood)
        top_encoder = branched(plan, "top_encoder", site, lambda _: network(model.network).top_encoder(model))
        top_decoder = branched(plan, "top_decoder", site, lambda g: self._family(g).top_decoder(model))
        return HierarchicalVAE(encoder, decoder, top_encoder, top_decoder, self.prior_means, likelihood)

    def _decoder(self, group: int) -> nn.Module:
        """p(x | z1) of a group."""
        model, shape, family = self.setting.config.model, self.setting.shape, self._family(group)
        inputs = model.latent + (len(self.setting.groups) if self.told_group else 0)
        return family.decoder(widened(model, family, shape, self.decoder_size), shape, inputs)

    def _family(self, group: int) -> Network:
        """The networks of a group's decoders."""
        model = self.setting.config.model
        return network(model.branches.get(self.setting.groups[group], model.network))


def vae_method(
    name: str,
    setting: Setting,
    blocks: Mapping[str, BlockPlan],
    prior_means: Tensor,
    objective: Objective,
    pathways: Mapping[str, Pathway],
    *,
    told_group: bool = False,
    decoder_size: int = 1,
) -> Method:
    """A federated VAE: one phase that trains all blocks, merged by the mean of each scope."""
    plan = SharingPlan(blocks, setting.groups).with_scopes(setting.config.sharing.scopes)
    check_branches(setting, plan)
    return Method(
        name=name,
        plan=plan,
        build=BuildVAE(setting, plan, prior_means, told_group, decoder_size),
        phases=(Phase("vae", tuple(blocks), objective, OptimizerPlan.of(setting.config.local)),),
        server_step=Mean(plan, setting.config.sharing.weights),
        pathways=pathways,
    )


def flat_vae_method(
    name: str,
    setting: Setting,
    *,
    encoder: BlockPlan,
    decoder: BlockPlan,
    prior: str = "identical",
    told_group: bool = False,
    decoder_size: int = 1,
) -> Method:
    """A VAE with one level: -log p(x|z) + KL(q(z|x) || N(m_g, I))."""
    model = setting.config.model
    return vae_method(
        name,
        setting,
        {"encoder": encoder, "decoder": decoder},
        prior_means(prior, len(setting.groups), model.latent, setting.streams),
        Elbo(model.latent, model.kl_weight),
        flat_pathways(model.latent),
        told_group=told_group,
        decoder_size=decoder_size,
    )


def check_branches(setting: Setting, plan: SharingPlan) -> None:
    """Networks may differ between groups only where decoders are not shared between them."""
    if setting.config.model.branches and plan.blocks["decoder"].scope == "global":
        raise ConfigError("model.branches gives groups decoders of their own, but the decoder is shared by all of them")


def from_z1(model: nn.Module, noise: Mapping[str, Tensor], group: Tensor, prior_group: Tensor) -> Tensor:
    """z1 ~ N(m_g, I), then the decoder's mean."""
    assert isinstance(model, VAE)
    return model.likelihood.mean(model.decode(model.prior_mean(prior_group) + noise["z1"], group))


def from_z2(model: nn.Module, noise: Mapping[str, Tensor], group: Tensor, _: Tensor) -> Tensor:
    """z2 ~ N(0, I), z1 ~ p(z1 | z2), then the decoder's mean."""
    assert isinstance(model, HierarchicalVAE)
    z1 = model.decode_top(noise["z2"], group).sample(noise["z1_hat"])
    return model.likelihood.mean(model.decode(z1, group))


def round_trip(model: nn.Module, noise: Mapping[str, Tensor], group: Tensor, prior_group: Tensor) -> Tensor:
    """z1 ~ N(m_g, I), up to z2 ~ q(z2 | z1), down to z1 ~ p(z1 | z2), then the decoder's mean."""
    assert isinstance(model, HierarchicalVAE)
    z2 = model.encode_top(model.prior_mean(prior_group) + noise["z1"], group).sample(noise["z2"])
    z1 = model.decode_top(z2, group).sample(noise["z1_hat"])
    return model.likelihood.mean(model.decode(z1, group))


def flat_pathways(latent: int) -> dict[str, Pathway]:
    """The one way of a VAE with one level."""
    return {"z1": Pathway({"z1": (latent,)}, from_z1, "z1 ~ N(m_g, I) -> x", ("decoder",), uses_prior=True)}


def hierarchical_pathways(latent: int, top_latent: int, predefined_prior: bool) -> dict[str, Pathway]:
    """Pathways A, B and C of the paper; B and C need a predefined prior of z1."""
    z1, z2, z1_hat = {"z1": (latent,)}, {"z2": (top_latent,)}, {"z1_hat": (latent,)}
    ways = {"z2": Pathway(z2 | z1_hat, from_z2, "z2 ~ N(0, I) -> p(z1|z2) -> x", ("top_decoder", "decoder"))}
    if predefined_prior:
        ways |= flat_pathways(latent)
        summary = "z1 ~ N(m_g, I) -> q(z2|z1) -> p(z1|z2) -> x"
        ways["roundtrip"] = Pathway(
            z1 | z2 | z1_hat, round_trip, summary, ("top_encoder", "top_decoder", "decoder"), uses_prior=True
        )
    return ways
