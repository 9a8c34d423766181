"""DP-CVAE: a conditional VAE on embeddings, encoders at home, the decoder averaged, trained under DP-SGD.

Di Salvo, Nguyen, Ledig: "Embedding-Based Federated Data Sharing via Differentially Private Conditional VAEs", MICCAI
2025 (arXiv 2507.02671). Equation 1: squared error + KL(q(z|x,y) || N(0, I)); equation 2: the decoder's mean weighted
by records; equation 3: z ~ N(0, I), y ~ classes, x = decoder(z, y). Noise on all gradients of encoder and decoder
jointly, because the decoder's depend on the encoder. Three linear layers are ``model.hidden`` of two widths. The
latent variance learned for all or for each class, and labels that follow noisy counts, answer its open questions.
With ``model.posterior`` other than "amortised" no encoder learns from records (:mod:`fedloom.methods.posteriors`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from fedloom.errors import ConfigError, FedloomWarning
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, OptimizerRule, Phase, Recipe, Setting
from fedloom.methods.conditional_pathways import conditional_pathways
from fedloom.methods.labels import VECTORS, LabelOptions, require_classes, with_labels
from fedloom.methods.steps import Merged
from fedloom.models.labelled import ConditionalVAE, LinearConditionalVAE, TellingDecoder, Told
from fedloom.objectives.labelled import ConditionalDreams, ConditionalElbo
from fedloom.settings import at_least
from fedloom.sharing.plan import GLOBAL, SILO, SharingPlan

COLLAPSE = (
    "method.loss = 'reference' sums the divergence over the batch beside a squared error's mean over dimensions, as "
    "the authors' code does: the latent then carries nothing, and samples of a class are all alike"
)


@dataclass(frozen=True, kw_only=True)
class DPCVAEOptions(LabelOptions):
    """``variance`` is that of a decoded number; 0 is 1 / (2 d), half that of vectors of length 1."""

    loss: Literal["bound", "reference"] = "bound"
    prior_variance: Literal["unit", "learned", "class"] = "unit"
    variance: float = field(default=0.0, metadata=at_least(0))


def build(setting: Setting, options: DPCVAEOptions, _: Site) -> ConditionalVAE:
    """Encoder, decoder and prior with fresh weights."""
    model, width, classes = setting.config.model, setting.shape[0], len(setting.classes)
    scales = {"unit": 0, "learned": 1, "class": classes}[options.prior_variance]
    decoder = TellingDecoder(model.latent, model.hidden[::-1], width, classes, scales)
    variance = options.variance or 0.5 / width
    if model.posterior == "closed-form":
        return LinearConditionalVAE(decoder, model.latent, variance)
    encoder = Told(width, model.hidden, 2 * model.latent, classes)
    return ConditionalVAE(encoder, decoder, model.latent, variance)


def amortised(setting: Setting, options: DPCVAEOptions) -> tuple[Phase, ...]:
    """Encoder and decoder learn together."""
    model, local = setting.config.model, setting.config.local
    reference = local.batch_size if options.loss == "reference" else 0
    bound = ConditionalElbo(model.latent, model.kl_weight, reference)
    return (Phase("cvae", ("encoder", "decoder"), bound, OptimizerRule.of(local)),)


def from_decoder(setting: Setting, options: DPCVAEOptions) -> tuple[Phase, ...]:
    """The encoder learns from samples of the decoder, then the decoder from records."""
    (phase,) = amortised(setting, options)
    dreams = ConditionalDreams(setting.config.model.latent, setting.shape[0], len(setting.classes))
    encoder = Phase("encoder", ("encoder",), dreams, phase.optimizer, touches_records=False)
    return (encoder, Phase("decoder", ("decoder",), phase.objective, phase.optimizer))


def closed_form(setting: Setting, options: DPCVAEOptions) -> tuple[Phase, ...]:
    """A linear decoder learns alone, from the best latents that independent ones can be."""
    model = setting.config.model
    if model.hidden or model.kl_weight != 1 or options.loss != "bound" or options.prior_variance != "unit":
        raise ConfigError(
            "model.posterior = 'closed-form' of method 'dp_cvae' needs model.hidden = [], model.kl_weight = 1, "
            "method.loss = 'bound' and method.prior_variance = 'unit'"
        )
    (phase,) = amortised(setting, options)
    return (Phase("decoder", ("decoder",), phase.objective, phase.optimizer),)


PHASES: dict[str, Callable[[Setting, DPCVAEOptions], tuple[Phase, ...]]] = {
    "amortised": amortised,
    "from-decoder": from_decoder,
    "closed-form": closed_form,
}


def make(setting: Setting, options: DPCVAEOptions) -> Method:
    """Encoder SILO, where there is one, and decoder GLOBAL."""
    require_classes(setting, "dp_cvae")
    width, model = setting.shape[0], setting.config.model
    if options.loss == "reference":
        warnings.warn(COLLAPSE, FedloomWarning, stacklevel=2)
    blocks = {"decoder": GLOBAL} if model.posterior == "closed-form" else {"encoder": SILO, "decoder": GLOBAL}
    plan = SharingPlan(blocks, setting.groups).with_scopes(setting.config.sharing.scopes)
    method = Method(
        name="dp_cvae",
        plan=plan,
        build=partial(build, setting, options),
        phases=PHASES[model.posterior](setting, options),
        server_step=Merged(),
        pathways=conditional_pathways(model.latent, width),
        own_posterior=True,
    )
    return with_labels(method, setting, options)


RECIPE = Recipe(
    "dp_cvae", "a conditional VAE on embeddings: encoders at home, the decoder averaged", DPCVAEOptions, make, VECTORS
)
