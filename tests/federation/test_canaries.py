from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest

from fedloom.config import AuditConfig
from fedloom.errors import FedloomError
from fedloom.federation.building import build_federation
from fedloom.federation.canaries import canary_coins, with_canaries
from fedloom.federation.records import Federation, Records, Silo
from fedloom.streams import Streams
from support import tiny_config

FOUR = ("mnist-0", "mnist-1", "fashion-mnist-0", "fashion-mnist-1")


@pytest.fixture
def plain() -> Federation:
    return build_federation(tiny_config().data, Streams(0))


def planted(federation: Federation, seed: int = 0, **settings: object) -> Federation:
    return with_canaries(federation, AuditConfig(**settings), Streams(seed))  # type: ignore[arg-type]


def test_coins_are_fair_and_depend_on_seed_and_silo() -> None:
    coins = canary_coins(Streams(1), 4000)
    assert torch.equal(coins, canary_coins(Streams(1), 4000))
    assert binomtest(int(coins.sum()), 4000).pvalue > 0.001
    for other in (canary_coins(Streams(2), 4000), canary_coins(Streams(1), 4000, silo=1)):
        assert binomtest(int((coins == other).sum()), 4000).pvalue > 0.001


@pytest.mark.parametrize("kind", ["noise", "held-out"])
def test_those_whose_coin_says_so_are_trained_on_and_the_others_are_nowhere(plain: Federation, kind: str) -> None:
    federation = planted(plain, canaries=41, kind=kind)
    assert [found.silo for found in federation.canaries] == list(FOUR)
    assert [len(found.records) for found in federation.canaries] == [11, 10, 10, 10]
    assert planted(plain, canaries=41, kind=kind).digest == federation.digest
    for silo, before, found in zip(federation.silos, plain.silos, federation.canaries, strict=True):
        assert torch.equal(silo.train.x[:40], before.train.x)
        assert torch.equal(silo.train.x[40:], found.records.x[found.included])
        assert set(found.records.group.tolist()) == set(before.groups)
        everything = torch.cat([silo.train.x, federation.test.x]).flatten(1)
        for canary, included in zip(found.records.x.flatten(1), found.included.tolist(), strict=True):
            assert bool((everything == canary).all(dim=1).any()) == included
    assert len(federation.test) == len(plain.test) - (41 if kind == "held-out" else 0)


def test_noise_is_the_least_or_the_largest_value_by_a_coin() -> None:
    x = 2 + 3 * torch.rand(50, 40, generator=torch.Generator().manual_seed(0))
    zeros = torch.zeros(50, dtype=torch.int64)
    records = Records(x, zeros, zeros, subject=torch.arange(50), attributes=torch.ones(50, 2))
    federation = planted(Federation("one", (Silo("one", records),), records, ("all",)), canaries=200)
    values = federation.canaries[0].records.x
    assert set(values.flatten().tolist()) == {x.min().item(), x.max().item()}
    assert binomtest(int((values == x.max()).sum()), values.numel()).pvalue > 0.001
    trained = federation.silos[0].train
    assert trained.attributes is not None
    assert trained.subject is not None
    assert len(torch.unique(trained.subject)) == len(trained), "each canary is a subject of its own"


def test_chosen_silos_alone_get_canaries_and_none_by_default(plain: Federation) -> None:
    federation = planted(plain, canaries=20, silos=("mnist-1",))
    assert [len(silo) > 40 for silo in federation.silos] == [False, True, False, False]
    assert planted(plain) is plain


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"canaries": 4, "silos": ("mnist-9",)}, "audit.silos: unknown silo 'mnist-9'"),
        ({"canaries": 7}, "audit.canaries = 7 must be at least 2 for each of the 4 silos"),
        (
            {"canaries": 1000, "kind": "held-out", "silos": ("mnist-0",)},
            "asks for 1000 held-out records for silo 'mnist-0', but of its groups only 1000 are left",
        ),
    ],
)
def test_mistakes_are_named(plain: Federation, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedloomError, match=sentence):
        planted(plain, **settings)
