"""Where the latents of a record come from, as ``model.posterior`` asks for.

``amortised``     an encoder that is trained with the decoder, on the records. If only the decoder is noised, the
                  encoder gives its records away through the decoder's gradients: no DP guarantee.
``closed-form``   no encoder: the decoder is linear, and its posterior is known (:mod:`fedloom.models.linear`).
``from-decoder``  an encoder that is trained on samples of the decoder alone, so that it knows what the decoder knows.

With the last two, noise on the decoder's gradients covers all that depends on records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedloom.errors import ConfigError
from fedloom.methods.base import Method, Phase, Setting
from fedloom.methods.steps import Merged
from fedloom.methods.vaes import BuildVAE
from fedloom.objectives.posteriors import Dreams, Evidence


def with_posterior(method: Method, setting: Setting) -> Method:
    """The method with latents from where the configuration says."""
    wanted = setting.config.model.posterior
    if wanted == "amortised" or method.own_posterior:
        return method
    if set(method.plan.blocks) != {"encoder", "decoder"} or not isinstance(method.build, BuildVAE):
        raise ConfigError(
            f"model.posterior = '{wanted}' is for VAEs of one level, and method.name = '{method.name}' is none"
        )
    return POSTERIORS[wanted](method, setting)


def _from_decoder(method: Method, setting: Setting) -> Method:
    """The encoder's phase comes first and touches no record; the decoder's is what it was, for the decoder alone."""
    (phase,) = method.phases
    dreams = Dreams(setting.widest_latent, setting.seen)
    encoder = Phase("encoder", ("encoder",), dreams, phase.optimizer, touches_records=False)
    return replace(method, phases=(encoder, replace(phase, name="decoder", trains=("decoder",))))


def _closed_form(method: Method, setting: Setting) -> Method:
    """A decoder that is trained on the exact evidence."""
    (phase,), build, model = method.phases, method.build, setting.config.model
    assert isinstance(build, BuildVAE)
    if model.likelihood != "gaussian" or build.told_group or model.kl_weight != 1.0:
        raise ConfigError(
            "model.posterior = 'closed-form' is for p(x | z) = N(W z + b, s I): it needs "
            "model.likelihood = 'gaussian', model.kl_weight = 1 and a method whose decoder sees z alone"
        )
    plan = replace(method.plan, blocks={"decoder": method.plan.blocks["decoder"]})
    return replace(
        method,
        plan=plan,
        build=replace(build, plan=plan),
        phases=(replace(phase, trains=("decoder",), objective=Evidence()),),
        server_step=Merged(),
    )


POSTERIORS: dict[str, Callable[[Method, Setting], Method]] = {
    "closed-form": _closed_form,
    "from-decoder": _from_decoder,
}
