"""Moves in fewer bytes: how far a silo's weights went from what came down, rounded, as codes that all read alike.

``bfloat16`` keeps 8 bits of each number, so an error is at most 1/256 of it. ``int8`` keeps whole numbers of steps, the
step of a tensor being its largest move divided by 127, so an error is at most half a step. What rounding left out stays
at the silo and is added to its next move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedloom.errors import FedloomError

Compression = Literal["none", "bfloat16", "int8"]

STEPS = 127  # the largest whole number of steps
STEP = "/step"  # behind a tensor's name: the step of its whole numbers
TINY = torch.finfo(torch.float32).tiny  # of a tensor that did not move


@dataclass(frozen=True)
class Compressed:
    """Which blocks travel so, and how."""

    compression: Compression = "none"
    blocks: tuple[str, ...] = ()

    def names(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Of those in a model, by their names there, the tensors that have codes."""
        begin = tuple(f"{block}." for block in self.blocks)
        return [name for name, tensor in tensors.items() if name.startswith(begin) and is_compressed(tensor)]


UNCOMPRESSED = Compressed()


def is_compressed(tensor: Tensor) -> bool:
    """Whether a tensor travels in fewer bytes: counters stay whole, and a single number would gain nothing."""
    return tensor.dtype == torch.float32 and tensor.numel() > 1


def coded(compression: Compression, moves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Codes of stacked moves, of each silo by itself; what is not finite does not become so by this."""
    if compression == "bfloat16":
        return {name: move.to(torch.bfloat16) for name, move in moves.items()}
    found = {}
    for name, move in moves.items():
        step = (move.reshape(len(move), -1).abs().amax(dim=1) / STEPS).clamp_min(TINY)
        found[name] = (move / _beside(step, move)).round().to(torch.int8)
        found[name + STEP] = step
    return found


def decoded(codes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moves that codes stand for, of one silo or of a stack."""
    moves = {name: code.to(torch.float32) for name, code in codes.items() if not name.endswith(STEP)}
    steps = {name: codes.get(name + STEP) for name in moves}
    return {n: move if (step := steps[n]) is None else move * _beside(step, move) for n, move in moves.items()}


def moved(
    compression: Compression, origin: Mapping[str, Tensor], came: Mapping[str, Tensor], form: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of a block that travelled so from ``origin``; raises unless it is codes of a block of this form."""
    check_codes(compression, came, form)
    codes = {name: tensor for name, tensor in came.items() if is_compressed(form[name.removesuffix(STEP)])}
    landed = {name: origin[name] + move for name, move in decoded(codes).items()}
    return {name: landed.get(name, came[name]) for name in form}


def check_codes(compression: Compression, came: Mapping[str, Tensor], form: Mapping[str, Tensor]) -> None:
    """Raise unless a block travels as its form says: by names, shapes and dtypes."""
    expected = {}
    for name, tensor in form.items():
        code = torch.bfloat16 if compression == "bfloat16" else torch.int8
        expected[name] = (code if is_compressed(tensor) else tensor.dtype, tensor.shape)
        if compression == "int8" and is_compressed(tensor):
            expected[name + STEP] = (torch.float32, torch.Size())
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in came.items()}
    if strange := sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)):
        raise FedloomError(f"'{strange[0]}' does not travel as sharing.compression = '{compression}' says")


def _beside(step: Tensor, move: Tensor) -> Tensor:
    return step.reshape(step.shape + (1,) * (move.dim() - step.dim()))
