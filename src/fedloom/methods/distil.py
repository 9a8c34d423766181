"""Distillation as a server step: the server learns from samples of the generators that reached it.

The server's half of ALIGN-FL (Gulati, Gross, Wunder, 2025, arXiv 2512.13316, algorithm 1), for any method: alone, on
what each silo sent last, or after averaging, on what was averaged. It is a function of what left the silos, so it
costs no further privacy.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedloom.config import LocalConfig, ServerConfig
from fedloom.errors import ConfigError, FedloomError, FedloomWarning
from fedloom.federation.records import UNLABELLED, Records, concatenate
from fedloom.federation.rounds import RoundContext, Site
from fedloom.methods.base import (
    ARCHITECTURE,
    Method,
    OptimizerPlan,
    Pathway,
    Phase,
    ServerState,
    ServerStep,
    Setting,
    fresh_blocks,
)
from fedloom.methods.latents import DRAWS, PAYLOAD, Draw, release
from fedloom.methods.vaes import BuildVAE, flat_pathways, latent_sizes
from fedloom.models.vae import VAE
from fedloom.objectives.elbo import Elbo
from fedloom.sharing.plan import GLOBAL, SERVER, SILO, BlockKey, Down, Scope, SharingPlan, Tensors
from fedloom.sharing.update import Update
from fedloom.streams import Streams

CHUNK = 1000  # rows generated at once; fixed, so that a sample does not depend on how many there are
BLOCKS = ("encoder", "decoder")  # of the model that the server trains
MERGED = ""  # the site of what was averaged: "server" is that of the server's own model
ROUND, RECORDS, STUDENT = "round/", "records/", "student/"  # what the server remembers


@dataclass(frozen=True)
class Teacher:
    """A generator at the server: the newest of a silo, or a group's average."""

    name: str
    site: Site
    records: float
    age: int  # rounds since it was sent


@dataclass(frozen=True, eq=False)
class Lesson:
    """What the server learns in a round: local training on synthetic records, for an engine to carry out."""

    method: Method  # of a single site, where all blocks stay
    local: LocalConfig
    records: Records
    weights: Tensors  # to start from, by parameter
    moments: Tensors  # of an optimiser that keeps them
    context: RoundContext
    seed: int


@dataclass(frozen=True)
class ModelsBySite:
    """The server's own model at the server, the silos' everywhere else."""

    silos: Callable[[Site], nn.Module]
    server: Callable[[Site], nn.Module]

    def __call__(self, site: Site) -> nn.Module:
        """Fresh weights."""
        return (self.server if site.name == "server" else self.silos)(site)


