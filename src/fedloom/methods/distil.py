"""Distillation as a server step: the server learns from samples of the generators that reached it.

The server's half of ALIGN-FL (Gulati, Gross, Wunder, 2025, arXiv 2512.13316, algorithm 1), for any method: alone, on
what each silo sent last, or after averaging, on what was averaged. It is a function of what left the silos, so it
costs no further privacy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedloom.config import LocalConfig, ServerConfig
from fedloom.errors import FedloomWarning
from fedloom.federation.records import UNLABELLED, Records, concatenate
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import Method, SampleInputs, fresh_blocks
from fedloom.methods.latents import DRAWS, Draw
from fedloom.methods.steps import DistillationJob, Distilled, ServerRound, ServerState, ServerStep, Stepped
from fedloom.methods.teachers import Teacher, Teachers
from fedloom.models.vae import VAE
from fedloom.sharing.codec import placed, under
from fedloom.sharing.plan import BlockKey, Scope, SharingPlan, Tensors
from fedloom.streams import Streams

CHUNK = 1000  # rows generated at once; fixed, so that a sample does not depend on how many there are
STUDENT = "student/"  # under which the server remembers its optimiser's moments


@dataclass(frozen=True)
class Distil(ServerStep):
    """Collect the newest generators, sample all of them, train on the union from where the last round ended."""

    method: Method  # as the silos have it
    student: Method  # the model that the server trains
    server_plan: SharingPlan  # under which names the server keeps the student's blocks
    settings: ServerConfig
    kind: str = ""  # of synthetic records that are drawn as stored: their modality; "": they are as models see them

    @property
    def teachers(self) -> Teachers:
        """The generators that the server samples, as its settings choose them."""
        return Teachers(self.method, self.settings)

    @property
    def needs_each(self) -> bool:
        """Where silos are sampled."""
        return self.teachers.are_silos

    def initial(self, streams: Streams, /) -> ServerState:
        """Fresh weights of the server's own model; what is averaged comes from elsewhere."""
        if self.server_plan.blocks["encoder"].scope is not Scope.SERVER:
            return ServerState({})
        return ServerState(fresh_blocks(replace(self.student, plan=self.server_plan), self._home, streams))

    def __call__(self, round: ServerRound) -> Stepped:
        """Take over what silos sent that is newer than what is there, and ask to be distilled on samples of it."""
        server, context = self.collected(round), round.context
        distillation = self.distillation(server, context, round.streams, round.device)
        return Stepped(
            server, distillation, {**self.news(server, context), "samples": float(len(distillation.records))}
        )

    def collected(self, round: ServerRound) -> ServerState:
        """The server with the newest generators, and earlier ones as far back as replay goes."""
        renewed = self.teachers.renewed(round.state, round.updates)
        return self.teachers.remembered(renewed, round.before, round.context)

    def distillation(
        self, server: ServerState, context: RoundContext, streams: Streams, device: torch.device
    ) -> DistillationJob:
        """Synthetic records, and where the training on them starts."""
        settings = self.settings
        return DistillationJob(
            method=self.student,
            local=LocalConfig(epochs=settings.epochs, batch_size=settings.batch_size),
            records=self.synthetic(server, context, streams, device),
            weights=self.server_plan.join(server.blocks, self._home),
            moments=under(STUDENT, server.memory),
            context=context,
            seed=streams.torch_seed("distil"),
        )

    def learned(self, state: ServerState, distilled: Distilled, /) -> ServerState:
        """The server after a distillation."""
        blocks = {**state.blocks, **self.server_plan.split(distilled.weights, self._home)}
        return ServerState(blocks, state.memory | placed(STUDENT, distilled.moments))

    @property
    def of_silos(self) -> Method:
        """Without the server's model."""
        return self.method

    def sent_by(self, state: ServerState, site: Site, /) -> dict[BlockKey, Tensors]:
        """A silo's newest generator; nothing where the server keeps averages alone."""
        return self.teachers.sent_by(state, site)

    def news(self, server: ServerState, context: RoundContext) -> dict[str, float]:
        """What the log says of the teachers; of those that have long been silent there is a warning."""
        teachers = self.teachers.present(server, context)
        for teacher in teachers:
            if teacher.age and teacher.age % self.settings.patience == 0:
                warnings.warn(
                    f"silo '{teacher.name}' has sent nothing for {teacher.age} rounds; the server goes on with its "
                    f"generator of round {context.round - teacher.age}",
                    FedloomWarning,
                    stacklevel=2,
                )
        return {"generators": float(len(teachers)), "oldest": float(max(teacher.age for teacher in teachers))}

    @torch.no_grad()
    def synthetic(self, server: ServerState, context: RoundContext, streams: Streams, device: torch.device) -> Records:
        """Samples of every teacher, others in every round."""
        teachers, tables = self.teachers.present(server, context), []
        for teacher, count in zip(teachers, self._counts(teachers), strict=True):
            for number, version in enumerate(self.teachers.versions(teacher, server)):
                model = self.method.build(teacher.site)
                model.load_state_dict(self.method.plan.join(version.blocks, teacher.site), strict=False)
                model.to(device).eval()
                sent = {name: tensor.to(device) for name, tensor in version.latents.items()}
                for chunk in range(math.ceil(count / CHUNK)):
                    rows = min(CHUNK, count - chunk * CHUNK)
                    group = torch.tensor(teacher.site.groups).repeat(rows)[:rows].to(device)

                    def normal(
                        name: str,
                        width: int,
                        attempt: int,
                        *,
                        rows: int = rows,
                        step: int = chunk,
                        teacher: str = f"{teacher.name}/{number}",
                    ) -> Tensor:
                        purpose = f"distil/{teacher}/{name}/{attempt}"
                        return streams.normal(purpose, rows, width, round=context.round, step=step, device=device)

                    images = self._images(model, group, Draw(normal, self.settings, sent, streams))
                    tables.append(Records(images, torch.full_like(group, UNLABELLED), group, kind=self.kind))
        return concatenate(tables)

    def _images(self, model: nn.Module, group: Tensor, draw: Draw) -> Tensor:
        """One chunk of one teacher's samples."""
        rows, source = len(group), self.teachers.source
        noise = {
            name: draw.normal(name, math.prod(shape), 0).reshape(rows, *shape) for name, shape in source.noise.items()
        }
        if self.settings.latents in DRAWS:
            assert isinstance(model, VAE)
            noise["z1"] = DRAWS[self.settings.latents](draw, model.prior_means.shape[1])
        images = source.generate(model, SampleInputs(noise, group, group))
        if self.settings.targets == "samples" and isinstance(model, VAE):
            pixels = draw.normal("pixels", images[0].numel(), 0)
            return model.likelihood.sample(images, pixels.reshape(images.shape))
        return images

    @property
    def _home(self) -> Site:
        return Site("server", tuple(range(len(self.method.plan.groups))))

    def _counts(self, teachers: Sequence[Teacher]) -> list[int]:
        """How many samples each teacher gives; somebody with few records still gives one."""
        samples = self.settings.samples
        if self.settings.balance == "equal":
            return [samples] * len(teachers)
        total = sum(teacher.records for teacher in teachers)
        return [max(1, round(samples * len(teachers) * teacher.records / total)) for teacher in teachers]
