"""ALIGN-FL: silos keep their VAEs and send decoders; the server trains a model of its own on samples of them.

Gulati, Gross, Wunder: "ALIGN-FL: Architecture-independent Learning through Invariant Generative component sharing in
Federated Learning", CyberC 2025 (arXiv 2512.13316), algorithm 1. The silos' loss is equation 3: squared error plus KL
(``model.likelihood = "gaussian"``: the weights of equation 3 are an observation variance of 1/2; the authors' code
divides the KL by the number of latents, which is ``model.kl_weight = 1 / model.latent``).

Nothing is averaged and nothing comes down, so silos and server may have different networks (``model.silos``,
``server.model``). Its variants are settings, not methods:

    DP-SGD (equation 4)              privacy.mechanism = "dp-sgd"
    DP-SGD on the decoder alone      privacy.blocks = ["decoder"]: no DP guarantee
    a GAN in place of the VAE        method.name = "fedgan", sharing.scopes: generator upload, discriminator silo

The authors' code uploads the encoders as well and a mixture fitted to private latents; here neither leaves a silo
unless it is asked for (``server.latents``).
"""

from __future__ import annotations

from fedloom.methods.base import Method, NoOptions, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method
from fedloom.sharing.plan import SILO, UPLOAD


def make(setting: Setting, _: NoOptions) -> Method:
    """Encoder SILO, decoder SILO and sent up; distillation follows, because there is nothing to average."""
    return flat_vae_method("align_fl", setting, encoder=SILO, decoder=UPLOAD)


RECIPE = Recipe("align_fl", "decoders travel, the server trains its own VAE on their samples", NoOptions, make)
