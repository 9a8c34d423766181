"""DP-CGAN: a conditional GAN on embeddings, discriminators at home, the generator averaged.

The baseline of Di Salvo, Nguyen, Ledig: "Embedding-Based Federated Data Sharing via Differentially Private Conditional
VAEs", MICCAI 2025 (arXiv 2507.02671), after Torkzadehmahani, Kairouz, Paten: "DP-CGAN: Differentially Private Synthetic
Data and Label Generation", CVPR workshops 2019. Records meet the discriminator alone, so DP-SGD guards its gradients,
and the generator learns of them through it. The authors' code draws new weights in every round and gives fakes the
labels of the records; here weights persist and a fake's label is drawn by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Pathway, Phase, Recipe, SampleInputs, Setting
from fedloom.methods.labels import VECTORS, LabelOptions, require_classes, with_labels
from fedloom.methods.steps import Merged
from fedloom.models.labelled import ConditionalGAN, Told
from fedloom.objectives.labelled import ConditionalAdversarial
from fedloom.settings import above, all_positive
from fedloom.sharing.plan import GLOBAL, SILO, SharingPlan


@dataclass(frozen=True, kw_only=True)
class DPCGANOptions(LabelOptions):
    """Widths and rate of the authors' code."""

    generator_hidden: tuple[int, ...] = field(default=(512, 1024), metadata=all_positive())
    discriminator_hidden: tuple[int, ...] = field(default=(1024, 512), metadata=all_positive())
    rate: float = field(default=2e-4, metadata=above(0))


def build(setting: Setting, options: DPCGANOptions, _: Site) -> ConditionalGAN:
    """Generator and discriminator with fresh weights, both told the class."""
    width, classes, latent = setting.shape[0], len(setting.classes), setting.config.model.latent
    return ConditionalGAN(
        Told(latent, options.generator_hidden, width, classes), Told(width, options.discriminator_hidden, 1, classes)
    )


def from_noise(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """The vectors that the generator makes of noise and class."""
    assert isinstance(model, ConditionalGAN)
    return model.generate(inputs.noise["z"], inputs.condition)


def make(setting: Setting, options: DPCGANOptions) -> Method:
    """Generator GLOBAL, discriminator SILO; in every step the discriminator moves first."""
    require_classes(setting, "dp_cgan")
    latent, classes, local = setting.config.model.latent, len(setting.classes), setting.config.local
    plan = SharingPlan({"generator": GLOBAL, "discriminator": SILO}, setting.groups)
    plan = plan.with_scopes(setting.config.sharing.scopes)
    optimizer = replace(OptimizerRule.of(local), learning_rate=options.rate, betas=(0.5, 0.999), keep=True)
    real = ConditionalAdversarial("discriminator", latent, classes)
    fake = ConditionalAdversarial("generator", latent, classes)
    method = Method(
        name="dp_cgan",
        plan=plan,
        build=partial(build, setting, options),
        phases=(
            Phase("discriminator", ("discriminator",), real, optimizer),
            Phase("generator", ("generator",), fake, optimizer, touches_records=False),
        ),
        server_step=Merged(),
        pathways={
            "z": Pathway({"z": (latent,)}, from_noise, "z ~ N(0, I), y -> x", ("generator",), labelled=True),
        },
    )
    return with_labels(method, setting, options)


RECIPE = Recipe(
    "dp_cgan",
    "a conditional GAN on embeddings: discriminators at home, generator averaged",
    DPCGANOptions,
    make,
    VECTORS,
)
