"""What a report shows of a table: columns of training rows and samples on one scale, and the distances of pairs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedloom.config import load_config
from fedloom.evaluation.table_marginals import marginal_distances
from fedloom.experiment import Run, load, train
from fedloom.reports.report import write_report
from fedloom.reports.table_panels import heat_map
from patient_rows import SCHEMA, rows

SMALL = ("method.components=10", "method.steps=20", "evaluation.metrics=[]", "evaluation.trackers=[]")


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(load_config("tables/demo", SMALL), tmp_path_factory.mktemp("census") / "run")


def page_of(run: Run, out: Path) -> str:
    write_report([load(run.folder.path)], out)
    return out.read_text(encoding="utf-8")


def test_columns_of_public_rows_stand_beside_those_of_samples(census: Run, tmp_path: Path) -> None:
    page = page_of(census, tmp_path / "report.html")
    for name in ("age", "income-per-year"):
        heights = [
            [float(height) for height in re.findall(r'height="([0-9.]+)"', svg)]
            for svg in re.findall(rf'aria-label="{name}, (?:training rows|samples)".*?</svg>', page, re.DOTALL)
        ]
        assert [len(each) for each in heights] == [SIZES[name]] * 2
        assert max(map(max, heights)) == 31  # the highest bar of both is as high as any; the scale is one
    assert len(re.findall(r'<rect class="bar"[^>]*fill-opacity', page)) == 13 * 12 // 2


SIZES = {"age": 15, "income-per-year": 2}


def test_nobody_sees_columns_of_records_that_are_not_public(
    census: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.reports.subject._is_public", lambda _: False)
    page = page_of(census, tmp_path / "report.html")
    assert "training rows above" not in page
    assert "fill-opacity" not in page


def test_the_darkest_square_is_the_pair_furthest_apart() -> None:
    real, made = rows(500), rows(500, seed=1)
    made[:, 2] = np.random.default_rng(0).permutation(made[:, 2])
    distances = marginal_distances(SCHEMA, real, made, 2)
    (first, second), most = max(distances.items(), key=lambda item: item[1])
    told = re.search(r'fill-opacity="1\.0"><title>(.*?)</title>', heat_map(SCHEMA, real, made))
    assert told is not None
    assert told[1] == f"{SCHEMA.names[first]}, {SCHEMA.names[second]}: {most:.3f}"
