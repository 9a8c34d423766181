"""Images by their lowest frequencies: a public transform that keeps what it can and fits nothing."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.config import load_config
from fedloom.federation.building import build_federation
from fedloom.federation.sample import load
from fedloom.methods.base import Setting, make_method
from fedloom.modalities.base import modality_of
from fedloom.modalities.frequencies import SIDE, of_images, tiles
from fedloom.streams import Streams

DIGITS = torch.from_numpy(load("mnist", "test", "images")[:20].copy())


def test_all_frequencies_are_the_image_itself() -> None:
    found = tiles(of_images(DIGITS, SIDE))
    assert found is not None
    bright = 255 * DIGITS.double() / DIGITS.amax(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(torch.from_numpy(found)[..., 0].double(), bright, atol=1.0, rtol=0)


def test_an_even_image_has_the_lowest_frequency_alone_and_length_one() -> None:
    (row,) = of_images(torch.full((1, SIDE, SIDE), 7.0), 8)
    torch.testing.assert_close(row, torch.eye(64)[0])
    lengths = torch.linalg.vector_norm(of_images(DIGITS, 8), dim=1)
    torch.testing.assert_close(lengths, torch.ones(20))


def test_a_stripe_is_its_own_frequency() -> None:
    stripes = torch.cos(math.pi * 3 * (2 * torch.arange(SIDE) + 1) / (2 * SIDE)).expand(
        1, SIDE, SIDE
    )  # from side to side
    (row,) = of_images(stripes, 8)
    torch.testing.assert_close(row, torch.eye(64)[3], atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(2, 63), (2, 29**2), (2, 8, 8)])
def test_what_is_no_square_of_frequencies_has_no_picture(shape: tuple[int, ...]) -> None:
    assert tiles(torch.zeros(shape)) is None


def test_methods_for_vectors_learn_them() -> None:
    config = load_config("privacy/demo")
    federation = build_federation(config.data, Streams(1))
    assert (federation.modality, federation.shape) == (modality_of("frequencies", (64,)), (64,))
    assert [len(silo) for silo in federation.silos] == [1200] * 5
    assert make_method(Setting.of(config, federation)).name == "refined_moments"
