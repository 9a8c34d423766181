"""Measuring what is already there: evaluate, compare over seeds, sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from fedloom.runs.folder import RunFolder
from support import tiny_config

Command = Callable[..., Result]
Refused = Callable[..., str]


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A finished run of two rounds that a test may write to."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def test_evaluate_measures_prints_and_keeps(fedloom: Command, copied: Path) -> None:
    arguments = ["evaluate", copied, "--metrics", "kernel, spread", "--samples", "20", "--backbone", "pixels"]
    found = json.loads(fedloom(*arguments, "--json").stdout)
    assert (found["folder"], found["round"]) == (str(copied), 2)
    assert list(found["metrics"]) == [
        "kernel/pixels/n40",
        "kernel/pixels/n20/group=mnist",
        "kernel/pixels/n20/group=fashion-mnist",
        "spread/pixels/n20/group=mnist",
        "spread/pixels/n20/group=fashion-mnist",
    ]
    rows = RunFolder.open(copied).evaluations()
    assert [(row["round"], row["key"], row["value"]) for row in rows] == [
        (2, key, value) for key, value in found["metrics"].items()
    ]
    assert all(row["seconds"] > 0 for row in rows)
    lines = fedloom(*arguments).stdout.splitlines()
    assert lines[0] == f"{copied}, round 2"
    value = f"{found['metrics']['spread/pixels/n20/group=mnist']:.4g}"
    words = "Spread of samples (pixels) group mnist 20 samples"
    assert [*words.split(), value] in [line.split() for line in lines]
    assert len(RunFolder.open(copied).evaluations()) == 10
    assert json.loads(fedloom("compare", copied, "--json").stdout)["runs"][str(copied)] == found["metrics"]


def test_evaluate_an_earlier_round(fedloom: Command, copied: Path) -> None:
    arguments = ["evaluate", copied, "--metrics", "spread", "--samples", "20", "--json"]
    first, last = (json.loads(fedloom(*arguments, "--round", number).stdout) for number in ("1", "2"))
    assert (first["round"], last["round"]) == (1, 2)
    assert first["metrics"] != last["metrics"]


def test_evaluate_says_once_what_may_mislead(fedloom: Command, copied: Path) -> None:
    result = fedloom("evaluate", copied, "--metrics", "frechet", "--samples", "20", "--backbone", "pixels")
    warned = result.stderr.splitlines()
    assert [line.split(": a singular")[0] for line in warned] == [
        "Warning: Frechet distance from 40 samples in 784 dimensions",
        "Warning: Frechet distance from 20 samples in 784 dimensions",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metrics", "domian"], ["unknown metric 'domian'", "did you mean 'domain'"]),
        (["--metrics", "kernel", "--backbone", "pixel"], ["unknown backbone 'pixel'", "did you mean 'pixels'"]),
        (["--round", "7"], ["no checkpoint of round 7", "1, 2"]),
        (["--device", "abacus"], ["device = 'abacus'", "no such device"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_evaluate_refuses(refused: Refused, copied: Path, arguments: list[str], words: list[str]) -> None:
    sentence = refused("evaluate", copied, *arguments)
    assert all(word in sentence for word in words), sentence
    assert not (copied / "evaluations.jsonl").exists()


def test_evaluate_refuses_other_data(refused: Refused, copied: Path) -> None:
    path = copied / "run.toml"
    path.write_text(path.read_text().replace("records_per_silo = 40", "records_per_silo = 39"))
    assert "the data have changed" in refused("evaluate", copied)


def test_the_line_of_a_round_is_short(tmp_path: Path) -> None:
    """Each group once, along the first pathway: what stands in the log in full."""
    from fedloom.cli.progress import RoundProgress
    from fedloom.engines.base import RoundReport
    from fedloom.federation.rounds import RoundContext

    file = StringIO()
    groups = {"a": 0.5, "b": 0.25}
    metrics = {"domain-hit/domain-cnn/n20": 0.375}
    for variant in ("domain-cnn", "domain-cnn-roundtrip"):
        metrics |= {f"domain-hit/{variant}/n10/group={group}": hit for group, hit in groups.items()}
    with RoundProgress(Console(force_terminal=True, width=80, file=file, color_system=None)) as progress:
        progress.round_done(RoundReport(RoundContext(3, 9, (0,)), (), {}, 1), metrics | {"cost/steps/n3": 7.0})
    assert "round 3  domain-hit 0.5 / 0.25\n" in file.getvalue()


def seeded(folder: Path, seed: int, metrics: dict[str, float], *overrides: str, ended: str = "finished") -> Path:
    """A run folder of which only the metrics matter."""
    run = RunFolder.create(folder, tiny_config(f"seed={seed}", *overrides))
    run.record_round({"round": 1, "seconds": 0.1, **metrics}, [])
    if ended:
        run.end(ended, 1, "loss is not finite" if ended == "diverged" else "")
    return folder


FRECHET = "frechet/pixels/n10"
HIT = "domain-hit/domain-cnn/n10"


def test_compare_shows_mean_and_deviation_over_seeds(fedloom: Command, tmp_path: Path) -> None:
    one = [
        seeded(tmp_path / f"plain-seed-{seed}", seed, {FRECHET: value, f"{HIT}/group=a": hit, HIT: 0.0})
        for seed, value, hit in ((1, 1.0, 0.5), (2, 2.0, 0.7), (3, 6.0, 0.9))
    ]
    two = seeded(tmp_path / "wave-seed-1", 1, {FRECHET: 2.5}, "method.prior=wave")
    found = json.loads(fedloom("compare", *one, two, "--json").stdout)
    plain, wave = found["cohorts"]
    assert (plain["runs"], plain["seeds"]) == ([str(path) for path in one], [1, 2, 3])
    assert plain["metrics"][FRECHET] == {"mean": 3.0, "deviation": pytest.approx(7**0.5), "count": 3}
    assert wave["metrics"] == {FRECHET: {"mean": 2.5, "deviation": None, "count": 1}}
    assert found["mean_domain_hit"] == {str(path): hit for path, hit in zip(one, (0.5, 0.7, 0.9), strict=True)}
    lines = [line.split() for line in fedloom("compare", *one, two).stdout.splitlines()]
    assert lines[0] == ["metric", "of", "from", "plain", "(3", "seeds)", "wave-seed-1"]
    assert ["Frechet", "distance", "(pixels)", "all", "10", "samples", "3", "±", "2.6", "2.5"] in lines
    assert [" ".join(line[:3]) for line in lines[-4:]] == [f"{path.name}: Not judged:" for path in (*one, two)]


def test_compare_puts_many_runs_one_below_the_other(fedloom: Command, tmp_path: Path) -> None:
    latents = {"one": 1, "two": 2, "three": 3, "four": 4}
    folders = [
        seeded(tmp_path / name, 1, {f"{FRECHET}/group=a": 8.0 / n, FRECHET: 1.0} if n < 4 else {}, f"model.latent={n}")
        for name, n in latents.items()
    ]
    lines = [line.split() for line in fedloom("compare", *folders).stdout.splitlines()]
    assert lines[0] == ["Frechet", "distance", "(pixels),", "10", "samples", "a", "all"]
    assert lines[1:4] == [["one", "8", "1"], ["two", "4", "1"], ["three", "2.667", "1"]]


def test_compare_tells_which_runs_did_not_finish(fedloom: Command, tmp_path: Path) -> None:
    well = seeded(tmp_path / "well", 1, {FRECHET: 1.0})
    ill = seeded(tmp_path / "ill", 2, {FRECHET: 9.0}, ended="diverged")
    running = seeded(tmp_path / "running", 3, {}, ended="")
    lines = fedloom("compare", well, ill, running).stdout.splitlines()
    assert lines[-2:] == [
        f"{ill} diverged in round 1: loss is not finite",
        f"{running} is unfinished, 0 rounds done",
    ]
    unfinished = json.loads(fedloom("compare", well, ill, running, "--json").stdout)["unfinished"]
    assert {path: status["state"] for path, status in unfinished.items()} == {
        str(ill): "diverged",
        str(running): "unfinished",
    }


def test_sweep_runs_compares_and_reports(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text(
        f'base = "{tiny_toml}"\n'
        "[grid]\nseed = [1, 2]\nrounds = [1]\nevaluation.metrics = [['spread']]\nevaluation.samples = [10]\n"
        "[[variant]]\nname = 'plain'\n"
        "[[variant]]\nname = 'lost'\noverrides.data.source = 'image-folders'\n"
    )
    result = fedloom("sweep", file, "--out", out)
    assert result.exit_code == 1  # because of the lost ones
    lines = result.stdout.splitlines()
    assert lines[0] == f"4 runs in {out}: 2 finished, 2 failed"
    assert lines[1] == "privacy: no DP guarantee"
    assert lines[3].split() == ["metric", "of", "from", "plain", "(2", "seeds)"]
    assert lines[-1] == f"report  {out / 'report.html'}"
    assert (out / "report.html").is_file()
    assert any(line.startswith("Failed: lost-seed-1: ") for line in result.stderr.splitlines())
    assert "[1/4] plain-seed-1" in result.stderr  # whose rounds the lines below are
    found = json.loads(fedloom("sweep", file, "--out", out, "--json").stdout)
    assert {name: trial["state"] for name, trial in found["trials"].items()} == {
        **{f"plain-seed-{seed}": "finished" for seed in (1, 2)},
        **{f"lost-seed-{seed}": "failed" for seed in (1, 2)},
    }
    (cohort,) = found["comparison"]["cohorts"]
    values = [RunFolder.open(out / f"plain-seed-{seed}").latest_metrics() for seed in (1, 2)]
    key = "spread/pixels/n10/group=mnist"
    assert cohort["metrics"][key]["mean"] == pytest.approx((values[0][key] + values[1][key]) / 2)


def test_sweep_refuses_a_file_that_is_no_sweep(refused: Refused, tiny_toml: Path, tmp_path: Path) -> None:
    assert "unknown key" in refused("sweep", tiny_toml, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
