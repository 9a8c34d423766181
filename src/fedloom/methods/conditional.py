"""One decoder for all that is told the group: the conditional control for decoder branches.

Hu et al. ("FissionVAE", IJCAI 2025, arXiv 2408.17090) give every group a decoder and compare with one decoder that
knows nothing of groups (section 2.1 against 2.3). Here the single decoder gets the group as a one-hot input, after
Sohn, Lee, Yan, "Learning Structured Output Representation using Deep Conditional Generative Models", NeurIPS 2015.
"""

from __future__ import annotations

from fedloom.methods.base import Method, NoOptions, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method
from fedloom.sharing.plan import GLOBAL


def make(setting: Setting, _: NoOptions) -> Method:
    """Encoder and decoder GLOBAL, prior N(0, I), the decoder conditioned on the group."""
    return flat_vae_method("conditional", setting, encoder=GLOBAL, decoder=GLOBAL, told_group=True)


RECIPE = Recipe("conditional", "control: one decoder that is told the group", NoOptions, make)
