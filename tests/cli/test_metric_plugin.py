"""A metric that another package brings is one value in one file, and is seen wherever metrics are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean

import pytest
from click.testing import Result

from fedloom.evaluation import metric
from fedloom.evaluation.metric import best
from fedloom.experiment import load, train
from fedloom.runs.folder import RunFolder
from fedloom.studio.catalogue import FoundRun
from fedloom.studio.run_summary import run_summary_of
from plugins import install
from support import tiny_config

Command = Callable[..., Result]
SOURCE = '''
from fedloom.evaluation.metric import Metric, Need, Reading
from fedloom.evaluation.needs import SAMPLES
from fedloom.runs.metrics import metric_key


def brightness(evaluation):
    """How bright samples are."""
    return {
        metric_key("brightness", "mean", len(x), group): x.mean().item() for group, x in evaluation.samples.items()
    }


METRIC = Metric(
    "brightness", brightness, (Reading("brightness/*", "Brightness of samples", better="lower"),), needs=(SAMPLES,)
)
NIGHT = Metric("night", brightness, (), needs=(Need(lambda evaluation: False, "it is day"),))
'''


@pytest.fixture
def run(plugin_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A run, where a package is installed that brings two metrics."""
    points = {"fedloom.metrics": {"brightness": "METRIC", "night": "NIGHT"}}
    install(plugin_folder, "bright", "1.0", SOURCE, points)
    settings = ("rounds=1", "evaluation.metrics=['brightness']", "evaluation.samples=20")
    metric._readings.cache_clear()
    metric._reading_of.cache_clear()
    yield train(tiny_config(*settings), tmp_path / "run").folder.path
    metric._readings.cache_clear()
    metric._reading_of.cache_clear()


def test_a_metric_of_another_package_is_seen_wherever_metrics_are(fedloom: Command, run: Path, tmp_path: Path) -> None:
    assert (
        json.loads(fedloom("list", "metrics", "--json").stdout)["brightness"]
        == "How bright samples are. (from bright==1.0)"
    )
    other = tmp_path / "other"
    shutil.copytree(run, other)
    values = json.loads(fedloom("evaluate", run, "--json").stdout)["metrics"]
    assert load(run).metrics()[-1].items() >= values.items()
    key = "brightness/mean/n20/group=mnist"
    assert values[key] == load(run).sample(20, group="mnist", seed=1).mean().item()
    by_path = fedloom("evaluate", run, "--metrics", "bright:METRIC", "--json")
    assert json.loads(by_path.stdout)["metrics"] == values
    table = [" ".join(line.split()) for line in fedloom("evaluate", run).stdout.splitlines()]
    assert f"Brightness of samples (mean) group mnist 20 samples {values[key]:.4g}" in table
    RunFolder.open(other).record_evaluation(1, {key: values[key] + 1}, 0.1)
    assert best(key, [values[key], values[key] + 1]) == values[key]
    compared = fedloom("compare", run, other).stdout
    assert "Brightness of samples (mean)" in " ".join(compared.split())
    assert json.loads(fedloom("compare", run, other, "--json").stdout)["runs"][str(other)][key] == values[key] + 1
    fedloom("report", run, other, "--out", tmp_path / "report.html")
    assert f'<span title="{key}">Brightness of samples (mean)</span>' in (tmp_path / "report.html").read_text()
    (headline,) = run_summary_of(FoundRun("key", "run", run)).best
    assert (headline.metric, headline.value) == ("brightness/mean", mean(values.values()))


def test_what_a_metric_needs_is_said_where_it_is_missing(fedloom: Command, run: Path) -> None:
    result = fedloom("evaluate", run, "--metrics", "night", "--json")
    assert json.loads(result.stdout)["metrics"] == {}
    assert "metric 'night' is left out: it is day" in result.stderr
