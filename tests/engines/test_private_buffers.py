"""What a recorded program is fed lies in the order in which it was drawn: only a GPU would notice otherwise."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_leaves

from engines.one_answer import CONVOLUTIONS, config_of, image_federation
from fedloom.engines.fused_private import PrivateProgram, probed
from fedloom.engines.fused_stack import stacks_of
from fedloom.engines.fused_support import tried
from fedloom.experiment import Experiment
from fedloom.federation.rounds import RoundContext


@pytest.mark.parametrize("method", ["align_fl", "fedgan", "moon"])
def test_buffers_have_the_shapes_of_windows_leaf_by_leaf(method: str) -> None:
    private = ("privacy.mechanism=dp-sgd", "privacy.noise_multiplier=1.0", "privacy.noise=test", "local.batch_size=4")
    federation = image_federation({"a0": 12, "b0": 9})
    trainer = Experiment.of(config_of(f"method.name={method}", CONVOLUTIONS, *private), federation).trainer
    (stack,) = stacks_of((trainer,), torch.device("cpu"))
    probes = [probed(stack, phase) for phase in stack.kind.phases]
    program = PrivateProgram(stack, 2, tried(stack), "float32", False, probes, host_noise=True)
    program.begin(RoundContext(1, 1, (0, 1)), [member.trainer.seeded for member in stack.members])
    window = next(program.schedule(stack.members).windows(2))
    assert window.usual
    buffers = program.buffers(len(window))
    shapes = [[(tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves(tree)] for tree in (window.inputs, buffers)]
    assert shapes[0] == shapes[1]
