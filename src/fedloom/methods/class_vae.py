"""A VAE of images whose decoder is told the class: the small sibling of ``fission_flow`` with labels.

Sohn, Lee, Yan, "Learning Structured Output Representation using Deep Conditional Generative Models", NeurIPS 2015, give
encoder and decoder what is known of a record; here that is its class, and each group has a decoder of its own, after Hu
et al., "FissionVAE", IJCAI 2025 (arXiv 2408.17090), section 2.3. Networks and likelihood are those of other VAEs; the
encoder's answer is moved by the class, so that a latent need not say which class it belongs to.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Pathway, Phase, Recipe, SampleInputs, Setting, branched
from fedloom.methods.labels import LabelOptions, require_classes, with_labels
from fedloom.methods.steps import Merged
from fedloom.models.labelled import ClassVAE, TellingEncoder
from fedloom.models.networks import network
from fedloom.objectives.labelled import ClassElbo
from fedloom.sharing.plan import GLOBAL, GROUP, SharingPlan


def build(setting: Setting, plan: SharingPlan, site: Site) -> ClassVAE:
    """Fresh weights, with a branch for each of the site's groups where a block is the group's."""
    model, shape, classes = setting.model_at(""), setting.seen, len(setting.classes)
    family = network(model.network)
    encoder = branched(
        plan, "encoder", site, lambda _: TellingEncoder(family.encoder(model, shape), model.latent, classes)
    )
    decoder = branched(plan, "decoder", site, lambda _: family.decoder(model, shape, model.latent + classes))
    return ClassVAE(encoder, decoder, classes, setting.likelihood_at(""))


def from_latent(model: nn.Module, inputs: SampleInputs) -> Tensor:
    """z ~ N(0, I), then the decoder's mean for the class."""
    assert isinstance(model, ClassVAE)
    return model.likelihood.mean(model.decode(inputs.noise["z"], inputs.group, inputs.condition))


def make(setting: Setting, options: LabelOptions) -> Method:
    """Encoder GLOBAL, decoder GROUP, unless ``sharing.scopes`` says otherwise."""
    require_classes(setting, "class_vae")
    model, local = setting.config.model, setting.config.local
    for name, asked in (("silos", model.silos), ("branches", model.branches), ("lipschitz", model.lipschitz)):
        if asked:
            raise ConfigError(f"model.{name} has no place in method 'class_vae'")
    plan = SharingPlan({"encoder": GLOBAL, "decoder": GROUP}, setting.groups)
    plan = plan.with_scopes(setting.config.sharing.scopes)
    objective = ClassElbo(model.latent, model.kl_weight)
    way = Pathway({"z": (model.latent,)}, from_latent, "z ~ N(0, I), y -> x", ("decoder",), labelled=True)
    method = Method(
        name="class_vae",
        plan=plan,
        build=partial(build, setting, plan),
        phases=(Phase("vae", ("encoder", "decoder"), objective, OptimizerRule.of(local)),),
        server_step=Merged(),
        pathways={"z": way},
    )
    return with_labels(method, setting, options)


RECIPE = Recipe(
    "class_vae", "a VAE of images, a decoder for each group that is told the class", LabelOptions, make, ("image",)
)
