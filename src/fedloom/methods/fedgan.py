"""FedGAN: generator and discriminator trained against each other at every silo, both averaged over all participants.

Rasouli, Sun, Rajagopal: "FedGAN: Federated Generative Adversarial Networks for Distributed Data", 2020 (arXiv
2006.07228), algorithm 1; with the networks of a DCGAN it is the GAN baseline of FissionVAE (Hu et al., IJCAI 2025),
Table 1, which gives neither widths nor rates: here those of DCGAN. Of ``model`` only ``latent`` and ``channels``
apply, and the optimiser's settings are the options below, because a GAN needs others than a VAE. With batch norm, that
of the discriminator, which sees records, stays at its silo; that of the generator comes along with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Pathway, Phase, Recipe, SampleInputs, Setting, branched
from fedloom.methods.steps import Merged
from fedloom.methods.vaes import check_silos, latent_sizes
from fedloom.models.gan import GAN, BatchNormGAN, Norm, dcgan_parts
from fedloom.objectives.adversarial import DiscriminatorLoss, GeneratorLoss
from fedloom.settings import above
from fedloom.sharing.plan import GLOBAL, SILO, SharingPlan


@dataclass(frozen=True, kw_only=True)
class FedGANOptions:
    """Two optimisers, whose moments stay at each silo from round to round unless ``keep_optimizer = false``."""

    generator_rate: float = field(default=2e-4, metadata=above(0))
    discriminator_rate: float = field(default=2e-4, metadata=above(0))
    betas: tuple[float, ...] = field(
        default=(0.5, 0.999),
        metadata={
            "check": lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
            "rule": "a list of two numbers of at least 0 and below 1",
        },
    )
    keep_optimizer: bool = True
    norm: Norm = "group"  # of each example alone, or over the batch of a silo


@dataclass(frozen=True)
class BuildGAN:
    """The model of a site: one generator and one discriminator, a branch per group where the plan says so."""

    setting: Setting
    plan: SharingPlan
    norm: Norm

    def __call__(self, site: Site) -> GAN:
        """Both networks with fresh weights, per group where the plan says so."""
        model = self.setting.model_at(site.name)
        makers = dcgan_parts(model, self.setting.shape, self.norm)
        parts = (branched(self.plan, block, site, make) for block, make in makers.items())
        return GAN(*parts) if self.norm == "group" else BatchNormGAN(model.latent, *parts)


def from_noise(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """The images that the generator makes of noise."""
    assert isinstance(model, GAN)
    return model.sample(inputs.noise["z1"], inputs.group)


def make(setting: Setting, options: FedGANOptions) -> Method:
    """Both blocks GLOBAL; in every step the discriminator moves first, then the generator."""
    if setting.config.model.branches:
        raise ConfigError("model.branches is for decoders; fedgan has one generator for all groups")
    latent = setting.config.model.latent
    blocks = {"generator": GLOBAL, "discriminator": GLOBAL}
    if options.norm == "batch":
        if (mechanism := setting.config.privacy.mechanism) != "none":
            raise ConfigError(
                "method.norm = 'batch' lets each record change the losses of all others in its batch, which nothing "
                f"bounds under privacy.mechanism = '{mechanism}'; use 'group'"
            )
        blocks |= {"generator_norms": GLOBAL, "discriminator_norms": SILO}
    plan = SharingPlan(blocks, setting.groups).with_scopes(setting.config.sharing.scopes)
    generator, discriminator = (tuple(block for block in blocks if block.startswith(n)) for n in ("gen", "dis"))
    check_silos(setting, plan)
    if latent_sizes(setting) != {latent}:
        raise ConfigError("model.silos: generators of different latent sizes are not built; use one model.latent")

    def optimizer(rate: float) -> OptimizerRule:
        first, second = options.betas
        plan = OptimizerRule.of(setting.config.local)
        return replace(plan, learning_rate=rate, betas=(first, second), keep=options.keep_optimizer)

    return Method(
        name="fedgan",
        plan=plan,
        build=BuildGAN(setting, plan, options.norm),
        phases=(
            Phase("discriminator", discriminator, DiscriminatorLoss(latent), optimizer(options.discriminator_rate)),
            # Records reach the generator only through the discriminator, which a mechanism has then already protected.
            Phase(
                "generator",
                generator,
                GeneratorLoss(latent),
                optimizer(options.generator_rate),
                touches_records=False,
            ),
        ),
        server_step=Merged(),
        pathways={"z1": Pathway({"z1": (latent,)}, from_noise, "z1 ~ N(0, I) -> x", generator)},
        kind=setting.kind_of,
    )


RECIPE = Recipe(
    "fedgan", "a DCGAN, generator and discriminator averaged over everybody", FedGANOptions, make, modalities=("image",)
)