@dataclass(frozen=True)
class Distil:
    """Collect the newest generators, sample all of them, train on the union from where the last round ended."""

    method: Method  # as the silos have it
    student: Method  # the model that the server trains
    server_plan: SharingPlan  # under which names the server keeps the student's blocks
    settings: ServerConfig
    before: ServerStep | None = None  # averaging, where it comes first

    def initial(self, streams: Streams) -> ServerState:
        """Fresh weights of the server's own model; what is averaged comes from elsewhere."""
        if self.server_plan.blocks["encoder"].scope is not Scope.SERVER:
            return ServerState({})
        return ServerState(fresh_blocks(replace(self.student, plan=self.server_plan), self._home, streams))

    def __call__(
        self, server: ServerState, updates: Sequence[Update], context: RoundContext, streams: Streams
    ) -> ServerState:
        """Average, if that comes first, and take over what silos sent that is newer than what is there."""
        merged = server if self.before is None else self.before(server, updates, context, streams)
        blocks, memory = dict(merged.blocks), dict(merged.memory)
        for update in updates:
            if update.round <= memory.get(ROUND + update.silo, torch.tensor(0)):
                continue  # overtaken on its way by a newer one
            own = {key: part for key, part in update.blocks.items() if self._is_kept(key)}
            self._check(update, {key: part for key, part in own.items() if key not in blocks})
            blocks |= {self._kept(key, update.silo): part for key, part in own.items()}
            counts = [update.weights.get(f"group={group}", 0.0) for group in self.method.plan.groups]
            memory[ROUND + update.silo] = torch.tensor(update.round)
            memory[RECORDS + update.silo] = torch.tensor(counts, dtype=torch.float64)
            sent = update.payloads.get(PAYLOAD, {})
            memory |= {_latents(update.silo, 0) + name: tensor for name, tensor in sent.items()}
        # Only teachers of earlier rounds: an average that nobody has trained yet is not worth replaying.
        for teacher in self.teachers(server, context):
            keys = self._keys(teacher).values()
            if all(blocks[key] is server.blocks[key] for key in keys):
                continue
            for version in range(self.settings.replay):
                known = (key for key in keys if _older(key, version) in server.blocks)
                blocks |= {_older(key, version + 1): server.blocks[_older(key, version)] for key in known}
                described = _described(server, teacher.name, version)
                memory |= {_latents(teacher.name, version + 1) + name: tensor for name, tensor in described.items()}
        return ServerState(blocks, memory)

    def lesson(self, server: ServerState, context: RoundContext, streams: Streams, device: torch.device) -> Lesson:
        """Synthetic records, and where the training on them starts."""
        settings = self.settings
        return Lesson(
            method=self.student,
            local=LocalConfig(epochs=settings.epochs, batch_size=settings.batch_size),
            records=self.synthetic(server, context, streams, device),
            weights=self.server_plan.join(server.blocks, self._home),
            moments={n.removeprefix(STUDENT): t for n, t in server.memory.items() if n.startswith(STUDENT)},
            context=context,
            seed=streams.torch_seed("distil"),
        )

    def learned(self, server: ServerState, weights: Tensors, moments: Tensors) -> ServerState:
        """The server after a lesson."""
        blocks = {**server.blocks, **self.server_plan.split(weights, self._home)}
        return ServerState(blocks, {**server.memory, **{STUDENT + name: tensor for name, tensor in moments.items()}})

    def teachers(self, server: ServerState, context: RoundContext) -> list[Teacher]:
        """Whom the server can sample, in the order of their names: their places in the federation do not matter."""
        groups = self.method.plan.groups
        records = {n.removeprefix(RECORDS): t for n, t in server.memory.items() if n.startswith(RECORDS)}
        if _taught_by_silos(self.method, self.settings):
            return [
                Teacher(
                    name, _site(name, counts), float(counts.sum()), context.round - int(server.memory[ROUND + name])
                )
                for name, counts in sorted(records.items())
            ]
        totals = sum(records.values(), torch.zeros(len(groups), dtype=torch.float64)).tolist()
        found = [Teacher(name, Site(MERGED, (g,)), totals[g], 0) for g, name in enumerate(groups)]
        return [teacher for teacher in found if teacher.records]

    def sent_by(self, server: ServerState, site: Site) -> dict[BlockKey, Tensors]:
        """A silo's newest generator by the names of the plan; nothing where the server keeps averages alone."""
        if not _taught_by_silos(self.method, self.settings):
            return {}
        kept = self._keys(Teacher(site.name, site, 0.0, 0))
        return {key: server.blocks[own] for key, own in kept.items() if own in server.blocks}

    def news(self, server: ServerState, context: RoundContext) -> dict[str, float]:
        """What the log says of the teachers; of those that have long been silent there is a warning."""
        teachers = self.teachers(server, context)
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
        teachers, tables = self.teachers(server, context), []
        for teacher, count in zip(teachers, self._counts(teachers), strict=True):
            for version, parts in enumerate(self._versions(teacher, server)):
                model = self.method.build(teacher.site)
                model.load_state_dict(self.method.plan.join(parts, teacher.site), strict=False)
                model.to(device).eval()
                sent = {name: t.to(device) for name, t in _described(server, teacher.name, version).items()}
                for chunk in range(math.ceil(count / CHUNK)):
                    rows = min(CHUNK, count - chunk * CHUNK)
                    group = torch.tensor(teacher.site.groups).repeat(rows)[:rows].to(device)

                    def normal(name: str, width: int, attempt: int, rows: int = rows, step: int = chunk) -> Tensor:
                        purpose = f"distil/{teacher.name}/{version}/{name}/{attempt}"  # noqa: B023 - called at once
                        return streams.normal(purpose, rows, width, round=context.round, step=step, device=device)

                    images = self._images(model, group, Draw(normal, self.settings, sent, streams))
                    tables.append(Records(images, torch.full_like(group, UNLABELLED), group))
        return concatenate(tables)

    def _images(self, model: nn.Module, group: Tensor, draw: Draw) -> Tensor:
        """One chunk of one teacher's samples."""
        rows = len(group)
        noise = {
            name: draw.normal(name, math.prod(shape), 0).reshape(rows, *shape)
            for name, shape in self._source.noise.items()
        }
        if self.settings.latents in DRAWS:
            assert isinstance(model, VAE)
            noise["z1"] = DRAWS[self.settings.latents](draw, model.prior_means.shape[1])
        images = self._source.generate(model, noise, group, group)
        if self.settings.targets == "samples" and isinstance(model, VAE):
            pixels = draw.normal("pixels", images[0].numel(), 0)
            return model.likelihood.sample(images, pixels.reshape(images.shape))
        return images

    @property
    def _source(self) -> Pathway:
        """How a teacher generates."""
        return next(iter(self.method.pathways.values()))

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

    def _versions(self, teacher: Teacher, server: ServerState) -> Iterator[dict[BlockKey, Tensors]]:
        """The newest, then those remembered, from new to old."""
        keys = self._keys(teacher)
        for version in range(self.settings.replay + 1):
            if all(_older(kept, version) in server.blocks for kept in keys.values()):
                yield {key: server.blocks[_older(kept, version)] for key, kept in keys.items()}

    def _keys(self, teacher: Teacher) -> dict[BlockKey, BlockKey]:
        """Of each block that a teacher generates with its name in the plan, and under which the server keeps it."""
        plan = self.method.plan
        keys = (key for block in self._source.blocks for key in plan.prefixes(block, teacher.site).values())
        return {key: self._kept(key, teacher.name) for key in keys}

    def _is_kept(self, key: BlockKey) -> bool:
        """Whether the server keeps each silo's copy of a block, beside what it averages."""
        alone = self.method.plan.blocks[key.block].scope is Scope.SILO
        return alone or (self.settings.teachers == "silos" and key.block in self._source.blocks)

    def _kept(self, key: BlockKey, name: str) -> BlockKey:
        """Under which name: that of the silo as well, where the plan's is the average's."""
        alone = self.method.plan.blocks[key.block].scope is Scope.SILO
        return key if alone or not self._is_kept(key) else BlockKey(key.block, f"silo={name}/{key.owner}")

    def _check(self, update: Update, unknown: Mapping[BlockKey, Tensors]) -> None:
        """Refuse what does not fit the networks that the silo is known to have."""
        if not unknown:
            return
        counts = [update.weights.get(f"group={group}", 0.0) for group in self.method.plan.groups]
        site = _site(update.silo, torch.tensor(counts))
        known = self.method.plan.split(self.method.build(site).state_dict(), site)
        for key, part in unknown.items():
            for name in sorted({*part, *known.get(key, {})}):
                ours, theirs = known.get(key, {}).get(name), part.get(name)
                if ours is None or theirs is None or ours.shape != theirs.shape:
                    shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (theirs, ours)]
                    raise FedloomError(
                        f"silo '{update.silo}' sent '{key}/{name}' of shape {shapes[0]}, but its network has "
                        f"{shapes[1]}: refused"
                    )


