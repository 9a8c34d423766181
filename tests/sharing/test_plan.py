from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.sharing.plan import GLOBAL, GROUP, SERVER, SILO, UPLOAD, BlockKey, SharingPlan

PLAN = SharingPlan({"encoder": GLOBAL, "decoder": GROUP, "head": SILO, "critic": UPLOAD}, ("a", "b", "c"))


def state_of(*names: str) -> dict[str, Tensor]:
    return {name: torch.tensor(float(number)) for number, name in enumerate(names)}


def test_split_names_the_owner_of_each_block() -> None:
    state = state_of("encoder.w", "decoder.w", "decoder.b", "head.w", "critic.w")
    assert PLAN.split(state, Site("north", (1,))) == {
        BlockKey("encoder", "all"): {"w": state["encoder.w"]},
        BlockKey("decoder", "group=b"): {"w": state["decoder.w"], "b": state["decoder.b"]},
        BlockKey("head", "silo=north"): {"w": state["head.w"]},
        BlockKey("critic", "silo=north"): {"w": state["critic.w"]},
    }


def test_split_finds_each_groups_branch_at_a_site_of_several_groups() -> None:
    state = state_of("encoder.w", "decoder.branches.0.w", "decoder.branches.2.w", "head.w", "critic.w")
    parts = PLAN.split(state, Site("north", (0, 2)))
    assert parts[BlockKey("decoder", "group=a")] == {"w": state["decoder.branches.0.w"]}
    assert parts[BlockKey("decoder", "group=c")] == {"w": state["decoder.branches.2.w"]}
    assert BlockKey("decoder", "group=b") not in parts


@pytest.mark.parametrize(
    ("groups", "decoder"),
    [((1,), ["decoder.w"]), ((0, 2), ["decoder.branches.0.w", "decoder.branches.2.layers.0.w"])],
)
def test_join_is_the_inverse_of_split(groups: tuple[int, ...], decoder: list[str]) -> None:
    state, site = state_of("encoder.w", "encoder.layers.0.b", "head.w", "critic.w", *decoder), Site("north", groups)
    parts = PLAN.split(state, site)
    assert PLAN.join(parts, site) == state
    assert PLAN.split(PLAN.join(parts, site), site) == parts


def test_join_takes_the_copies_of_the_site_and_no_others() -> None:
    parts = {BlockKey("decoder", f"group={g}"): {"w": torch.tensor(float(n))} for n, g in enumerate("abc")}
    assert PLAN.join(parts, Site("server", (2,))) == {"decoder.w": torch.tensor(2.0)}


def test_a_block_whose_name_begins_like_another_is_not_mixed_up_with_it() -> None:
    plan = SharingPlan({"decoder": GLOBAL, "decoder_top": GLOBAL}, ("a",))
    parts = plan.split(state_of("decoder.w", "decoder_top.w"), Site("north", (0,)))
    assert [sorted(part) for part in parts.values()] == [["w"], ["w"]]


def test_scopes_can_be_overridden_block_by_block() -> None:
    changed = PLAN.with_scopes({"encoder": "silo", "head": "upload", "critic": "group", "decoder": "global"})
    assert changed.blocks == {"encoder": SILO, "decoder": GLOBAL, "head": UPLOAD, "critic": GROUP}
    assert PLAN.blocks["encoder"] is GLOBAL


@pytest.mark.parametrize(
    ("scopes", "complaint"),
    [
        ({"encodr": "silo"}, r"sharing.scopes: unknown block 'encodr'; did you mean 'encoder'\?"),
        ({"encoder": "sillo"}, r"sharing.scopes.encoder: unknown scope 'sillo'; did you mean 'silo'\?"),
        ({"encoder": "server"}, r"sharing.scopes.encoder: unknown scope 'server'"),
    ],
)
def test_mistakes_in_scopes_are_named(scopes: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PLAN.with_scopes(scopes)


def test_the_servers_own_block_has_the_server_as_its_owner() -> None:
    plan = SharingPlan({"generator": SERVER}, ("a", "b"))
    assert plan.prefixes("generator", Site("north", (0, 1))) == {"generator.": BlockKey("generator", "server")}


@pytest.mark.parametrize("owner", ["all", "group=a@b/c", "silo=north"])
def test_keys_read_back_what_they_print(owner: str) -> None:
    assert BlockKey.of(str(BlockKey("decoder", owner))) == BlockKey("decoder", owner)
