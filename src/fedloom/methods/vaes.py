"""What the VAE methods have in common: models for a site, and pathways to generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedloom.config import ModelConfig
from fedloom.errors import ConfigError, unknown
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Pathway, Phase, SampleInputs, Setting, branched
from fedloom.methods.steps import Merged
from fedloom.modalities.base import FromMeans, Modality
from fedloom.models.history import RememberingVAE
from fedloom.models.linear import LinearVAE
from fedloom.models.networks import Network, network, widened
from fedloom.models.priors import prior_means
from fedloom.models.vae import VAE, GroupConditionalVAE, HierarchicalVAE
from fedloom.objectives.base import Objective
from fedloom.objectives.elbo import Elbo
from fedloom.outline import in_outline
from fedloom.privacy.lipschitz import bounded_decoder
from fedloom.sharing.plan import BlockRule, Down, Scope, SharingPlan

RECORD = "record"  # the noise that a record is drawn by


@dataclass(frozen=True)
class BuildVAE:
    """The model of a site: each block with a branch per group where the plan says so."""

    __repr__ = in_outline

    setting: Setting
    plan: SharingPlan
    prior_means: Tensor
    told_group: bool = False  # the decoder sees the group, one-hot, beside z1
    decoder_size: int = 1  # the decoder has the parameters of so many
    remembered: int = 0  # how many of its earlier encoders a silo keeps

    def __post_init__(self) -> None:
        network(self.setting.model_at("").network)
        for silo in self.setting.config.model.silos:
            network(self.setting.model_at(silo).network, f"model.silos.{silo}.network")
        for group, name in self.setting.config.model.branches.items():
            if group not in self.setting.groups:
                raise ConfigError("model.branches: " + unknown("group", group, self.setting.groups))
            network(name, f"model.branches.{group}")

    def __call__(self, site: Site) -> VAE:
        """Fresh weights; two levels if the plan has blocks for the second."""
        model, shape, plan = self.setting.model_at(site.name), self.setting.seen, self.plan
        likelihood, means = self.setting.likelihood_at(site.name), self.prior_means[:, : model.latent]
        if "encoder" not in plan.blocks:
            return LinearVAE(branched(plan, "decoder", site, lambda g: self._decoder(model, g)), means, model.variance)
        # The encoder first: the order in which weights are drawn is part of what a seed means.
        encoder = branched(plan, "encoder", site, lambda _: network(model.network).make_encoder(model, shape))
        decoder = branched(plan, "decoder", site, lambda g: self._decoder(model, g))
        if "top_encoder" in plan.blocks:
            top_encoder = branched(plan, "top_encoder", site, lambda _: network(model.network).top_encoder(model))
            top_decoder = branched(plan, "top_decoder", site, lambda g: self._family(model, g).top_decoder(model))
            return HierarchicalVAE(encoder, decoder, top_encoder, top_decoder, means, likelihood)
        if self.remembered and site.name not in ("server", ""):  # only a silo has a past
            return RememberingVAE(encoder, decoder, means, likelihood, self.remembered)
        return (GroupConditionalVAE if self.told_group else VAE)(encoder, decoder, means, likelihood)

    def _decoder(self, model: ModelConfig, group: int) -> nn.Module:
        """p(x | z1) of a group."""
        shape, family = self.setting.seen, self._family(model, group)
        inputs = model.latent + (len(self.setting.groups) if self.told_group else 0)
        decoder = family.make_decoder(widened(model, family, shape, self.decoder_size), shape, inputs)
        if not model.lipschitz:
            return decoder
        steepness = self.setting.modality.likelihood(model.likelihood, model.variance).steepness
        return bounded_decoder(decoder, model.lipschitz, steepness)

    def _family(self, model: ModelConfig, group: int) -> Network:
        """The networks of a group's decoders."""
        return network(model.branches.get(self.setting.groups[group], model.network))


