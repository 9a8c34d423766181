"""Past FissionVAE: a VAE for each group, a flow to its latents in the prior's place, and a refiner of its images.

The groups are those of Hu et al., "FissionVAE", IJCAI 2025 (arXiv 2408.17090), and so is the bound (section 2.1). With
a small ``model.kl_weight`` latents keep more of a record and are no longer N(0, I): where they lie is learned by flow
matching (Lipman et al., "Flow Matching for Generative Modeling", ICLR 2023, arXiv 2210.02747, equation 23 with
straight paths), after Dai, Wipf, "Diagnosing and Enhancing VAE Models", ICLR 2019. What a mean image lacks is added by
a second flow that is shown the image, after Pandey et al., "DiffuseVAE", TMLR 2022 (arXiv 2201.00308), equation 9.

Both learn in the silos, by phases of their own on the silo's own records in every local step. Weights leave a silo, as
of any block; latents and images do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, Pathway, Phase, Recipe, SampleInputs, Setting, branched
from fedloom.methods.vaes import BuildVAE, flat_pathways, vae_method
from fedloom.models.convolutional import require_images
from fedloom.models.flow import FlowVAE, Mixer, Velocity, transported
from fedloom.models.priors import prior_means
from fedloom.objectives.base import Objective
from fedloom.objectives.elbo import Elbo
from fedloom.objectives.flows import LatentFlow, Refinement
from fedloom.outline import in_outline
from fedloom.settings import above, all_positive, at_least
from fedloom.sharing.plan import GROUP


@dataclass(frozen=True, kw_only=True)
class FlowVAEOptions:
    """The widths of the flow's layers, and the refiner's number of blocks: none, no refiner."""

    flow: tuple[int, ...] = field(default=(512, 512, 512), metadata=all_positive())
    flow_steps: int = field(default=50, metadata=at_least(1))  # of Euler's method
    refiner: int = field(default=0, metadata=at_least(0))
    refiner_width: int = field(default=128, metadata=at_least(1))
    refiner_steps: int = field(default=20, metadata=at_least(1))
    refiner_noise: float = field(default=0.5, metadata=above(0))  # on the mean image where its way begins


@dataclass(frozen=True)
class BuildFlowVAE(BuildVAE):
    """The model of a site: the VAE's blocks first, so that these are what they would be without the others."""

    __repr__ = in_outline

    options: FlowVAEOptions = field(default_factory=FlowVAEOptions)

    def __call__(self, site: Site) -> FlowVAE:
        """The VAE, then the flow of its latents, and a refiner where one is asked for; all weights fresh."""
        vae = super().__call__(site)
        flow = branched(
            self.plan, "flow", site, lambda _: Velocity(self.setting.config.model.latent, self.options.flow)
        )
        refiner = branched(self.plan, "refiner", site, lambda _: self._refiner()) if self.options.refiner else None
        return FlowVAE(vae, flow, refiner)

    def _refiner(self) -> Mixer:
        inputs = 2 * self.setting.shape[0] + 1  # a point on the way, the mean image, the time
        return Mixer(inputs, self.options.refiner, self.options.refiner_width, self.setting.shape)


def mean_image(options: FlowVAEOptions, model: nn.Module, inputs: SampleInputs) -> Tensor:
    """e ~ N(0, I), carried to z, then the decoder's mean."""
    assert isinstance(model, FlowVAE)
    z = transported(lambda z, time: model.velocity(z, time, inputs.group), inputs.noise["e"], options.flow_steps)
    return model.likelihood.mean(model.decode(z, inputs.group))


def refined(options: FlowVAEOptions, model: nn.Module, inputs: SampleInputs) -> Tensor:
    """The mean image with noise on it, carried to an image."""
    assert isinstance(model, FlowVAE)
    mean = mean_image(options, model, inputs)

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        target = model.likelihood.mean(model.refined(x, time, mean, inputs.group))
        return (target - x) / (1.0 - time).reshape(-1, 1, 1, 1)

    return transported(velocity, mean + options.refiner_noise * inputs.noise["pixels"], options.refiner_steps)


def make(setting: Setting, options: FlowVAEOptions) -> Method:
    """All blocks GROUP, unless ``sharing.scopes`` says otherwise."""
    latent, shape = setting.config.model.latent, setting.shape
    if setting.config.model.silos:
        raise ConfigError("model.silos gives silos networks of their own, which flow_vae has no place for")
    e = {"e": (latent,)}
    ways = {"flow": Pathway(e, partial(mean_image, options), "N(0, I) -> z along a flow -> x", ("flow", "decoder"))}
    objectives: dict[str, Objective] = {"flow": LatentFlow(latent)}
    if options.refiner:
        require_images(shape)
        summary, needed = "the same, then noise -> x along another flow", ("flow", "decoder", "refiner")
        ways = {"refined": Pathway({**e, "pixels": shape}, partial(refined, options), summary, needed), **ways}
        objectives["refiner"] = Refinement(latent, shape, options.refiner_noise)
    blocks = dict.fromkeys(("encoder", "decoder", *objectives), GROUP)
    means = prior_means("identical", len(setting.groups), latent, setting.streams)
    bound = Elbo(latent, setting.config.model.kl_weight)
    method = vae_method("flow_vae", setting, blocks, means, bound, ways | flat_pathways(latent))
    (vae,) = method.phases
    further = (Phase(name, (name,), objective, vae.optimizer) for name, objective in objectives.items())
    return replace(
        method,
        build=BuildFlowVAE(setting, method.plan, means, options=options),
        phases=(replace(vae, trains=("encoder", "decoder")), *further),
    )


RECIPE = Recipe(
    "flow_vae", "a VAE for each group, its latents from a flow, its images refined by another", FlowVAEOptions, make
)
