"""What a recorded program is fed lies in the order in which it was drawn: only a GPU would notice otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from engines.one_answer import CONVOLUTIONS, config_of, image_federation
from fedloom.engines.fused_poisson import PrivateSchedule, private_buffers, rows_of_members
from fedloom.engines.fused_stack import stacks_of
from fedloom.experiment import Experiment


@pytest.mark.parametrize("method", ["align_fl", "fedgan", "moon"])
def test_buffers_have_the_shapes_of_windows_leaf_by_leaf(method: str) -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1.0", "privacy.noise=test", "local.batch_size=4")
    federation = image_federation({"a0": 12, "b0": 9})
    trainer = Experiment.of(config_of(f"method.name={method}", CONVOLUTIONS, *private), federation).trainer
    (stack,) = stacks_of((trainer,), torch.device("cpu"))
    rows = rows_of_members(stack.members)
    secrets = [member.trainer.seeded for member in stack.members]
    window = next(PrivateSchedule(stack, rows, stack.members, secrets, 1).windows(2))
    assert window.usual
    buffers = private_buffers(stack.kind, len(window), 2, max(rows.values()), torch.device("cpu"))
    shapes = [[(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(tree)] for tree in (window.inputs, buffers)]
    assert shapes[0] == shapes[1]
