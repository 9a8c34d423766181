"""Groups dealt among silos at random: who holds what stays, who is said to belong where does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.one_answer import MIXED, UNEQUAL, image_federation
from fedloom.config import DataConfig
from fedloom.errors import ConfigError
from fedloom.federation.building import build_federation
from fedloom.federation.group_names import with_permuted_groups
from fedloom.streams import Streams

MANY = image_federation({f"{'ab'[number % 2]}{number}": 4 for number in range(40)})


def test_records_stay_and_groups_are_dealt() -> None:
    permuted = with_permuted_groups(MANY, Streams(0))
    for before, after in zip(MANY.silos, permuted.silos, strict=True):
        assert after.name == before.name
        assert torch.equal(after.train.x, before.train.x)
        assert len(after.groups) == 1
    groups = [silo.groups[0] for silo in permuted.silos]
    assert sorted(groups) == sorted(silo.groups[0] for silo in MANY.silos)
    strangers = sum(a != b.groups[0] for a, b in zip(groups, MANY.silos, strict=True))
    assert 10 <= strangers <= 30  # 20 expected of 40; a draw beyond that happens once in thousands


def test_the_draw_is_the_seeds() -> None:
    def dealt(seed: int) -> list[int]:
        return [silo.groups[0] for silo in with_permuted_groups(MANY, Streams(seed)).silos]

    assert dealt(1) == dealt(1) != dealt(2)


def test_silos_of_several_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="'m0' holds records of 2"):
        with_permuted_groups(MIXED, Streams(0))
    assert with_permuted_groups(UNEQUAL, Streams(0)).groups == UNEQUAL.groups


def test_a_configuration_asks_for_it() -> None:
    plain = DataConfig(silos=6)
    own, dealt = (build_federation(config, Streams(0)) for config in (plain, replace(plain, groups="permuted")))
    assert [silo.groups for silo in own.silos] != [silo.groups for silo in dealt.silos]
    assert torch.equal(own.test.group, dealt.test.group)
