"""Fission of a modern generator: flow matching by a UNet whose blocks have scopes of their own.

Hu et al., "FissionVAE", IJCAI 2025 (arXiv 2408.17090), section 3.3, gives decoders to groups and shares the rest; here
the same is done to the UNet of Ho et al., NeurIPS 2020 (arXiv 2006.11239, appendix B), trained by rectified flow (Liu
et al., "Flow Straight and Fast", ICLR 2023, arXiv 2209.03003, equation 1). Unless ``sharing.scopes`` says otherwise the
upward half is the group's and all before it everybody's. With classes it learns with and without them, and guidance
(Ho, Salimans, "Classifier-Free Diffusion Guidance", 2022, arXiv 2207.12598, equation 6) leans on the difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Phase, Recipe, Setting, branched
from fedloom.methods.image_codes import FIRST_STAGE, of_codes, with_first_stage
from fedloom.methods.image_flows import ImageFlow, image_ways
from fedloom.methods.labels import LabelOptions, require_classes, with_labels
from fedloom.methods.reflow import with_reflow
from fedloom.methods.steps import Merged
from fedloom.models.flow import Solver
from fedloom.models.unet import Embedding, FlowUNet, Middle, UNetSize, WayDown, WayUp
from fedloom.objectives.rectified_flow import Augmentation, PathName, RectifiedFlow, Times, Weight
from fedloom.outline import in_outline
from fedloom.settings import all_positive, at_least, share
from fedloom.sharing.plan import GLOBAL, GROUP, SharingPlan


@dataclass(frozen=True, kw_only=True)
class FissionFlowOptions(LabelOptions):
    """The network, what it is told, how it is trained, and how samples are drawn."""

    widths: tuple[int, ...] = field(default=(64, 128, 256), metadata=all_positive())  # the image halves between them
    blocks: int = field(default=1, metadata=at_least(1))  # residual blocks at each size, down and up
    attention: int = field(default=1, metadata=at_least(0))  # at how many of the smallest sizes
    dropout: float = field(default=0.0, metadata=share())  # share of a residual block's channels
    told: tuple[Literal["group", "label"], ...] = ("group",)  # what the network knows beside image and time
    unlabelled: float = field(default=0.1, metadata=share())  # share of the records whose class it is not told
    path: PathName = "straight"  # from noise to a record
    times: Times = "uniform"  # how times are drawn
    weight: Weight = "velocity"  # of the error at a time: of the velocity, or of the record or noise that it implies
    draws: int = field(default=1, metadata=at_least(1))  # of time and noise for a record in a step
    flips: bool = False  # records also left and right swapped
    shifts: int = field(default=0, metadata=at_least(0))  # records also moved by at most so many pixels
    solver: Solver = "heun"  # of the way from noise to a sample
    steps: int = field(default=25, metadata=at_least(1))  # of the solver
    guidance: float = field(default=0.0, metadata=at_least(0))  # how far samples lean towards their class
    latent: Literal["none", "vae"] = "none"  # of what: pixels, or the codes of a VAE with model's settings
    latent_rounds: int = field(default=0, metadata=at_least(0))  # the first ones, in which the VAE learns, and alone
    reflow: int = field(default=0, metadata=at_least(0))  # Euler's steps, on ways the server straightens; 0: none

    @property
    def size(self) -> UNetSize:
        """Of the network."""
        return UNetSize(self.widths, self.blocks, min(self.attention, len(self.widths)), self.dropout)


@dataclass(frozen=True)
class Build:
    """The network of a site, a branch for each of its groups where a block is the group's."""

    __repr__ = in_outline

    setting: Setting
    plan: SharingPlan
    options: FissionFlowOptions

    def __call__(self, site: Site) -> FlowUNet:
        """Fresh weights."""
        size, channels, told = self.options.size, self.setting.shape[0], self.options.told
        groups = len(self.setting.groups) if "group" in told else 0
        classes = len(self.setting.classes) + 1 if "label" in told else 0
        makers = {
            "embedding": lambda _: Embedding(size, groups, classes),
            "down": lambda _: WayDown(channels, size),
            "middle": lambda _: Middle(size),
            "up": lambda _: WayUp(channels, size),
        }
        return FlowUNet(*(branched(self.plan, block, site, make) for block, make in makers.items()))


def make(setting: Setting, options: FissionFlowOptions) -> Method:
    """The upward half GROUP, all else GLOBAL, unless ``sharing.scopes`` says otherwise."""
    coded = options.latent == "vae"
    whole, setting = setting, of_codes(setting, options.latent_rounds) if coded else setting
    options.size.check(setting.shape)
    labelled = "label" in options.told
    if labelled:
        require_classes(setting, "fission_flow")
    blocks = {"embedding": GLOBAL, "down": GLOBAL, "middle": GLOBAL, "up": GROUP} | (FIRST_STAGE if coded else {})
    plan = SharingPlan(blocks, setting.groups).with_scopes(setting.config.sharing.scopes)
    classes = len(setting.classes) if labelled else 0
    drawn = options.path, options.times, options.weight, options.draws
    seen = options.unlabelled if labelled else 0.0, Augmentation(options.flips, options.shifts)
    objective = RectifiedFlow(setting.shape, classes, *drawn, *seen, options.size.dropped, options.dropout)
    flow = ImageFlow(options.solver, options.steps, options.widths[0], classes, options.guidance)
    at_once = options.size.at_once(setting.shape, options.draws, setting.config.engine.pass_memory)
    made = Method(
        name="fission_flow",
        plan=plan,
        build=Build(setting, plan, options),
        phases=(Phase("flow", tuple(blocks), objective, OptimizerRule.of(setting.config.local), at_once=at_once),),
        server_step=Merged(),
        pathways=image_ways(flow, setting.shape, tuple(blocks), options.reflow),
    )
    made = with_first_stage(made, whole, options.latent_rounds) if coded else made
    made = with_labels(made, whole, options) if labelled else made
    return with_reflow(made, flow, setting, at_once) if options.reflow else made


RECIPE = Recipe(
    "fission_flow", "flow matching by a UNet whose upward half is the group's", FissionFlowOptions, make, ("image",)
)
