"""Three tiny methods that lean on the seams which later methods need; at module level, so that workers can load them.

They are made for records of WIDTH numbers in [0, 1] in two groups, and use nothing but the public parts of a method.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Pathway, Phase, SampleInputs
from fedloom.methods.steps import Merged, ServerRound, ServerState, ServerStep, Stepped
from fedloom.modalities.likelihoods import Bernoulli
from fedloom.models.networks import Flat
from fedloom.models.vae import VAE
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.elbo import Elbo
from fedloom.sharing.plan import GLOBAL, SERVER, SILO, UPLOAD, BlockKey, SharingPlan
from fedloom.streams import Streams

WIDTH, LATENT, GROUPS = 6, 2, ("a", "b")
STUDENT = BlockKey("student", "server")


def decoder() -> nn.Module:
    return Flat((LATENT,), (8,), (WIDTH,))


# A GAN: two phases, two optimisers.


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = decoder()
        self.discriminator = Flat((WIDTH,), (8,), (1,))

    def score(self, x: Tensor) -> Tensor:
        """Positive where x looks real."""
        score: Tensor = self.discriminator(x)
        return score.squeeze(1)


def build_gan(_: Site) -> nn.Module:
    return GAN()


@dataclass(frozen=True)
class DiscriminatorLoss:
    noise = {"z": (LATENT,)}  # noqa: RUF012

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        assert isinstance(model, GAN)
        real, fake = model.score(step.batch.x), model.score(torch.sigmoid(model.generator(step.noise["z"])))
        total = functional.softplus(-real) + functional.softplus(fake)
        return Losses(total, {"real": real, "fake": fake})


@dataclass(frozen=True)
class GeneratorLoss:
    noise = {"z": (LATENT,)}  # noqa: RUF012

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        assert isinstance(model, GAN)
        total = functional.softplus(-model.score(torch.sigmoid(model.generator(step.noise["z"]))))
        return Losses(total, {})


def from_generator(model: nn.Module, inputs: SampleInputs) -> Tensor:
    assert isinstance(model, GAN)
    return torch.sigmoid(model.generator(inputs.noise["z"]))


def gan() -> Method:
    plan = SharingPlan({"generator": GLOBAL, "discriminator": GLOBAL}, GROUPS)
    critic, artist = OptimizerRule("adam", 2e-3, betas=(0.5, 0.9), keep=True), OptimizerRule("sgd", 0.1)
    return Method(
        name="probe-gan",
        plan=plan,
        build=build_gan,
        phases=(
            Phase("discriminator", ("discriminator",), DiscriminatorLoss(), critic),
            Phase("generator", ("generator",), GeneratorLoss(), artist, touches_records=False),
        ),
        server_step=Merged(),
        pathways={"z": Pathway({"z": (LATENT,)}, from_generator, "noise -> x", ("generator",))},
    )


# A VAE whose encoder never leaves the silo.


def build_vae(_: Site) -> nn.Module:
    encoder = Flat((WIDTH,), (8,), (2 * LATENT,))
    return VAE(encoder, decoder(), torch.zeros(len(GROUPS), LATENT), Bernoulli())


def from_decoder(model: nn.Module, inputs: SampleInputs) -> Tensor:
    assert isinstance(model, VAE)
    return model.likelihood.mean(model.decode(inputs.noise["z1"], inputs.group))


def private_encoder() -> Method:
    plan = SharingPlan({"encoder": SILO, "decoder": GLOBAL}, GROUPS)
    return Method(
        name="probe-private-encoder",
        plan=plan,
        build=build_vae,
        phases=(Phase("vae", ("encoder", "decoder"), Elbo(LATENT), OptimizerRule()),),
        server_step=Merged(),
        pathways={"z1": Pathway({"z1": (LATENT,)}, from_decoder, "noise -> x", ("decoder",))},
    )


# Decoders are uploaded, a student at the server learns from their samples, and nothing comes down.


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = decoder()


def build_teacher_or_student(site: Site) -> nn.Module:
    return Student() if site.name == "server" else build_vae(site)


@dataclass(frozen=True)
class Distil(ServerStep):
    """The student imitates every uploaded decoder on the same latents."""

    samples: int = 16
    learning_rate: float = 0.1
    needs_each = True

    def initial(self, streams: Streams) -> ServerState:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(streams.torch_seed("init/student"))
            return ServerState({STUDENT: dict(decoder().state_dict())}, {"seen": torch.zeros(())})

    def __call__(self, round: ServerRound) -> Stepped:
        student, teacher = decoder(), decoder()
        student.load_state_dict(round.state.blocks[STUDENT])
        loss = torch.zeros(())
        for update in round.updates:
            teacher.load_state_dict(update.blocks[BlockKey("decoder", f"silo={update.silo}")])
            z = round.streams.normal(f"distil/{update.silo}", self.samples, LATENT, round=round.context.round)
            loss = loss + functional.mse_loss(student(z), teacher(z).detach())
        gradients = torch.autograd.grad(loss, list(student.parameters()))
        learned = {
            name: (parameter - self.learning_rate * gradient).detach()
            for (name, parameter), gradient in zip(student.named_parameters(), gradients, strict=True)
        }
        return Stepped(ServerState({STUDENT: learned}, {"seen": round.state.memory["seen"] + len(round.updates)}))


def from_student(model: nn.Module, inputs: SampleInputs) -> Tensor:
    assert isinstance(model, Student)
    return torch.sigmoid(model.student(inputs.noise["z"]))


def distillation() -> Method:
    return Method(
        name="probe-distillation",
        plan=SharingPlan({"encoder": SILO, "decoder": UPLOAD, "student": SERVER}, GROUPS),
        build=build_teacher_or_student,
        phases=(Phase("vae", ("encoder", "decoder"), Elbo(LATENT), OptimizerRule()),),
        server_step=Distil(),
        pathways={"z": Pathway({"z": (LATENT,)}, from_student, "noise -> x", ("student",))},
    )
