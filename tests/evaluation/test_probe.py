import sys

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score
from sklearn.model_selection import train_test_split
from torch import Tensor

from fedloom.errors import DataError, MissingExtraError
from fedloom.evaluation.probe import ProbeScores, paper_probe, probe
from fedloom.streams import Streams


def blobs(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three overlapping classes of unequal size in the plane, as a 2-D latent space has them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), count, replacement=True, generator=generator)
    centres = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]])
    return centres[labels] + torch.randn(count, 2, generator=generator), labels


def scores(truth: np.ndarray, predicted: np.ndarray) -> ProbeScores:
    return ProbeScores(
        accuracy=accuracy_score(truth, predicted),
        macro_f1=f1_score(truth, predicted, average="macro"),
        weighted_f1=f1_score(truth, predicted, average="weighted"),
        balanced_accuracy=balanced_accuracy_score(truth, predicted),
    )


def test_against_scikit_learn() -> None:
    (train, train_labels), (test, test_labels) = blobs(300, seed=0), blobs(200, seed=1)
    model = LogisticRegression(max_iter=1000).fit(train.double().numpy(), train_labels.numpy())
    expected = scores(test_labels.numpy(), model.predict(test.double().numpy()))
    assert probe(train, train_labels, test, test_labels) == expected
    assert len({expected.accuracy, expected.macro_f1, expected.weighted_f1, expected.balanced_accuracy}) == 4


def test_paper_protocol_learns_from_1600_and_is_scored_on_400() -> None:
    features, labels = blobs(10_000, seed=2)
    last_fifth = Streams(7).permutation("probe/paper", 10_000)[8_000:]
    x, y = features[last_fifth].double().numpy(), labels[last_fifth].numpy()
    train, test, train_labels, truth = train_test_split(x, y, test_size=0.2, random_state=42, stratify=y)
    assert (len(train), len(test)) == (1600, 400)
    expected = scores(truth, LogisticRegression(max_iter=1000).fit(train, train_labels).predict(test))
    assert paper_probe(features, labels, Streams(7)) == expected
    assert expected.accuracy * 400 == pytest.approx(round(expected.accuracy * 400))


def test_a_class_that_is_never_predicted_counts_as_zero() -> None:
    # Trained on classes 0 and 1 only; both records of class 2 are lost: recalls 1, 1, 0.
    train, labels = torch.tensor([[-5.0], [-4.0], [4.0], [5.0]]), torch.tensor([0, 0, 1, 1])
    result = probe(train, labels, torch.tensor([[-5.0], [5.0], [5.0], [5.0]]), torch.tensor([0, 1, 2, 2]))
    assert result.accuracy == 0.5
    assert result.balanced_accuracy == pytest.approx(2 / 3)
    # F1 of class 0 is 1, of class 1 2*1/(2*1 + 2) = 1/2, of class 2 nothing.
    assert result.macro_f1 == pytest.approx(0.5)
    assert result.weighted_f1 == pytest.approx((1 + 0.5 + 0) / 4)


def test_one_class_teaches_nothing() -> None:
    with pytest.raises(DataError, match="at least two classes"):
        probe(torch.zeros(3, 2), torch.ones(3), torch.zeros(1, 2), torch.ones(1))


def test_paper_protocol_needs_two_of_a_class() -> None:
    with pytest.raises(DataError, match="probe/paper needs"):
        paper_probe(torch.zeros(50, 2), torch.arange(50), Streams(0))


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    features, labels = blobs(20, seed=0)
    with pytest.raises(MissingExtraError, match=r"fedloom\[eval\]"):
        probe(features, labels, features, labels)
