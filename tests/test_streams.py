from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fedloom.streams import PackedStreams, Streams, philox, streams_of

words32 = st.integers(0, 2**32 - 1)


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x32-10 in Python's unbounded integers, as the paper writes it."""
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b % 2**32, (a >> 32) ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    words = philox(tuple(torch.tensor([word]) for word in counter), (key[0], key[1]))  # type: ignore[arg-type]
    return [int(word.item()) for word in words]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    found = philox_words([int(w, 16) for w in counter.split()], [int(w, 16) for w in key.split()])
    assert found == [int(w, 16) for w in expected.split()]


@given(st.lists(words32, min_size=4, max_size=4), st.lists(words32, min_size=2, max_size=2))
def test_int64_arithmetic_equals_unbounded_integers(counter: list[int], key: list[int]) -> None:
    assert philox_words(counter, key) == philox_by_hand(counter, key)


def test_the_counter_is_index_step_round_silo() -> None:
    streams = Streams(7)
    found = [int(word[2]) for word in streams.words("purpose", 3, silo=11, round=5, step=9)]
    assert found == philox_by_hand([2, 9, 5, 11], list(streams.key("purpose")))


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 11))
def test_a_row_does_not_depend_on_the_number_of_rows(few: int, more: int, width: int) -> None:
    long = Streams(3).normal("noise", few + more, width, silo=2, round=4, step=6)
    assert torch.equal(Streams(3).normal("noise", few, width, silo=2, round=4, step=6), long[:few])


@pytest.mark.parametrize("draw", ["uniform", "normal"])
def test_tensors_of_silos_and_steps_give_what_scalars_give_one_by_one(draw: str) -> None:
    streams = Streams(3)

    def drawn(silo: int | Tensor, step: int | Tensor) -> Tensor:
        if draw == "uniform":
            return streams.uniform("noise", 13, silo=silo, round=8, step=step)
        return streams.normal("noise", 5, 7, silo=silo, round=8, step=step)

    silos, steps = torch.tensor([3, 0, 9]), torch.tensor([1, 4])
    together = drawn(silos.unsqueeze(1), steps)
    assert together.shape[:2] == (3, 2)
    for (i, silo), (j, step) in itertools.product(enumerate(silos.tolist()), enumerate(steps.tolist())):
        assert torch.equal(together[i, j], drawn(silo, step))


def test_silos_of_several_experiments_draw_what_each_draws_alone() -> None:
    seeds, silos, steps = (5, 2, 5), torch.tensor([3, 0, 9]), torch.tensor([1, 4])
    packed = streams_of(seeds)
    assert isinstance(packed, PackedStreams)
    orders = packed.permutation("batches", 13, silo=silos.unsqueeze(1), round=8, step=steps)
    noise = packed.normal("noise", 5, 7, silo=silos, round=8, step=steps.unsqueeze(1))
    for i, (seed, silo) in enumerate(zip(seeds, silos.tolist(), strict=True)):
        alone = streams_of((seed, seed))
        assert alone == Streams(seed)
        for j, step in enumerate(steps.tolist()):
            assert torch.equal(orders[i, j], alone.permutation("batches", 13, silo=silo, round=8, step=step))
            assert torch.equal(noise[j, i], alone.normal("noise", 5, 7, silo=silo, round=8, step=step))


def test_numbers_depend_on_every_part_of_the_key() -> None:
    base = {"silo": 1, "round": 1, "step": 1}
    draws = [Streams(0).uniform("a", 8, **base), Streams(1).uniform("a", 8, **base), Streams(0).uniform("b", 8, **base)]
    draws += [Streams(0).uniform("a", 8, **(base | {part: 2})) for part in base]
    for one, other in itertools.combinations(draws, 2):
        assert not torch.isin(one, other).any()


def test_uniform_follows_the_uniform_distribution() -> None:
    drawn = Streams(11).uniform("u", 200_000).numpy()
    assert drawn.min() > 0
    assert drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 0.01
    assert drawn.mean() == pytest.approx(0.5, abs=4 / np.sqrt(12 * drawn.size))


def test_normal_follows_the_standard_normal_distribution() -> None:
    drawn = Streams(11).normal("n", 50_000, 4).numpy().astype(np.float64)
    flat = drawn.ravel()
    assert stats.kstest(flat, "norm").pvalue > 0.01
    # Standard errors of the first four moments of n standard normals: sqrt(1, 2, 15, 96) / sqrt(n).
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert (flat**power).mean() == pytest.approx(moment, abs=4 * np.sqrt(variance / flat.size))
    correlation = np.corrcoef(drawn, rowvar=False) - np.eye(4)
    assert np.abs(correlation).max() < 5 / np.sqrt(len(drawn))


def test_normal_is_finite_for_extreme_words(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = torch.tensor(list(itertools.product((0, 2**32 - 1), repeat=2)))
    radius, angle = pairs.unbind(dim=1)
    monkeypatch.setattr(Streams, "words", lambda *_, **__: (radius, angle, angle, radius))
    drawn = Streams(0).normal("n", 4, 4)
    assert torch.isfinite(drawn).all()
    # The largest radius is sqrt(-2 log(2^-33)) = 6.76.
    assert drawn.abs().max() == pytest.approx(6.763, abs=1e-3)


@settings(max_examples=30)
@given(st.integers(0, 300), st.integers(0, 2**31))
def test_permutation_is_a_permutation(count: int, seed: int) -> None:
    assert sorted(Streams(seed).permutation("order", count).tolist()) == list(range(count))


def test_permutations_of_four_are_equally_likely() -> None:
    drawn = Counter(tuple(Streams(2).permutation("order", 4, step=step).tolist()) for step in range(4800))
    assert len(drawn) == 24
    assert stats.chisquare(list(drawn.values())).pvalue > 0.01


def test_torch_seeds_differ_by_purpose_and_silo_and_fit_torch() -> None:
    seeds = [Streams(0).torch_seed("init/a"), Streams(0).torch_seed("init/b"), Streams(0).torch_seed("init/a", silo=1)]
    assert len(set(seeds)) == 3
    for seed in seeds:
        torch.Generator().manual_seed(seed)


def test_orders_of_many_silos_at_once_are_those_of_each() -> None:
    """Silos 4 and 7 hold 9 and 5 records; epochs 0 and 1."""
    silos, epochs, sizes = torch.tensor([[4], [7]]), torch.tensor([0, 1]), torch.tensor([[9], [5]])
    orders = Streams(3).permutation("batches", 9, silo=silos, round=2, step=epochs, shorter=9 - sizes)
    assert orders.shape == (2, 2, 9)
    for row, (silo, size) in enumerate([(4, 9), (7, 5)]):
        for epoch in (0, 1):
            alone = Streams(3).permutation("batches", size, silo=silo, round=2, step=epoch)
            assert orders[row, epoch].tolist() == [*alone.tolist(), *range(size, 9)]
