"""The one app of a federation, and what a silo answers to any other."""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import replace

import pytest
from flwr.cli.config_utils import get_fab_metadata
from flwr.supercore.run import Run

from fedloom.deployment.apps import NAME, VERSION, archive, digest, objection

OURS = replace(
    Run.create_empty(1), fab_id=NAME, fab_version=VERSION, fab_hash=digest(), primary_task_type="flwr-serverapp"
)


def test_the_app_is_a_description_alone_and_the_same_bytes_everywhere() -> None:
    with zipfile.ZipFile(io.BytesIO(archive())) as files:
        assert files.namelist() == ["pyproject.toml", ".info/CONTENT"]
        assert {entry.compress_type for entry in files.infolist()} == {zipfile.ZIP_STORED}
    assert digest() == "1b601b513afdcb9c35865c30b3b363b1e400ae5f811a39a0a6c8e101e4b7b616"
    assert get_fab_metadata(archive()) == (NAME, VERSION)


def test_a_run_of_our_own_app_is_answered() -> None:
    assert objection(OURS) == ""


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"primary_task_type": "flwr-agentapp"}, "is a 'flwr-agentapp'"),
        ({"primary_task_type": "flwr-simulation"}, "is a 'flwr-simulation'"),
        ({"primary_task_type": ""}, "is a ''"),
        ({"fab_id": "evil/app"}, "the app 'evil/app' 1.0.0"),
        ({"fab_version": "1.0.1"}, "the app 'fedloom/fedloom-app' 1.0.1"),
        ({"fab_hash": "0" * 64}, r"1\.0\.0 \(000000000000\); this silo runs no foreign code"),
    ],
)
def test_any_other_run_is_refused(other: dict[str, str], reason: str) -> None:
    assert re.search(reason, objection(replace(OURS, **other)))