def _older(key: BlockKey, version: int) -> BlockKey:
    """Where an earlier version of a block is kept."""
    return BlockKey(key.block, f"before-{version}/{key.owner}") if version else key


def _latents(silo: str, version: int) -> str:
    """Under which names what a silo tells of its latents is remembered, with a decoder of this version."""
    return f"{PAYLOAD}/before-{version}/{silo}/" if version else f"{PAYLOAD}/{silo}/"


def _described(server: ServerState, silo: str, version: int) -> Tensors:
    """What a silo told of its latents."""
    prefix = _latents(silo, version)
    return {name.removeprefix(prefix): t for name, t in server.memory.items() if name.startswith(prefix)}


def _site(silo: str, counts: Tensor) -> Site:
    """A silo by its records of each group; where it tells nothing of groups, there is the first."""
    return Site(silo, tuple(torch.nonzero(counts).flatten().tolist()) or (0,))


def with_server_step(method: Method, setting: Setting) -> Method:
    """The method with the server step that the configuration asks for."""
    settings, plan = setting.config.server, method.plan
    source = next(iter(method.pathways.values()), None)
    needed = source.blocks if source else ()
    averaged = [b for b, rule in plan.blocks.items() if rule.up and rule.scope in (Scope.GLOBAL, Scope.GROUP)]
    step = settings.step
    if source is not None and source.labelled and "distil" in step:
        raise ConfigError(f"server.step = '{step}' is not built for decoders that are told the class")
    if step == "auto":
        sent = any(plan.blocks[block].up and plan.blocks[block].scope is Scope.SILO for block in needed)
        step = "distil" if sent and not averaged else "mean"
    if step == "mean":
        return method
    for block in needed:
        if not plan.blocks[block].up:
            raise ConfigError(f"server.step = '{step}' samples the block '{block}', which the silos do not send")
    if step == "distil" and averaged:
        raise ConfigError(
            f"server.step = 'distil' averages nothing, but the silos share the average of '{averaged[0]}'; "
            "use 'mean+distil', or sharing.scopes"
        )
    return _distilling(method, setting, method.server_step if step == "mean+distil" else None)


