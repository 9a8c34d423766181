"""Straight ways for few steps: in the last round the server trains a flow on pairs of noise and its own samples.

Liu et al., "Flow Straight and Fast", ICLR 2023 (arXiv 2209.03003), section 2.2. It is a function of what left the silos
and touches no record, so it costs no privacy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedloom.config import LocalConfig, ServerConfig
from fedloom.errors import ConfigError
from fedloom.federation.records import UNLABELLED, Records, concatenate
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Phase, Setting, some_model
from fedloom.methods.image_flows import ImageFlow
from fedloom.methods.steps import DistillationJob, Distilled, ServerRound, ServerState, ServerStep, Stepped, Steps
from fedloom.objectives.rectified_flow import Straightened
from fedloom.sharing.plan import SILO, SharingPlan

CHUNK = 1000  # pairs made at once; fixed, so that none depends on how many there are
NUMBERS = "vector"  # the modality of pairs: numbers of any size, and no pixels
STEPS_BEFORE = ("auto", "mean", "adam")  # values of ``server.step`` that leave the distillation of a round free


@dataclass(frozen=True)
class Reflow(ServerStep):
    """Trains all blocks, a branch for each group where they are the group's, and puts them in their places."""

    method: Method  # as the silos have it
    flow: ImageFlow  # that makes the pairs
    shape: tuple[int, ...]
    settings: ServerConfig
    at_once: int  # of pairs, in memory

    @property
    def closes(self) -> bool:
        """Its weights are no average of rounds, and none goes on from them."""
        return True

    def __call__(self, round: ServerRound) -> Stepped:
        """Nothing before the last round."""
        if round.context.round < round.context.rounds:
            return Stepped(round.state)
        settings, home = self.settings, self._home
        # Samples are of the running mean, if there is one, so it teaches.
        state = round.state.averaged(round.before.averages, settings.averaging)
        weights = self.method.plan.join(state.sampled, home)
        phase = Phase(
            "reflow",
            tuple(self.method.plan.blocks),
            Straightened(self.flow.classes),
            OptimizerRule("adam", settings.learning_rate),
            touches_records=False,
            at_once=self.at_once,
        )
        staying = SharingPlan(dict.fromkeys(self.method.plan.blocks, SILO), self.method.plan.groups)
        job = DistillationJob(
            method=Method("reflow", staying, self.method.build, (phase,), ServerStep(), {}),
            local=LocalConfig(epochs=settings.epochs, batch_size=settings.batch_size),
            records=self.pairs(state, round),
            weights=weights,
            moments={},
            context=round.context,
            seed=round.streams.torch_seed("reflow"),
        )
        return Stepped(round.state, job, {"samples": float(len(job.records))})

    def learned(self, state: ServerState, taught: Distilled, /) -> ServerState:
        """Each copy with its straightened weights."""
        return replace(state, blocks={**state.blocks, **self.method.plan.split(taught.weights, self._home)})

    @torch.no_grad()
    def pairs(self, state: ServerState, round: ServerRound) -> Records:
        """For each group as many: noise, and behind it where the flow ends; of each class alike, and of none."""
        site, tables = self._home, []
        model = some_model(self.method, site)
        model.load_state_dict(self.method.plan.join(state.sampled, site), strict=False)
        model.to(round.device).eval()
        for number in site.groups:
            for chunk in range(math.ceil(self.settings.samples / CHUNK)):
                rows = min(CHUNK, self.settings.samples - chunk * CHUNK)
                drawn = round.streams.normal(
                    "reflow/e", rows, math.prod(self.shape), silo=number, step=chunk, device=round.device
                )
                start = drawn.reshape(rows, *self.shape)
                group = torch.full((rows,), number, device=round.device)
                label = torch.arange(rows, device=round.device) % (self.flow.classes + 1)  # the last stands for none
                end = self.flow.ends(model, start, group, label)
                y = torch.where(label < self.flow.classes, label, UNLABELLED)
                tables.append(Records(torch.cat([start, end], dim=1), y, group, kind=NUMBERS))
        return concatenate(tables)

    @property
    def _home(self) -> Site:
        return Site("server", tuple(range(len(self.method.plan.groups))))


def with_reflow(method: Method, flow: ImageFlow, setting: Setting, at_once: int) -> Method:
    """The method with a last round that straightens its ways; refused where the server lacks a block, or is busy."""
    server = setting.config.server
    if len(method.phases) > 1:
        raise ConfigError("method.reflow straightens the ways of pixels; it needs method.latent = 'none'")
    for block, rule in method.plan.blocks.items():
        if block not in method.plan.merged:
            raise ConfigError(f"method.reflow straightens what the server has, but block '{block}' is '{rule.scope}'")
    if server.step not in STEPS_BEFORE:
        raise ConfigError(
            f"method.reflow needs server.step to be one of {', '.join(STEPS_BEFORE)}: with '{server.step}' the server "
            "has something else to learn in the last round"
        )
    teacher = replace(flow, guidance=0.0)  # what leans on classes may still do so along straight ways
    reflow = Reflow(method, teacher, setting.shape, server, at_once)
    return replace(method, server_step=Steps((method.server_step, reflow)))
