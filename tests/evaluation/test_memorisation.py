import pytest
import torch
from torch import Tensor

from fedloom.errors import DataError
from fedloom.evaluation.memorisation import memorisation

TRAINING = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])


def test_nearest_training_records_by_hand() -> None:
    result = memorisation(torch.tensor([[9.0, 0.0], [0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 8.0]]), TRAINING)
    assert result.sample_distances.tolist() == [1.0, 0.0, 5.0]
    assert result.sample_neighbours.tolist() == [1, 0, 0]
    assert (result.held_out_distances.item(), result.held_out_neighbours.item()) == (2.0, 2)
    assert result.closest(2).tolist() == [1, 0]
    assert result.distance_ratio == 0.5
    assert result.copy_rate() == pytest.approx(2 / 3)


def test_copies_are_found_and_fresh_draws_are_not() -> None:
    def draw(seed: int) -> Tensor:
        return torch.randn(600, 1, 4, 4, generator=torch.Generator().manual_seed(seed))

    training, held_out, fresh = draw(0), draw(1), draw(2)
    half_copied = torch.cat([training[:300] + 0.01, fresh[:300]])
    assert memorisation(half_copied, held_out, training).copy_rate() == pytest.approx(0.5, abs=0.02)
    honest = memorisation(fresh, held_out, training)
    assert honest.copy_rate(0.1) == pytest.approx(0.1, abs=0.05)
    assert honest.distance_ratio == pytest.approx(1.0, abs=0.05)


def test_nothing_to_compare() -> None:
    with pytest.raises(DataError, match="there are no held-out records"):
        memorisation(TRAINING, TRAINING[:0], TRAINING)
