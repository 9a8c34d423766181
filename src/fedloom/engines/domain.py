"""Whether records lie where a silo's likelihood is of any use: ages are no coins, and training on them explodes."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from fedloom.errors import DataError
from fedloom.federation.records import Federation, Records
from fedloom.federation.rounds import Site
from fedloom.methods.base import Method, some_model
from fedloom.modalities.likelihoods import Likelihood
from fedloom.modalities.numbers import outside
from fedloom.models.vae import VAE

CHUNK = 8192  # records decoded at once


def check_domain(method: Method, federation: Federation) -> None:
    """Refuse records that the likelihood of their silo's model does not describe, before anything is trained.

    A server in a deployment has no records to look at, and a silo is never asked: its answer would tell of them.
    """
    likelihoods: dict[Hashable, Likelihood | None] = {}
    for silo in federation.known:
        site = Site(silo.name, silo.groups)
        kind = method.kind(site)
        if kind not in likelihoods:
            model = some_model(method, site)
            likelihoods[kind] = model.likelihood if isinstance(model, VAE) else None
        for table in (silo.train, silo.validation):
            _check(f"silo '{silo.name}' holds", table, likelihoods[kind])
    for likelihood in likelihoods.values():
        _check("the held-out records hold", federation.test, likelihood)


def _check(whose: str, records: Records | None, likelihood: Likelihood | None) -> None:
    if records is None or likelihood is None:
        return
    low, high = likelihood.bounds
    for x in torch.split(records.x, CHUNK):
        if strayed := outside(records.modality.decode(x), low, high):
            raise DataError(
                f"{whose} {strayed}, and the likelihood {type(likelihood).__name__} is for values in "
                f"[{low:g}, {high:g}]; scale each column to that first"
            )
