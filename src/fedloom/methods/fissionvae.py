"""FissionVAE: one encoder for all; for each group a prior of its own (+L), a decoder of its own (+D); two levels (+H).

Hu, Ren, Deng, Xie, Ma: "FissionVAE: Federated Non-IID Image Generation with Latent Space and Decoder Decomposition",
IJCAI 2025 (arXiv 2408.17090). +L: equation 1, KL(q(z|x) || N(m_g, I)), section 2.2. +D: decoder branches merged inside
their group, section 2.3. +H: equations 2 and 3, encoders GLOBAL, both decoder modules GROUP.

    FedVAE   prior identical   decoder global        +D     prior identical   decoder group
    +L       prior m_g         decoder global        +L+D   prior m_g         decoder group        +H   hierarchy

The printed equation 1 writes sigma where it must mean the variance; the exact form is used here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedloom.errors import ConfigError
from fedloom.methods.base import Method, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method, hierarchical_pathways, vae_method
from fedloom.models.priors import LEARNABLE, prior_means
from fedloom.objectives.hierarchical_elbo import HierarchicalElbo
from fedloom.settings import at_least
from fedloom.sharing.plan import GLOBAL, GROUP


@dataclass(frozen=True, kw_only=True)
class FissionVAEOptions:
    """+L is any prior but ``identical``; +D is ``decoder = "group"``; +H is ``hierarchy = true``."""

    prior: str = "identical"
    decoder: Literal["group", "global"] = "group"
    hierarchy: bool = False
    # The rest applies to the hierarchy only.
    consistency: Literal["analytic", "sampled"] = "analytic"
    second_reconstruction: bool = True
    ssim_weight: float = field(default=0.0, metadata=at_least(0))


def make(setting: Setting, options: FissionVAEOptions) -> Method:
    """Encoders GLOBAL; decoders GROUP (+D) or GLOBAL."""
    model, decoder = setting.config.model, GROUP if options.decoder == "group" else GLOBAL
    learnable = options.prior == LEARNABLE
    if not options.hierarchy:
        if learnable:
            raise ConfigError(
                f"method.prior = '{LEARNABLE}' needs method.hierarchy = true: p(z1|z2) is what is learned"
            )
        return flat_vae_method("fissionvae", setting, encoder=GLOBAL, decoder=decoder, prior=options.prior)
    if options.ssim_weight and not setting.modality.is_picture:
        raise ConfigError(f"method.ssim_weight needs images; these records are {setting.modality.plural}")
    return vae_method(
        "fissionvae",
        setting,
        {"encoder": GLOBAL, "decoder": decoder, "top_encoder": GLOBAL, "top_decoder": decoder},
        prior_means(options.prior, len(setting.groups), model.latent, setting.streams),
        HierarchicalElbo(
            model.latent,
            model.top_latent,
            predefined_prior=not learnable,
            consistency=options.consistency,
            second_reconstruction=options.second_reconstruction,
            ssim_weight=options.ssim_weight,
        ),
        hierarchical_pathways(model.latent, model.top_latent, predefined_prior=not learnable),
    )


RECIPE = Recipe(
    "fissionvae", "group priors (+L), group decoders (+D), two levels (+H), in any combination", FissionVAEOptions, make
)
