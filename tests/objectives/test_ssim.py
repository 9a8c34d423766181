from __future__ import annotations

import pytest
import torch

from fedloom.objectives.ssim import dissimilarity, similarity


def test_an_image_is_wholly_similar_to_itself_and_less_to_a_noisier_one() -> None:
    torch.manual_seed(0)
    image = torch.rand(4, 3, 16, 16)
    assert similarity(image, image).tolist() == pytest.approx([1.0] * 4, abs=1e-5)
    scores = [similarity(image, (image + s * torch.randn_like(image)).clamp(0, 1)).mean() for s in (0.05, 0.2, 0.8)]
    assert 1 > scores[0] > scores[1] > scores[2]


def test_constant_images_compare_by_luminance_alone() -> None:
    """(2ab + c1) / (a^2 + b^2 + c1) with a = 0.2, b = 0.6, c1 = 0.0001: 0.2401 / 0.4001."""
    a, b = torch.full((1, 1, 12, 12), 0.2), torch.full((1, 1, 12, 12), 0.6)
    assert dissimilarity(a, b).item() == pytest.approx(1 - 0.2401 / 0.4001, abs=1e-4)
