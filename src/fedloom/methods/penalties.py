"""A penalty on steep decoders beside whatever a VAE method minimises, as ``model.penalty`` asks for."""

from __future__ import annotations

from dataclasses import replace

from fedloom.errors import ConfigError
from fedloom.methods.base import Method, Phase, Setting
from fedloom.methods.vaes import BuildVAE
from fedloom.objectives.lipschitz import PENALTIES, WithPenalty


def with_penalty(method: Method, setting: Setting) -> Method:
    """The method with the penalty in every phase that trains a decoder; refuses what no decoder could follow."""
    model = setting.config.model
    for name, wanted in (("lipschitz", model.lipschitz > 0), ("penalty", model.penalty != "none")):
        if wanted and not isinstance(method.build, BuildVAE):
            raise ConfigError(f"model.{name} is for the decoders of VAEs, and method.name = '{method.name}' has none")
        if wanted and model.posterior == "closed-form":
            raise ConfigError(
                f"model.{name} does not fit model.posterior = 'closed-form', which follows its own formula"
            )
    if model.penalty == "none":
        return method
    if model.penalty == "align-penalty" and setting.config.privacy.mechanism == "dp-sgd":
        raise ConfigError(
            "model.penalty = 'align-penalty' interpolates between examples, so no bound on one record holds under "
            "DP-SGD; use 'jacobian', or model.lipschitz"
        )
    penalty = PENALTIES[model.penalty](model.penalty_limit)

    def penalised(phase: Phase) -> Phase:
        if "decoder" not in phase.trains:
            return phase
        return replace(phase, objective=WithPenalty(phase.objective, penalty, model.penalty_weight))

    return replace(method, phases=tuple(map(penalised, method.phases)))
