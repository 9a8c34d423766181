"""The silo's worker process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from fedloom.deployment import worker_process


def test_numbers_too_small_for_their_usual_form_take_no_longer_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 0 from the start, before records are loaded."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    tiny = torch.full((8,), 1e-39)
    assert (tiny * 1.0).any()
    try:
        with pytest.raises(SystemExit):  # there is no home
            worker_process.main(str(tmp_path / "home"), "", "")
        assert not (tiny * 1.0).any()
    finally:
        torch.set_flush_denormal(False)
