"""Whether a method can be batched over silos: tried once on a few records, and if not, the culprit is named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedloom.engines.batches import gathered
from fedloom.engines.fused_stack import Stack
from fedloom.engines.fused_step import Batching, WatchedContext, batched_losses, laid_out, matrix_precision
from fedloom.engines.optimizers import gradients_of_mean
from fedloom.engines.private_training import parameters_of
from fedloom.errors import FedloomError
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.outline import in_outline
from fedloom.sharing.plan import Tensors
from fedloom.streams import Streams

SILOS, ROWS = 2, 3


class UnsupportedError(FedloomError):
    """A method that the fused engine cannot run."""


@dataclass(frozen=True, eq=False)
class PhaseTrial:
    """What a trial of one phase showed."""

    __repr__ = in_outline

    terms: tuple[str, ...]
    gradients: Tensors  # of one silo, by parameter: their strides are how the weights should lie
    looked_at: frozenset[str]  # what of the round's context


def tried(stack: Stack, looped: bool = False) -> list[PhaseTrial]:
    """One trial for each phase; an exception that no batching survives is turned into a sentence."""
    with matrix_precision("float32"):
        return [_trial(stack, phase, looped) for phase in stack.kind.phases]


def _trial(stack: Stack, phase: Phase, looped: bool) -> PhaseTrial:
    device, records = stack.device, stack.sample(SILOS * ROWS)
    index = torch.arange(SILOS * ROWS, device=device).reshape(SILOS, ROWS) % len(records)
    columns = gathered(records, records.modality.decode, index, torch.ones(SILOS, ROWS, device=device))
    noise = {
        name: Streams(0)
        .normal(f"trial/{name}", SILOS * ROWS, math.prod(shape), device=device)
        .reshape(SILOS, ROWS, *shape)
        for name, shape in phase.objective.noise.items()
    }
    tensors = {**stack.model.state_dict(), **stack.constants[stack.members[0]]}
    state = {n: laid_out(t, SILOS).copy_(t.detach()) for n, t in tensors.items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    trained = list(parameters_of(phase, stack.model))
    leaves = {name: state[name].requires_grad_() for name in trained}
    context = WatchedContext(RoundContext(1, stack.kind.rounds, ()))
    batching = Batching(stack.model, lambda: cast("RoundContext", context), "float32", looped=looped)
    evaluate = batched_losses(batching, phase)
    with _culprit_named(stack.model):
        values, terms = evaluate(state, columns, noise, state)
        gradients = gradients_of_mean(values, columns["mask"], list(leaves.values()))
        padded, _ = evaluate(state, _last_row_padding(columns), noise, state)
        alone, _ = evaluate(state, _without_last_row(columns), _without_last_row(noise), state)
    _check_buffers(stack.model, before, state)
    if not torch.allclose(padded[:, : ROWS - 1], alone, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise UnsupportedError(
            f"in phase '{phase.name}' the loss of one example depends on others in its batch, even on padding"
        )
    if "participants" in context.read and len({member.run for member in stack.members}) > 1:
        raise UnsupportedError(f"phase '{phase.name}' looks at who takes part, which differs between packed runs")
    parts = {name: gradient[0] for name, gradient in zip(trained, gradients, strict=True)}
    return PhaseTrial(("loss", *terms), parts, frozenset(context.read))


def _last_row_padding(columns: Tensors) -> Tensors:
    mask = columns["mask"].clone()
    mask[:, -1] = 0.0
    return {**columns, "mask": mask}


def _without_last_row(columns: Tensors) -> Tensors:
    return {name: tensor[:, : ROWS - 1] for name, tensor in columns.items()}


def _check_buffers(model: nn.Module, before: Tensors, after: Tensors) -> None:
    for name, tensor in after.items():
        if not torch.equal(tensor, before[name]):
            module, _, buffer = name.rpartition(".")
            kind = type(model.get_submodule(module)).__name__
            raise UnsupportedError(f"module '{module}' ({kind}) changes its buffer '{buffer}' in place")


@contextmanager
def _culprit_named(model: nn.Module) -> Iterator[None]:
    """Turn whatever goes wrong into a sentence with the module in which it did."""
    entered: list[str] = []

    def enter(name: str) -> Any:
        return lambda *_: entered.append(name)

    def leave(*_: Any) -> None:
        entered.pop()

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # vmap reports what it cannot do by various exceptions
        name = entered[-1] if entered else ""
        where = f"module '{name}' ({type(model.get_submodule(name)).__name__})" if name else type(model).__name__
        raise UnsupportedError(f"{where} cannot be batched over silos: {_first_sentence(error)}") from error
    finally:
        for handle in handles:
            handle.remove()


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return (text.split(". ")[0] or type(error).__name__)[:200]


def finite_rows(tensors: list[Tensor]) -> Tensor:
    """For each silo of a stack whether all its numbers are finite."""
    flags = [torch.isfinite(tensor).unsqueeze(-1).flatten(1).all(dim=1) for tensor in tensors]
    return torch.stack(flags).all(dim=0)
