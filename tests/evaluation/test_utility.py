import torch

from fedloom.evaluation.utility import Accuracy, Labelled, transfer_accuracy, utility


def table(x: list[float], y: list[int], group: list[int]) -> Labelled:
    return Labelled(torch.tensor(x).unsqueeze(1), torch.tensor(y), torch.tensor(group))


# A line whose classes lie left and right of 0; every learner below puts its border there.
REAL = table([-3, -2, -1, 1, 2, 3], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1])


def test_mean_worst_class_and_worst_group_by_hand() -> None:
    # Class 0: right, right, wrong, right; class 1: wrong, right. Group 0: 1 of 1, group 1: 3 of 5.
    test = table([-2, -2, 2, -2, -2, 2], [0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1])
    assert transfer_accuracy(REAL, test) == Accuracy(mean=4 / 6, worst_class=1 / 2, worst_group=3 / 5)


def test_directions_are_not_confused() -> None:
    """Synthetic records are real ones with class 0 of group 1 moved right of the border, so only they suffer."""
    synthetic = table([-3, 0.5, -1, 1, 2, 3], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1])
    result = utility(REAL, REAL, synthetic)
    assert result.real_to_real == Accuracy(1.0, 1.0, 1.0)
    assert result.real_to_synthetic == Accuracy(mean=5 / 6, worst_class=2 / 3, worst_group=2 / 3)
    assert result.synthetic_to_real == transfer_accuracy(synthetic, REAL)


def test_swapped_labels_are_useless() -> None:
    swapped = Labelled(REAL.x, 1 - REAL.y, REAL.group)
    assert utility(REAL, REAL, swapped).synthetic_to_real == Accuracy(0.0, 0.0, 0.0)
