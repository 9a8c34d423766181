"""Separate VAEs for the groups: encoder and decoder both merged inside the group, nothing shared across groups.

A control that Hu et al. ("FissionVAE", IJCAI 2025, arXiv 2408.17090) lack: it tells what +D's shared encoder is worth.
Its loss is FedVAE's, -log p(x|z) + KL(q(z|x) || N(0, I)) (section 2.1); only the scope of the blocks differs.
"""

from __future__ import annotations

from fedloom.methods.base import Method, NoOptions, Recipe, Setting
from fedloom.methods.vaes import flat_vae_method
from fedloom.sharing.plan import GROUP


def make(setting: Setting, _: NoOptions) -> Method:
    """Encoder and decoder GROUP, prior N(0, I)."""
    return flat_vae_method("group_vaes", setting, encoder=GROUP, decoder=GROUP)


RECIPE = Recipe("group_vaes", "control: a VAE for each group, nothing shared across groups", NoOptions, make)
