"""DP-CVAE: a conditional VAE on embeddings, encoders at home, the decoder averaged, trained under DP-SGD.

Di Salvo, Nguyen, Ledig: "Embedding-Based Federated Data Sharing via Differentially Private Conditional VAEs", MICCAI
2025 (arXiv 2507.02671). Equation 1: squared error + KL(q(z|x,y) || N(0, I)); equation 2: the decoder's mean weighted
by records; equation 3: z ~ N(0, I), y ~ classes, x = decoder(z, y). Noise on all gradients of encoder and decoder
jointly, because the decoder's depend on the encoder. Three linear layers are ``model.hidden`` of two widths. The
latent variance learned for all or for each class, and labels that follow noisy counts, answer its open questions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor, nn

from fedloom.config import at_least
from fedloom.errors import FedloomWarning
from fedloom.federation.rounds import Site
from fedloom.methods.base import Mean, Method, OptimizerPlan, Pathway, Phase, Recipe, Setting
from fedloom.methods.labels import Labels, require_vectors, with_labels
from fedloom.models.labelled import ConditionalVAE, TellingDecoder, Told
from fedloom.objectives.labelled import ConditionalElbo
from fedloom.sharing.plan import GLOBAL, SILO, SharingPlan

COLLAPSE = (
    "method.loss = 'reference' sums the divergence over the batch beside a squared error's mean over dimensions, as "
    "the authors' code does: the latent then carries nothing, and samples of a class are all alike"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """``variance`` is that of a decoded number; 0 is 1 / (2 d), half that of vectors of length 1."""

    loss: Literal["bound", "reference"] = "bound"
    prior_variance: Literal["unit", "learned", "class"] = "unit"
    variance: float = field(default=0.0, metadata=at_least(0))
    labels: Labels = "global-dp"


def build(setting: Setting, options: Options, _: Site) -> ConditionalVAE:
    """Fresh weights."""
    model, width, classes = setting.config.model, setting.shape[0], len(setting.classes)
    scales = {"unit": 0, "learned": 1, "class": classes}[options.prior_variance]
    encoder = Told(width, model.hidden, 2 * model.latent, classes)
    decoder = TellingDecoder(model.latent, model.hidden[::-1], width, classes, scales)
    return ConditionalVAE(encoder, decoder, model.latent, options.variance or 0.5 / width)


def from_latent(model: nn.Module, noise: Mapping[str, Tensor], _: Tensor, label: Tensor) -> Tensor:
    """z ~ p(z|y), then the decoder's mean."""
    assert isinstance(model, ConditionalVAE)
    return model.decode(model.prior(label).sample(noise["z"]), label)


def from_likelihood(model: nn.Module, noise: Mapping[str, Tensor], group: Tensor, label: Tensor) -> Tensor:
    """z ~ p(z|y), then x ~ p(x|z,y)."""
    assert isinstance(model, ConditionalVAE)
    return from_latent(model, noise, group, label) + math.sqrt(model.variance) * noise["x"]


def make(setting: Setting, options: Options) -> Method:
    """Encoder SILO, decoder GLOBAL, one phase."""
    width, model, local = require_vectors(setting, "dp_cvae"), setting.config.model, setting.config.local
    if options.loss == "reference":
        warnings.warn(COLLAPSE, FedloomWarning, stacklevel=2)
    plan = SharingPlan({"encoder": SILO, "decoder": GLOBAL}, setting.groups).with_scopes(setting.config.sharing.scopes)
    reference = local.batch_size if options.loss == "reference" else 0
    objective = ConditionalElbo(model.latent, model.kl_weight, reference)
    latent, whole = {"z": (model.latent,)}, {"z": (model.latent,), "x": (width,)}
    method = Method(
        name="dp_cvae",
        plan=plan,
        build=partial(build, setting, options),
        phases=(Phase("cvae", ("encoder", "decoder"), objective, OptimizerPlan.of(local)),),
        server_step=Mean(plan, setting.config.sharing.weights),
        pathways={
            "z": Pathway(latent, from_latent, "z ~ p(z|y) -> mean of x", ("decoder",), labelled=True),
            "x": Pathway(whole, from_likelihood, "z ~ p(z|y) -> x ~ p(x|z,y)", ("decoder",), labelled=True),
        },
    )
    return with_labels(method, setting, options.labels)


RECIPE = Recipe(
    "dp_cvae", "a conditional VAE on embeddings: encoders at home, the decoder averaged", Options, make, vectors=True
)
