"""A silo with a GPU of its own, which a fake stands for: it is chosen by the policy, and its coordinator sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedloom.deployment.status import server_status
from fedloom.deployment.worker import device_of
from rigs import DirectRig


@pytest.mark.parametrize(
    ("policy", "device"),
    [
        ('privacy = "none"', "cuda, Fake 1"),
        ('privacy = "none"\ndevice = "cpu"', "cpu"),
        ('privacy = "dp-sgd"', "cpu"),
        ('privacy = "dp-sgd"\ndevice = "cuda"', "cuda, Fake 1"),
    ],
)
def test_the_device_that_a_policy_chooses_stands_in_the_servers_status(
    policy: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Fake 1")
    rig = DirectRig(tmp_path)
    try:
        rig.stop_server()
        rig.socket = rig.server.door.make()
        rig.start_server()
        home = rig.homes["north"]
        (home.path / "policy.toml").write_text(policy)
        attendant = rig.attendant("north")
        attendant.facts["device"] = device_of(home.policy())
        rig.start(attendant, lambda frame: frame)
        assert attendant.connected.wait(20)
        shown = {silo["silo"]: (silo["there"], silo["device"]) for silo in server_status(rig.server)["silos"]}
    finally:
        rig.close()
        rig.server.door.remove()
    assert shown == {"north": ("online", device), "south": ("offline", ""), "west": ("offline", "")}
