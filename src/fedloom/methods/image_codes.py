"""A flow of codes in the place of pixels: FissionVAE's blocks learn first, then stay while what they make is learned.

Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", CVPR 2022 (arXiv 2112.10752), section 3,
with the VAE of Hu et al., "FissionVAE", IJCAI 2025 (arXiv 2408.17090), section 3.3: the encoder is everybody's and the
decoder the group's, unless ``sharing.scopes`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Phase, SampleInputs, Setting
from fedloom.methods.image_flows import ImageFlow
from fedloom.methods.vaes import BuildVAE, check_branches
from fedloom.models.grid import grid_of
from fedloom.models.priors import prior_means
from fedloom.models.unet import CodeFlow, FlowUNet
from fedloom.models.vae import VAE
from fedloom.objectives.elbo import Elbo
from fedloom.objectives.rectified_flow import OfCodes, RectifiedFlow
from fedloom.outline import in_outline
from fedloom.sharing.plan import GLOBAL, GROUP

NETWORK = "grid"  # whose codes have places
FIRST_STAGE = {"encoder": GLOBAL, "decoder": GROUP}


@dataclass(frozen=True)
class BuildCodeFlow:
    """The model of a site: the VAE's blocks first, so that these are what they would be without the others."""

    __repr__ = in_outline

    vae: BuildVAE
    flow: Callable[[Site], nn.Module]

    def __call__(self, site: Site) -> CodeFlow:
        """Fresh weights."""
        vae, flow = self.vae(site), self.flow(site)
        assert isinstance(flow, FlowUNet)
        return CodeFlow(vae, flow)


@dataclass(frozen=True)
class Decoded:
    """What the decoder makes of codes that a flow has drawn."""

    flow: ImageFlow

    def __call__(self, model: nn.Module, inputs: SampleInputs) -> Tensor:
        """Images."""
        assert isinstance(model, VAE)
        return model.likelihood.mean(model.decode(self.flow.drawn(model, inputs).flatten(1), inputs.group))


def of_codes(setting: Setting, rounds: int) -> Setting:
    """The setting as the flow sees it, whose records are codes; refused where there cannot be two stages."""
    config = setting.config
    if config.model.network not in ("auto", NETWORK):
        raise ConfigError(
            f"method.latent = 'vae' needs codes that have places, and model.network = '{config.model.network}' makes "
            f"none; use '{NETWORK}'"
        )
    if not 1 <= rounds < config.rounds:
        raise ConfigError(
            f"method.latent_rounds = {rounds} must be at least 1 and below rounds = {config.rounds}: the VAE learns in "
            "these, and the flow in those after them"
        )
    if config.privacy.mechanism != "none":
        raise ConfigError(
            "method.latent = 'vae' learns in two stages, which the accounts of privacy.mechanism = "
            f"'{config.privacy.mechanism}' do not know; use method.latent = 'none'"
        )
    if config.server.step == "adam":
        raise ConfigError(
            "server.step = 'adam' would move the VAE on after its rounds; method.latent = 'vae' needs 'mean'"
        )
    if config.sharing.compression != "none":
        raise ConfigError(
            f"sharing.compression = '{config.sharing.compression}' would move the VAE on after its rounds, by what "
            "rounding has left out; method.latent = 'vae' needs 'none'"
        )
    if config.model.silos:
        raise ConfigError("model.silos gives silos networks of their own, which method.latent = 'vae' has no place for")
    return replace(setting, shape=grid_of(config.model.latent, config.model.channels, setting.shape))


def with_first_stage(method: Method, setting: Setting, rounds: int) -> Method:
    """The flow of codes with the VAE that makes them, which learns for so many rounds, and the flow afterwards."""
    config = setting.config
    setting = replace(setting, config=replace(config, model=replace(config.model, network=NETWORK)))
    check_branches(setting, method.plan)
    latent = config.model.latent
    means = prior_means("identical", len(setting.groups), latent, setting.streams)
    (flow,), bound = method.phases, Elbo(latent, config.model.kl_weight)
    assert isinstance(flow.objective, RectifiedFlow)
    vae = Phase("vae", tuple(FIRST_STAGE), bound, OptimizerRule.of(config.local), last=rounds)
    trains = tuple(block for block in flow.trains if block not in FIRST_STAGE)
    then = replace(flow, trains=trains, objective=OfCodes(flow.objective), first=rounds + 1)
    ways = {}
    for name, way in method.pathways.items():
        assert isinstance(way.generate, ImageFlow)
        ways[name] = replace(way, generate=Decoded(way.generate), blocks=(*trains, "decoder"))
    return replace(
        method,
        build=BuildCodeFlow(BuildVAE(setting, method.plan, means), method.build),
        phases=(vae, then),
        pathways=ways,
    )
