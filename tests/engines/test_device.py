"""Where a silo trains: at the device of its own choice, with what is drawn on the host."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from engines.one_answer import LARGER, METHODS, PRIVATE, UNEQUAL, assert_same_rounds, config_of, rounds_of, trainer_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.remote.silo import Grant, training_device
from fedloom.errors import ConfigError
from fedloom.privacy.dp_sgd import DPSGD
from fedloom.privacy.noise import NoiseKey, SecureNoise, StreamNoise
from fedloom.streams import Streams
from local_grid import Deployment


@pytest.mark.parametrize(
    ("present", "wanted", "private", "found"),
    [
        (True, "auto", False, "cuda"),
        (True, "auto", True, "cpu"),
        *((True, device, private, device) for device in ("cpu", "cuda") for private in (False, True)),
        (False, "auto", False, "cpu"),
        (False, "cpu", True, "cpu"),
    ],
)
def test_the_operator_chooses_and_private_work_stays_on_the_host_unless_he_says_otherwise(
    present: bool, wanted: str, private: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert training_device(wanted, private=private) == torch.device(found)


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"policy\.toml has device = 'cuda', but no CUDA device can be used here"):
        training_device("cuda", private=False)


@pytest.mark.parametrize(
    ("overrides", "first"), [((), "cuda"), ((*PRIVATE, "local.batch_size=4"), "cpu")], ids=["plain", "private"]
)
def test_a_silo_trains_where_its_operator_wants(
    overrides: tuple[str, ...], first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read anew for every task, so another device needs no new start."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wanted: list[Literal["auto", "cpu", "cuda"]] = ["auto", "cpu", "cuda"]
    config = config_of(*overrides)
    service = Deployment(tmp_path, config, UNEQUAL, agreement=lambda *_: Grant(math.inf, device=wanted[0])).service(0)
    found = []
    while wanted:
        found.append(service.ready(config).trainer.device.type)
        del wanted[0]
    assert found == [first, "cpu", "cuda"]


@pytest.mark.parametrize("source", [SecureNoise(), StreamNoise(Streams(3))], ids=["secure", "test"])
def test_noise_is_drawn_on_the_host_and_moves(
    source: SecureNoise | StreamNoise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without numbers stands for a GPU: its generator could give none."""
    asked: list[str] = []
    kind, normal = type(source), type(source).normal

    def noted(self: object, count: int, noise_key: NoiseKey, device: torch.device | str = "cpu") -> torch.Tensor:
        asked.append(str(device))
        return normal(source, count, noise_key, device)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "normal", noted)
    weights = {"weight": torch.zeros(2, 3, device="meta")}
    drawn = DPSGD(1.0, rate=0.5, expected=4.0).draw(weights, source, NoiseKey(0, 1, 2))
    assert asked == ["cpu"]
    assert {name: (tuple(noise.shape), noise.device.type) for name, noise in drawn.items()} == {
        "weight": ((2, 3), "meta"),
        "": ((), "meta"),
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name", ["+H+L+D", "private encoder, kept moments", "convolutions", "moon", "flow_vae", "private"]
)
def test_a_gpu_learns_what_the_cpu_learns(name: str) -> None:
    private = name == "private"
    overrides = (*PRIVATE, "privacy.clipping=quantile") if private else METHODS[name]
    trainer, start = trainer_of(config_of(*overrides), LARGER if private else UNEQUAL)
    rounds = ((0, 1), (0, 1, 4))
    ours = rounds_of(ReferenceEngine(replace(trainer, device=torch.device("cuda"))), start, rounds)
    assert_same_rounds(start, ours, rounds_of(ReferenceEngine(trainer), start, rounds))
    assert all(t.device.type == "cpu" for kept in ours[0].silos.values() for t in kept.tensors.values())
    assert all(t.device.type == "cpu" for part in ours[0].server.blocks.values() for t in part.values())
