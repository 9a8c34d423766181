"""What is kept and sent has the names and bytes that older runs and other silos know it by."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from fedloom.config import Config
from fedloom.engines.base import FederationState
from fedloom.errors import FedloomError
from fedloom.experiment.states import checkpoint_of, server_state
from fedloom.methods.steps import ServerState
from fedloom.sharing.codec import flat, packed, parts, placed, under, unpacked
from fedloom.sharing.plan import BlockKey
from support import equal_bits, federation_of

ONE, TWO = torch.tensor([1.0, 2.0]), torch.arange(6).reshape(2, 3)
BLOCKS = {
    BlockKey("decoder", "before-1/silo=a/all"): {"layers.0.weight": ONE, "count": TWO},
    BlockKey("encoder", "group=b"): {"layers.0.weight": TWO},
}


def test_parts_come_back_under_their_keys() -> None:
    table = flat("blocks/", BLOCKS) | placed("memory/", {"round/a": ONE})
    assert list(table) == [
        "blocks/decoder@before-1/silo=a/all/layers.0.weight",
        "blocks/decoder@before-1/silo=a/all/count",
        "blocks/encoder@group=b/layers.0.weight",
        "memory/round/a",
    ]
    back = unpacked(packed(table), "a table")
    found = parts("blocks/", back, BlockKey.of)
    assert found.keys() == BLOCKS.keys()
    assert all(equal_bits(found[key], BLOCKS[key]) for key in BLOCKS)
    assert equal_bits(under("memory/", back), {"round/a": ONE})


def test_bytes_are_safetensors_whatever_the_layout_in_memory() -> None:
    assert packed({"w": TWO.T}) == save({"w": TWO.T.contiguous()})
    assert torch.equal(unpacked(packed({"w": TWO.T}), "w")["w"], TWO.T)


def test_what_is_no_table_is_named() -> None:
    with pytest.raises(FedloomError, match="'decoder@all' is not a table of tensors: "):
        unpacked(b"nothing of the kind", "decoder@all")


def test_a_checkpoint_holds_the_server_under_the_names_of_older_ones() -> None:
    """A run that an earlier version began goes on from these."""
    server = ServerState(
        {BlockKey("decoder", "all"): {"w": ONE}}, {"round/a": TWO}, {BlockKey("decoder", "all"): {"w": TWO}}
    )
    checkpoint = checkpoint_of(Config(), federation_of([0, 0]), FederationState(1, server, {}), (0,))
    assert equal_bits(
        checkpoint.server, {"blocks/decoder@all/w": ONE, "averages/decoder@all/w": TWO, "memory/round/a": TWO}
    )
    back = server_state(checkpoint)
    assert (back.blocks, back.memory, back.averages) == (server.blocks, server.memory, server.averages)
