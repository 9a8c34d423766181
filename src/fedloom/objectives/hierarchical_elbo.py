"""The loss of the hierarchical FissionVAE (equations 2 and 3 of the paper, as corrected in its own derivation).

    L = NLL(x; z1) + NLL(x; z1_hat) + KL(q(z2|z1) || N(0,I)) + KL(q(z1|x) || p(z1|z2)) [+ KL(q(z1|x) || N(m_g, I))]

with z1 ~ q(z1|x), z2 ~ q(z2|z1), z1_hat ~ p(z1|z2). Printed equation 3 has "q(z1|z_x)" for q(z1|x) and a void
expectation around the first KL. The paper's consistency term is the analytic KL, which averages over a fresh z1: a
valid but looser bound. ``consistency = "sampled"`` uses the z1 at hand, log q(z1|x) - log p(z1|z2), and makes the
first, third and fourth terms the exact one-sample evidence bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedloom.models.gaussian import kl_divergence, kl_to_unit
from fedloom.models.vae import HierarchicalVAE
from fedloom.objectives.base import Losses, Step
from fedloom.objectives.ssim import dissimilarity


@dataclass(frozen=True)
class HierarchicalElbo:
    """Five terms of weight 1, three of them optional, and an SSIM term of any weight."""

    latent: int
    top_latent: int
    predefined_prior: bool  # else the prior of z1 is learned: p(z1 | z2), and the last term drops out
    consistency: Literal["analytic", "sampled"] = "analytic"
    second_reconstruction: bool = True
    ssim_weight: float = 0.0

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """One draw for each of z1, z2 and z1_hat."""
        return {"z1": (self.latent,), "z2": (self.top_latent,), "z1_hat": (self.latent,)}

    def __call__(self, model: nn.Module, step: Step) -> Losses:
        """The loss for each example."""
        assert isinstance(model, HierarchicalVAE)
        batch = step.batch
        posterior = model.encode(batch.x, batch.group)
        z1 = posterior.sample(step.noise["z1"])
        top_posterior = model.encode_top(z1, batch.group)
        z2 = top_posterior.sample(step.noise["z2"])
        conditional = model.decode_top(z2, batch.group)
        output = model.decode(z1, batch.group)

        terms = {
            "nll": model.likelihood.negative_log(batch.x, output),
            "kl_top": kl_to_unit(top_posterior, z2.new_zeros(())),
            "consistency": (
                kl_divergence(posterior, conditional)
                if self.consistency == "analytic"
                else posterior.log_density(z1) - conditional.log_density(z1)
            ),
        }
        if self.second_reconstruction:
            through_top = model.decode(conditional.sample(step.noise["z1_hat"]), batch.group)
            terms["nll_top"] = model.likelihood.negative_log(batch.x, through_top)
        if self.predefined_prior:
            terms["kl"] = kl_to_unit(posterior, model.prior_mean(batch.group))
        if self.ssim_weight:
            terms["ssim"] = self.ssim_weight * dissimilarity(batch.x, model.likelihood.mean(output))
        total = terms["nll"] + terms["kl_top"] + terms["consistency"]
        for name in ("nll_top", "kl", "ssim"):
            total = total + terms[name] if name in terms else total
        return Losses(total, terms)
