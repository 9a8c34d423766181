from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedloom.downstream.heads import Common, label_shares
from fedloom.downstream.mixture import CHOICES, Answers
from fedloom.downstream.retrieval import precision
from fedloom.evaluation.classification import Head

TRUTH = torch.tensor([0, 1, 0, 1])
SURE = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
WRONG = 1 - SURE
HALF = torch.full((4, 2), 0.5, dtype=torch.float64)


def chosen(choice: str, *silos: Answers) -> list[list[float]]:
    return [weights.reshape(-1).tolist() for weights in CHOICES[choice](silos)]


def test_the_mixture_is_equation_4() -> None:
    found = Answers(SURE, HALF, TRUTH).mixed(torch.tensor(0.3, dtype=torch.float64))
    torch.testing.assert_close(found[0], torch.tensor([0.3 * 0.9 + 0.7 * 0.5, 0.3 * 0.1 + 0.7 * 0.5]).double())
    by_class = Answers(SURE, HALF, TRUTH).mixed(torch.tensor([1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(by_class[0], torch.tensor([0.9, 0.5]).double() / 1.4)


@pytest.mark.parametrize(
    ("local", "common", "weight"),
    [
        (SURE, WRONG, 1.0),  # hits decide, and among equal hits the likelihood
        (WRONG, SURE, 0.0),
        (SURE, HALF, 1.0),
        (HALF, SURE, 0.0),
    ],
)
def test_a_silo_trusts_whoever_is_right(local: Tensor, common: Tensor, weight: float) -> None:
    assert chosen("silo", Answers(local, common, TRUTH)) == [[weight]]


def test_balanced_hits_do_not_let_a_frequent_class_outvote_a_rare_one() -> None:
    """The silo's own head says class 0 of everything, the common one errs on one of the three records of class 0."""
    local = torch.tensor([[0.9, 0.1]]).repeat(4, 1).double()
    common = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.4, 0.6], [0.05, 0.95]]).double()
    answers = Answers(local, common, torch.tensor([0, 0, 0, 1]))
    # Of a lambda up to 0.5 the record of class 1 is right (0.9 w + 0.05 (1 - w) < 0.5 up to 0.52), from 0.3 on all of
    # class 0 are (0.9 w + 0.4 (1 - w) > 0.5 beyond 0.2): between them everything is.
    assert [answers.worth(torch.tensor(weight).double())[0] for weight in (0.0, 0.3, 0.5, 0.6)] == [3, 4, 4, 3]
    weighed = answers.balanced()
    expected = [2 / 3 + 1, 2, 2, 1]
    assert [weighed.worth(torch.tensor(w).double())[0] for w in (0.0, 0.3, 0.5, 0.6)] == pytest.approx(
        expected, abs=1e-6
    )


def test_a_silo_may_choose_by_balanced_accuracy() -> None:
    """Two of three frequent records against one rare one: accuracy trusts the silo, balanced accuracy the others."""
    local = torch.tensor([[0.99, 0.01]]).repeat(4, 1).double()
    common = torch.tensor([[0.9, 0.1], [0.02, 0.98], [0.02, 0.98], [0.02, 0.98]]).double()
    answers = Answers(local, common, torch.tensor([0, 0, 0, 1]))
    ((by_hits,),) = chosen("silo", answers)
    ((by_class,),) = chosen("balanced", answers)
    assert by_hits >= 0.5
    assert by_class < 0.5


def test_hits_count_for_every_lambda() -> None:
    assert Answers(SURE, WRONG, TRUTH).hits().tolist() == [0] * 5 + [2] + [4] * 5  # 0.5: a tie, and the first answer


def test_one_lambda_for_all_has_most_hits_over_all_silos() -> None:
    many = Answers(SURE.repeat(3, 1), WRONG.repeat(3, 1), TRUTH.repeat(3))
    few = Answers(WRONG, SURE, TRUTH)
    found = chosen("shared", many, few)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(0.6)  # the smallest of those with 12 hits
    assert chosen("silo", many, few) == [[1.0], [0.0]]


def test_each_class_may_trust_another() -> None:
    """The silo knows class 0 and is blind for class 1; the common head is the other way round."""
    local = torch.tensor([[0.8, 0.1, 0.1], [0.7, 0.2, 0.1], [0.4, 0.3, 0.3], [0.4, 0.3, 0.3]]).double()
    common = torch.tensor([[0.3, 0.4, 0.3], [0.3, 0.4, 0.3], [0.2, 0.7, 0.1], [0.25, 0.65, 0.1]]).double()
    truth = torch.tensor([0, 0, 1, 1])
    ((first, second, third),) = chosen("class", Answers(local, common, truth))
    (alike,) = chosen("silo", Answers(local, common, truth))[0]
    assert first > second
    assert third == alike  # no validation record has it
    weights = torch.tensor([first, second, third], dtype=torch.float64)
    answers = Answers(local, common, truth)
    assert answers.worth(weights) > answers.worth(torch.tensor(alike))


def test_a_silos_prior_replaces_the_one_that_was_learned_with() -> None:
    """Two normal classes of equal width: the right posterior is known for any prior."""
    x = torch.tensor([[-0.5], [0.2], [1.0]])
    learned, prior = (torch.tensor(shares, dtype=torch.float64) for shares in ([0.2, 0.8], [0.9, 0.1]))
    # p(x|0) = N(-1, 1), p(x|1) = N(1, 1): the log odds are 2 x plus those of the prior.
    head = Head(torch.tensor([[-1.0], [1.0]], dtype=torch.float64), learned.log())
    found = Common(head, learned).at(prior, x)
    expected = torch.sigmoid(2 * x[:, 0].double() + math.log(0.1 / 0.9))
    torch.testing.assert_close(found[:, 1], expected)
    torch.testing.assert_close(Common(head, None).at(prior, x), head.probabilities(x))


def test_label_shares_can_imagine_one_more_record_of_each_class() -> None:
    labels = torch.tensor([0, 0, 2])
    assert label_shares(labels, 4).tolist() == pytest.approx([2 / 3, 0, 1 / 3, 0])
    assert label_shares(labels, 4, smoothing=1.0).tolist() == pytest.approx([3 / 7, 1 / 7, 2 / 7, 1 / 7])


def test_retrieval_counts_the_nearest_by_angle() -> None:
    angles = torch.deg2rad(torch.arange(0.0, 90.0, 4.0))  # 23 records
    gallery = torch.stack([angles.cos(), angles.sin()], dim=1) * torch.linspace(1, 9, len(angles))[:, None]
    labels = (torch.arange(23) >= 8).long()
    queries = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    assert precision(queries, torch.tensor([0, 1]), gallery, labels) == pytest.approx((8 / 10 + 10 / 10) / 2)
    assert precision(queries, torch.tensor([0, 1]), gallery[:4], labels[:4]) == pytest.approx(0.5)