def vae_method(
    name: str,
    setting: Setting,
    blocks: Mapping[str, BlockRule],
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
    check_silos(setting, plan)
    return Method(
        name=name,
        plan=plan,
        build=BuildVAE(setting, plan, prior_means, told_group, decoder_size),
        phases=(Phase("vae", tuple(blocks), objective, OptimizerRule.of(setting.config.local)),),
        server_step=Merged(),
        pathways=drawing(pathways, setting.modality),
        kind=setting.kind_of,
    )


def flat_vae_method(
    name: str,
    setting: Setting,
    *,
    encoder: BlockRule,
    decoder: BlockRule,
    prior: str = "identical",
    told_group: bool = False,
    decoder_size: int = 1,
) -> Method:
    """A VAE with one level: -log p(x|z) + KL(q(z|x) || N(m_g, I))."""
    latent = setting.widest_latent
    if latent_sizes(setting) != {latent} and prior != "identical":
        raise ConfigError(f"method.prior = '{prior}' needs one latent size for all silos, not those of model.silos")
    return vae_method(
        name,
        setting,
        {"encoder": encoder, "decoder": decoder},
        prior_means(prior, len(setting.groups), latent, setting.streams),
        Elbo(latent, setting.config.model.kl_weight),
        flat_pathways(latent),
        told_group=told_group,
        decoder_size=decoder_size,
    )


def check_branches(setting: Setting, plan: SharingPlan) -> None:
    """Networks may differ between groups only where decoders are not shared between them."""
    if setting.config.model.branches and plan.blocks["decoder"].scope == "global":
        raise ConfigError("model.branches gives groups decoders of their own, but the decoder is shared by all of them")


def latent_sizes(setting: Setting) -> set[int]:
    """Those of all silos; silos without networks of their own have that of ``model.latent``."""
    return {setting.model_at(silo).latent for silo in ("", *setting.config.model.silos)}


def check_silos(setting: Setting, plan: SharingPlan) -> None:
    """Networks may differ between silos only where no block is shared between them."""
    for silo in setting.config.model.silos:
        for block, rule in plan.blocks.items():
            if rule.scope in (Scope.GLOBAL, Scope.GROUP) or rule.down is Down.SERVER:
                raise ConfigError(
                    f"model.silos.{silo} gives a silo networks of its own, but its {block} is shared with others"
                )
        if "top_encoder" in plan.blocks and setting.model_at(silo).latent != setting.config.model.latent:
            raise ConfigError(f"model.silos.{silo}.latent must be that of all others in a VAE of two levels")


def from_z1(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """z1 ~ N(m_g, I), then the decoder's mean."""
    assert isinstance(model, VAE)
    mean = model.prior_mean(inputs.condition)
    return model.likelihood.mean(model.decode(mean + inputs.noise["z1"][:, : mean.shape[1]], inputs.group))


def from_z2(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """z2 ~ N(0, I), z1 ~ p(z1 | z2), then the decoder's mean."""
    assert isinstance(model, HierarchicalVAE)
    z1 = model.decode_top(inputs.noise["z2"], inputs.group).sample(inputs.noise["z1_hat"])
    return model.likelihood.mean(model.decode(z1, inputs.group))


def round_trip(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """z1 ~ N(m_g, I), up to z2 ~ q(z2 | z1), down to z1 ~ p(z1 | z2), then the decoder's mean."""
    assert isinstance(model, HierarchicalVAE)
    noise, group = inputs.noise, inputs.group
    z2 = model.encode_top(model.prior_mean(inputs.condition) + noise["z1"], group).sample(noise["z2"])
    z1 = model.decode_top(z2, group).sample(noise["z1_hat"])
    return model.likelihood.mean(model.decode(z1, group))


@dataclass(frozen=True)
class Drawn:
    """A record that is drawn by the mean that another way gives."""

    mean: Callable[[nn.Module, SampleInputs], Tensor]
    drawing: FromMeans

    def __call__(self, model: nn.Module, inputs: SampleInputs) -> Tensor:
        """Records as stored."""
        return self.drawing.draw(self.mean(model, inputs), inputs.noise[RECORD])


def drawing(pathways: Mapping[str, Pathway], modality: Modality) -> Mapping[str, Pathway]:
    """The same ways, which draw records where a mean is none."""
    if (way := modality.drawing) is None:
        return pathways
    return {
        name: replace(each, noise={**each.noise, RECORD: way.noise}, generate=Drawn(each.generate, way))
        for name, each in pathways.items()
    }


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
