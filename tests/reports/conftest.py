"""A tiny run with sample grids of two rounds, the data of which are loaded once, and pages read back."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiment import load, train
from fedloom.federation.building import build_federation
from fedloom.reports import report
from html_pages import Page
from support import tiny_config


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds, evaluated in both; a blend rate is written into its log by hand."""
    path = tmp_path_factory.mktemp("runs") / "tiny"
    train(tiny_config("evaluation.every=1", "method.prior=symmetrical"), path)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row, blend in zip(rows, (0.25, 0.125), strict=True):
        row["blend/domain-cnn/n1000/group=mnist"] = blend
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run_folder(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "tiny"))


@pytest.fixture(scope="session", autouse=True)
def data_loaded_once() -> Any:
    """The same federation for every report: loading it takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "build_federation", functools.cache(build_federation))
        yield


@pytest.fixture
def reported(tmp_path: Path) -> Callable[..., Page]:
    """Write the report of some run folders, and read both of its files back."""

    def call(*folders: Path) -> Page:
        out = tmp_path / "report.html"
        report.write_report([load(folder) for folder in folders], out)
        page = Page(out.read_text(encoding="utf-8"))
        page.numbers = json.loads(
            out.with_suffix(".json").read_text(),
            parse_constant=lambda word: pytest.fail(f"{word} is not JSON"),
        )
        return page

    return call
