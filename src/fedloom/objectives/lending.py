"""Objectives as pure functions of weights, which are lent to a model for one call, and of the columns of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_map

from fedloom.federation.records import Batch
from fedloom.objectives.base import Losses, Objective, Step

Columns = Mapping[str, Tensor]


class Lending(nn.Module):
    """Lets an objective see a model with other weights than its own."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, step: Step) -> Losses:
        """The losses of a step."""
        return self.objective(self.model, step)

    def losses(self, weights: Columns, step: Step) -> Losses:
        """The losses with these weights, by their names in the model; those not named are its own."""
        lent = {f"model.{name}": tensor for name, tensor in weights.items()}
        losses: Losses = functional_call(self, lent, (step,))
        return losses

    def gradients(self, trained: Columns, others: Columns, step: Step) -> dict[str, Tensor]:
        """Every example's gradient with respect to the trained weights, (rows, *shape)."""

        def losses(weights: Columns, row: tuple[Columns, Columns]) -> Tensor:
            columns, noise = row
            lone = Step(batch_of_columns(columns), noise, step.received, step.context)
            return self.losses({**others, **weights}, lone).total

        return lone_gradients(losses, trained, (columns_of(step.batch), dict(step.noise)))


def lone_gradients(losses: Callable[[Columns, Any], Tensor], weights: Columns, rows: Any) -> dict[str, Tensor]:
    """The gradient of every single loss, written out: the truth, and large.

    ``losses`` gives one value for each row of a tree of tensors. It is shown every row by itself: in a pass that rows
    share, one whose value is not a number would spoil the gradients of the others, and no bound on it would hold.
    """

    def loss(lent: Columns, row: Any) -> Tensor:
        return losses(lent, tree_map(lambda column: column.unsqueeze(0), row)).squeeze(0)

    found: dict[str, Tensor] = vmap(grad(loss), in_dims=(None, 0), randomness="error")(dict(weights), rows)
    return found


def columns_of(batch: Batch) -> dict[str, Tensor]:
    """A batch by the names of its columns; :func:`batch_of_columns` is the inverse."""
    always = {"x": batch.x, "y": batch.y, "group": batch.group, "mask": batch.mask}
    rest = {"subject": batch.subject, "attributes": batch.attributes}
    return always | {name: column for name, column in rest.items() if column is not None}


def batch_of_columns(columns: Columns) -> Batch:
    """The batch that has these columns; those of no column are None."""
    return Batch(
        x=columns["x"],
        y=columns["y"],
        group=columns["group"],
        mask=columns["mask"],
        subject=columns.get("subject"),
        attributes=columns.get("attributes"),
    )
