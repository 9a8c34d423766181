"""FedVAE: one VAE, averaged whole over all participants, groups ignored.

The baseline of Hu, Ren, Deng, Xie, Ma: "FissionVAE: Federated Non-IID Image Generation with Latent Space and Decoder
Decomposition", IJCAI 2025 (arXiv 2408.17090), section 2.1; averaging after McMahan et al., "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017. Loss: -log p(x|z) + KL(q(z|x) || N(0, I)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedloom.methods.base import Method, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method
from fedloom.sharing.plan import GLOBAL


@dataclass(frozen=True, kw_only=True)
class FedVAEOptions:
    """``decoder_size = "branches"``: a control with the decoder as large as one branch for each group together."""

    decoder_size: Literal["single", "branches"] = "single"


def make(setting: Setting, options: FedVAEOptions) -> Method:
    """Encoder and decoder GLOBAL, one prior N(0, I) for all."""
    size = len(setting.groups) if options.decoder_size == "branches" else 1
    return flat_vae_method("fedvae", setting, encoder=GLOBAL, decoder=GLOBAL, decoder_size=size)


RECIPE = Recipe("fedvae", "one VAE averaged over everybody, groups ignored", FedVAEOptions, make)
