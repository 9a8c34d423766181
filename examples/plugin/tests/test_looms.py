"""What the package promises, tested through fedloom's own interface."""

from __future__ import annotations

from pathlib import Path

import torch

import fedloom
from fedloom.models.priors import prior_means
from fedloom.streams import Streams


def test_four_groups_lie_a_quarter_of_a_circle_apart() -> None:
    """By hand: radius 2, at 0, 90, 180 and 270 degrees."""
    means = prior_means("circle", groups=4, latent=3, streams=Streams(0))
    expected = torch.tensor([[2.0, 0, 0], [0, 2, 0], [-2, 0, 0], [0, -2, 0]])
    torch.testing.assert_close(means, expected, atol=1e-6, rtol=0)


def test_only_the_decoder_leaves_a_silo(tmp_path: Path) -> None:
    """Also where the demo's own method would send both."""
    few = ["rounds=1", "data.silos=1", "data.records_per_silo=40", "model.hidden=[16]", "evaluation.metrics=[]"]
    config = fedloom.load_config("demo", few, {"method": {"name": "local_encoders"}})
    run = fedloom.train(config, tmp_path / "run")
    assert [list(row["blocks"]) for row in run.folder.egress()] == [["decoder@all"]] * 2
