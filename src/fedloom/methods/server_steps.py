"""Which server step a method gets: the configuration's choice, checked against what the silos send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fedloom.config import Config, ServerConfig
from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import ARCHITECTURE, Method, OptimizerRule, Phase, Setting
from fedloom.methods.distil import Distil
from fedloom.methods.latents import DRAWS, release
from fedloom.methods.server_adam import ServerAdam
from fedloom.methods.steps import Steps
from fedloom.methods.teachers import Teachers
from fedloom.methods.vaes import RECORD, BuildVAE, drawing, flat_pathways, latent_sizes
from fedloom.objectives.elbo import Elbo
from fedloom.registry import Registry
from fedloom.settings import parse
from fedloom.sharing.aggregation import Aggregator, Merge
from fedloom.sharing.merges import MERGES
from fedloom.sharing.plan import GLOBAL, SERVER, SILO, Down, Scope, Seen, SharingPlan

BLOCKS = ("encoder", "decoder")  # of the model that a distilling server trains


@dataclass(frozen=True)
class ModelsBySite:
    """The server's own model at the server, the silos' everywhere else."""

    silos: Callable[[Site], nn.Module]
    server: Callable[[Site], nn.Module]

    def __call__(self, site: Site) -> nn.Module:
        """The model of a site, with fresh weights."""
        return (self.server if site.name == "server" else self.silos)(site)


def with_aggregator(method: Method, config: Config) -> Method:
    """The method whose blocks are merged as the configuration asks."""
    asked, weights = config.server.merge, config.sharing.weights
    merge: Merge = parse(MERGES.get(asked.name, "server.merge"), asked.options, "server.merge", beside=("name",))
    if not merge.weighted and weights != "equal":
        raise ConfigError(
            f"server.merge = '{merge.name}' counts every silo once, so sharing.weights must be 'equal', not '{weights}'"
        )
    if merge.needs is Seen.EACH and config.privacy.trust == "distributed":
        raise ConfigError(
            f"server.merge = '{merge.name}' looks at what every silo sent, of which privacy.trust = 'distributed' "
            "shows the server the sum alone; use 'mean'"
        )
    if merge.needs is Seen.EACH and not method.plan.merged:
        raise ConfigError(
            f"server.merge = '{merge.name}' has nothing to merge: method '{method.name}' averages no block"
        )
    return replace(method, aggregator=Aggregator(merge, weights))


def with_compression(method: Method, config: Config) -> Method:
    """The method whose silos send what is merged in as few bytes as the configuration asks."""
    asked = f"sharing.compression = '{config.sharing.compression}'"
    found = replace(method, plan=replace(method.plan, compression=config.sharing.compression))
    if config.sharing.compression != "none" and config.privacy.trust == "distributed":
        raise ConfigError(
            f"{asked} rounds what each silo sends by itself, but under privacy.trust = 'distributed' silos send whole "
            "numbers that only their sum makes sense of, whose size privacy.bits sets; leave it out"
        )
    if config.sharing.compression != "none" and not found.plan.compressed.blocks:
        raise ConfigError(f"{asked} has nothing to compress: method '{method.name}' averages no block that comes down")
    return found


@dataclass(frozen=True)
class StepRule:
    """A value of ``server.step``: a line about it, and what it makes of a method."""

    summary: str
    apply: Callable[[Method, Setting], Method]


def with_server_step(method: Method, setting: Setting) -> Method:
    """The method with the server step that the configuration asks for."""
    return SERVER_STEPS.get(setting.config.server.step, "server.step").apply(method, setting)


def _by_plan(method: Method, setting: Setting) -> Method:
    plan = method.plan
    sent = any(plan.blocks[block].up and plan.blocks[block].scope is Scope.SILO for block in _needed(method))
    return _distilling(method, setting, averages=False) if sent and not plan.merged else method


def _by_adam(method: Method, setting: Setting) -> Method:
    if not method.plan.merged:
        raise ConfigError(f"server.step = 'adam' has nothing to move: method '{method.name}' averages no block")
    return replace(method, server_step=ServerAdam(method.server_step, setting.config.server.learning_rate))


def _needed(method: Method) -> tuple[str, ...]:
    """The blocks that its default way to generate uses; none where it does not generate."""
    return next((pathway.blocks for pathway in method.pathways.values()), ())


def _check_step(method: Method, *, averages: bool) -> None:
    step = "mean+distil" if averages else "distil"
    if next((pathway.labelled for pathway in method.pathways.values()), False):
        raise ConfigError(f"server.step = '{step}' is not built for decoders that are told the class")
    for block in _needed(method):
        if not method.plan.blocks[block].up:
            raise ConfigError(f"server.step = '{step}' samples the block '{block}', which the silos do not send")
    if method.plan.merged and not averages:
        raise ConfigError(
            f"server.step = 'distil' averages nothing, but the silos share the average of '{method.plan.merged[0]}'; "
            "use 'mean+distil', or sharing.scopes"
        )


def _distilling(method: Method, setting: Setting, *, averages: bool) -> Method:
    settings, config = setting.config.server, setting.config
    own = settings.trains == "own"
    _check_step(method, averages=averages)
    _check_settings(method, setting, averages=averages)
    model = config.model
    if not _taken_over(method, settings):
        # What keeps the silos' decoders from showing their records is of no use in the server's, unless asked for.
        model = replace(model, lipschitz=0.0).changed(settings.model, "server.model", (*ARCHITECTURE, "kl_weight"))
    kept = SharingPlan(dict.fromkeys(BLOCKS, SERVER if own else GLOBAL), setting.groups)
    alone = replace(setting, config=replace(config, model=replace(model, branches={}, silos={})))
    build = BuildVAE(alone, kept, torch.zeros(len(setting.groups), model.latent))
    optimizer = OptimizerRule("adam", settings.learning_rate, keep=settings.keep_optimizer)
    phase = Phase("server", BLOCKS, Elbo(model.latent, model.kl_weight), optimizer, touches_records=False)
    staying = SharingPlan(dict.fromkeys(BLOCKS, SILO), setting.groups)
    student = Method("distil", staying, build, (phase,), method.server_step, {})
    if (sent := release(settings, setting.widest_latent, setting.streams)) is not None:
        plan = replace(method.plan, payloads=(*method.plan.payloads, sent.payload))
        method = replace(method, plan=plan, payloads=(*method.payloads, sent))
    kind = setting.modality.name if setting.modality.drawing else ""
    distil = Distil(method, student, kept, settings, kind)
    made = replace(method, server_step=Steps((method.server_step, distil)) if averages else distil)
    if not own:
        return made
    models = ModelsBySite(method.build, build)
    return replace(
        made, build=models, server_plan=kept, pathways=drawing(flat_pathways(model.latent), setting.modality)
    )


def _taken_over(method: Method, settings: ServerConfig) -> bool:
    """Whether the model that the server trains comes down to the silos."""
    return settings.trains == "merged" or any(rule.down is Down.SERVER for rule in method.plan.blocks.values())


def _check_settings(method: Method, setting: Setting, *, averages: bool) -> None:
    settings, source = setting.config.server, next(iter(method.pathways.values()))
    flat = set(source.noise) - {RECORD} == {"z1"} and source.uses_prior
    if settings.trains == "merged" and (
        not averages or not flat or any(method.plan.blocks[block] != GLOBAL for block in BLOCKS)
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
    if settings.latents in ("mixture", "histogram") and not Teachers(method, settings).are_silos:
        raise ConfigError(
            f"server.latents = '{settings.latents}' describes each silo's latents, but averages are sampled; set "
            "server.teachers = 'silos', or use 'prior'"
        )
    if settings.teachers == "silos" and setting.config.privacy.trust == "distributed":
        raise ConfigError(
            "server.teachers = 'silos' samples what each silo sent, of which privacy.trust = 'distributed' shows the "
            "server the sum alone; use 'averages'"
        )
    if settings.targets == "samples" and setting.modality.drawing is not None:
        raise ConfigError(f"server.targets = 'samples' is not for {setting.modality.plural}, which are always drawn")
    likelihoods = {setting.model_at(silo).likelihood for silo in (*setting.config.model.silos, "")}
    servers = settings.model.get("likelihood", setting.config.model.likelihood)
    if settings.targets == "samples" and "gaussian" in likelihoods and servers == "bernoulli":
        raise ConfigError(
            "server.targets = 'samples' of Gaussian decoders lie outside [0, 1], which server.model.likelihood = "
            "'bernoulli' cannot describe; use 'gaussian'"
        )


_OWN = {
    "auto": StepRule("'mean', or 'distil' where the sharing plan leaves nothing to average", _by_plan),
    "mean": StepRule("average by scope", lambda method, _: method),
    "adam": StepRule("average by scope, and take that as a gradient for an Adam of the server's", _by_adam),
    "distil": StepRule("train on samples of the decoders that silos send", partial(_distilling, averages=False)),
    "mean+distil": StepRule("both, on samples of what was averaged too", partial(_distilling, averages=True)),
}
SERVER_STEPS: Registry[StepRule] = Registry("server step", "fedloom.server_steps", StepRule, lambda: _OWN)