def _distilling(method: Method, setting: Setting, before: ServerStep | None) -> Method:
    settings, config = setting.config.server, setting.config
    own = settings.trains == "own"
    _check_settings(method, setting, before)
    model = config.model
    if not _taken_over(method, settings):
        # What keeps the silos' decoders from showing their records is of no use in the server's, unless asked for.
        model = replace(model, lipschitz=0.0).changed(settings.model, "server.model", (*ARCHITECTURE, "kl_weight"))
    kept = SharingPlan(dict.fromkeys(BLOCKS, SERVER if own else GLOBAL), setting.groups)
    alone = replace(setting, config=replace(config, model=replace(model, branches={}, silos={})))
    build = BuildVAE(alone, kept, torch.zeros(len(setting.groups), model.latent))
    optimizer = OptimizerPlan("adam", settings.learning_rate, keep=settings.keep_optimizer)
    phase = Phase("server", BLOCKS, Elbo(model.latent, model.kl_weight), optimizer, touches_records=False)
    staying = SharingPlan(dict.fromkeys(BLOCKS, SILO), setting.groups)
    student = Method("distil", staying, build, (phase,), method.server_step, {})
    if (sent := release(settings, setting.widest_latent, setting.streams)) is not None:
        plan = replace(method.plan, payloads=(*method.plan.payloads, sent.payload))
        method = replace(method, plan=plan, releases=(*method.releases, sent))
    made = replace(method, server_step=Distil(method, student, kept, settings, before))
    if not own:
        return made
    models = ModelsBySite(method.build, build)
    return replace(made, build=models, server_plan=kept, pathways=flat_pathways(model.latent))


def _taught_by_silos(method: Method, settings: ServerConfig) -> bool:
    """Whether the server samples what each silo sent, not what was averaged."""
    source = next(iter(method.pathways.values()))
    return settings.teachers == "silos" or any(method.plan.blocks[b].scope is Scope.SILO for b in source.blocks)


def _taken_over(method: Method, settings: ServerConfig) -> bool:
    """Whether the model that the server trains comes down to the silos."""
    return settings.trains == "merged" or any(rule.down is Down.SERVER for rule in method.plan.blocks.values())


def _check_settings(method: Method, setting: Setting, before: ServerStep | None) -> None:
    settings, source = setting.config.server, next(iter(method.pathways.values()))
    flat = set(source.noise) == {"z1"} and source.uses_prior
    if settings.trains == "merged" and (
        before is None or not flat or any(method.plan.blocks[block] != GLOBAL for block in BLOCKS)
    ):
        raise ConfigError(
            "server.trains = 'merged' needs server.step = 'mean+distil', and a VAE of one level whose encoder and "
            "decoder are averaged over everybody"
        )
    if settings.model and _taken_over(method, settings):
        raise ConfigError(f"server.model.{min(settings.model)} must not be set: the silos take over the server's model")
    if settings.latents in DRAWS and not flat:
        raise ConfigError(f"server.latents = '{settings.latents}' is for VAEs of one level; use 'prior'")
    if settings.latents in ("mixture", "histogram") and len(latent_sizes(setting)) > 1:
        raise ConfigError(f"server.latents = '{settings.latents}' needs one latent size for all silos; use 'prior'")
    if settings.latents in ("mixture", "histogram") and not _taught_by_silos(method, settings):
        raise ConfigError(
            f"server.latents = '{settings.latents}' describes each silo's latents, but averages are sampled; set "
            "server.teachers = 'silos', or use 'prior'"
        )
    if settings.teachers == "silos" and setting.config.privacy.trust == "distributed":
        raise ConfigError(
            "server.teachers = 'silos' samples what each silo sent, of which privacy.trust = 'distributed' shows the "
            "server the sum alone; use 'averages'"
        )
    likelihoods = {setting.model_at(silo).likelihood for silo in (*setting.config.model.silos, "")}
    servers = settings.model.get("likelihood", setting.config.model.likelihood)
    if settings.targets == "samples" and "gaussian" in likelihoods and servers == "bernoulli":
        raise ConfigError(
            "server.targets = 'samples' of Gaussian decoders lie outside [0, 1], which server.model.likelihood = "
            "'bernoulli' cannot describe; use 'gaussian'"
        )
