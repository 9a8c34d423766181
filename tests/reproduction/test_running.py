from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from faulty_workers import die, fail, linger
from fedloom.cluster import Cluster, JobCall
from fedloom.config import load_config
from fedloom.errors import ConfigError, DataError, RunFolderError
from fedloom.evaluation.auditing import Effort
from fedloom.experiment import Run, load
from fedloom.federation.records import Federation
from fedloom.reproduction import running, stages
from fedloom.reproduction.figures import FIGURES, LATENTS, PANEL, add_to_figures
from fedloom.reproduction.rendering import render, render_pages
from fedloom.reproduction.results import Results, RunResult, read_result
from fedloom.reproduction.running import NeededRun, Work, carry_out, tasks_of
from fedloom.reproduction.stages import heads
from fedloom.reproduction.tables import identity, load_table, table_names
from fedloom.sweep import Federations
from labelled_vectors import vectors

MORE = ("engine.name=reference", "engine.workers=1", "engine.threads=1")


def tasks(paper: Path, seeds: int = 1, rows: tuple[str, ...] = ()) -> list[NeededRun]:
    return tasks_of([load_table("tiny/table1")], paper.parent, rows=rows, seeds=seeds, more=MORE)


def written(paper: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((paper / "results" / "table1").iterdir())}


def test_every_run_leaves_a_result_and_is_not_run_again(paper: Path, tmp_path: Path) -> None:
    asked = tasks(paper, seeds=2)
    assert [task.trial.name for task in asked] == [
        *("tiny-table1-first-fedvae-seed-0", "tiny-table1-first-d-seed-0"),
        *("tiny-table1-first-fedvae-seed-1", "tiny-table1-first-d-seed-1"),
    ]  # the row of the second part is the same experiment
    outcomes = carry_out(asked, Work(tmp_path / "runs"))
    assert {outcome.state for outcome in outcomes.values()} == {"finished"}
    found = written(paper)
    assert list(found) == [f"first-{row}-seed-{seed}.json" for row in ("d", "fedvae") for seed in (0, 1)]
    result = json.loads(found["first-d-seed-1.json"])
    run = load(tmp_path / "runs" / "tiny-table1-first-d-seed-1")
    assert result["metrics"] == run.folder.latest_metrics()
    assert set(result["metrics"]) == {f"spread/pixels/n30/group={group}" for group in ("mnist", "fashion-mnist")}
    assert (result["seed"], result["rounds"], result["state"]) == (1, 1, "finished")
    assert (result["device"], result["measured_on"], result["precision"]) == ("CPU", "CPU", "float32")
    assert (result["evaluation"]["samples"], result["evaluation"]["backbone"]) == (30, "pixels")
    assert (
        result["config"]
        == json.loads(found["first-d-seed-0.json"])["config"]
        != json.loads(found["first-fedvae-seed-0.json"])["config"]
    )
    assert set(result["versions"]) == {"fedloom", "python", "torch", "numpy", "safetensors"}
    assert tasks(paper, seeds=2) == []
    assert [task.trial.config.seed for task in tasks(paper, seeds=3)] == [2, 2]


class Here(Cluster):
    """Jobs that are done at once, in this process."""

    def carry_out(self, calls: Sequence[JobCall], say: Callable[[str], None]) -> dict[str, Any]:
        """What a cluster would."""
        say(" ".join(",".join(call.names) for call in calls))
        return {name: found for call in calls for name, found in call.work().items()}


def test_rows_are_jobs_where_there_is_a_cluster(paper: Path, tmp_path: Path) -> None:
    asked, work, heard = tasks(paper), Work(tmp_path / "runs"), list[str]()
    broken = replace(asked[1], wanted=(*asked[1].wanted, "inception-2015/frechet"))
    outcomes = carry_out([asked[0], broken], work, cluster=Here("local", tmp_path), say=heard.append)
    assert heard == ["tiny-table1-first-fedvae-seed-0 tiny-table1-first-d-seed-0"]
    assert [outcome.state for outcome in outcomes.values()] == ["finished", "failed"]
    assert list(written(paper)) == ["first-fedvae-seed-0.json"]
    assert [task.trial.name for task in tasks(paper)] == ["tiny-table1-first-d-seed-0"]


def test_what_more_is_asked_of_a_run_is_measured_without_training_it_again(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ("first/d",)
    carry_out(tasks(paper, rows=rows), Work(tmp_path / "runs"))
    before = json.loads(written(paper)["first-d-seed-0.json"])
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text(declared.read_text().replace('["spread"]', '["spread", "frechet"]'))
    (again,) = tasks(paper, rows=rows)
    assert again.wanted == ("spread", "frechet")
    monkeypatch.setattr("fedloom.experiment.run_loop.make_engine", lambda *_: pytest.fail("trained again"))
    with pytest.warns(match="Frechet distance"):
        carry_out([again], Work(tmp_path / "runs"))
    after = json.loads(written(paper)["first-d-seed-0.json"])
    assert before["metrics"].items() <= after["metrics"].items()
    assert "frechet/pixels/n60" in after["metrics"]
    assert after["measured"] == ["spread", "frechet"]


def second_table(tmp_path: Path, *changes: tuple[str, str]) -> None:
    """Another table of the same rows."""
    text = (tmp_path / "tables" / "tiny" / "table1.toml").read_text()
    for before, after in changes:
        text = text.replace(before, after)
    (tmp_path / "tables" / "tiny" / "table2.toml").write_text(text)


def test_a_run_that_two_tables_share_keeps_its_one_file(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    before = json.loads(written(paper)["first-d-seed-0.json"])
    second_table(tmp_path, ('["spread"]', '["manifold"]'), ('"first/', '"one/'), ('"second/', '"two/'))
    table = load_table("tiny/table2")
    (task,) = tasks_of([table], paper.parent, rows=["one/d"], seeds=1, more=MORE)
    assert (task.trial.name, task.result.name) == ("tiny-table1-first-d-seed-0", "first-d-seed-0.json")
    assert task.wanted == ("manifold",)
    with monkeypatch.context() as patch:
        patch.setattr("fedloom.experiment.run_loop.make_engine", lambda *_: pytest.fail("trained again"))
        carry_out([task], Work(tmp_path / "runs"))
    (after,) = Results.read(paper / "results").of(table.rows[1].identity)
    assert (after.row, after.measured) == ("tiny/table1 first/d", ["spread", "manifold"])
    assert before["metrics"].items() < after.metrics.items()
    # Without the run's folder it is trained again, and all of the file is of that training.
    task.result.write_text(json.dumps({**before, "metrics": {"spread/pixels/n30/group=mnist": -1.0}}))
    (task,) = tasks_of([table], paper.parent, rows=["one/d"], seeds=1, more=MORE)
    carry_out([task], Work(tmp_path / "elsewhere"))
    assert read_result(task.result).metrics == after.metrics
    assert len(Results.read(paper / "results").found) == 1


def test_two_results_of_one_run_are_refused(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    first = paper / "results" / "table1" / "first-d-seed-0.json"
    second = paper / "results" / "table2" / "d-seed-0.json"
    second.parent.mkdir()
    second.write_bytes(first.read_bytes())
    with pytest.raises(RunFolderError) as caught:
        Results.read(paper / "results")
    assert str(caught.value) == f"{first} and {second} are results of one run with seed 0; keep one"


def test_what_was_measured_with_other_settings_is_measured_again(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text(declared.read_text().replace("samples = 30", "samples = 20"))
    (again,) = tasks(paper, rows=("first/d",))
    carry_out([again], Work(tmp_path / "runs"))
    result = read_result(again.result)
    assert set(result.metrics) == {f"spread/pixels/n20/group={group}" for group in ("mnist", "fashion-mnist")}
    assert (result.measured, result.evaluation["samples"]) == (["spread"], 20)
    assert tasks(paper, rows=("first/d",)) == []


def test_a_result_of_an_earlier_version_is_read_and_measured_anew(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    path = paper / "results" / "table1" / "first-d-seed-0.json"
    now = json.loads(path.read_text())
    path.write_text(
        json.dumps({key: now[key] for key in now if key not in ("evaluation", "measured_on", "precision", "data")})
    )
    assert (read_result(path).evaluation, read_result(path).metrics) == ({}, now["metrics"])
    assert [task.result for task in tasks(paper, rows=("first/d",))] == [path]


def test_tables_that_measure_a_shared_run_differently_are_refused(paper: Path, tmp_path: Path) -> None:
    second_table(tmp_path, ("samples = 30", "samples = 40"))
    with pytest.raises(ConfigError) as caught:
        tasks_of([load_table("tiny/table1"), load_table("tiny/table2")], paper.parent, seeds=1)
    assert str(caught.value) == (
        "'first/fedvae' of tiny/table1 and 'first/fedvae' of tiny/table2 are one run, but evaluation.samples is "
        "30 in the one and 40 in the other: make them equal"
    )


def test_a_row_need_only_be_in_one_of_several_tables(paper: Path, tmp_path: Path) -> None:
    second_table(tmp_path, ('"first/', '"one/'), ('"second/', '"two/'))
    both = [load_table("tiny/table1"), load_table("tiny/table2")]
    found = tasks_of(both, paper.parent, rows=["first/d", "one/fedvae"], seeds=1, more=MORE)
    assert [(task.table, task.row.id) for task in found] == [("tiny/table1", "first/d"), ("tiny/table2", "one/fedvae")]
    with pytest.raises(ConfigError, match=r"^tiny/table1, tiny/table2: unknown row 'three/d'"):
        tasks_of(both, paper.parent, rows=["first/d", "three/d"], seeds=1, more=MORE)


@pytest.mark.parametrize("name", sorted({name.partition("/")[0] for name in table_names()}))
def test_the_tables_of_a_paper_agree_on_how_shared_runs_are_measured(name: str, tmp_path: Path) -> None:
    alike = [load_table(table) for table in table_names() if table.startswith(f"{name}/")]
    assert tasks_of(alike, tmp_path, seeds=1)


def test_a_run_that_diverged_is_not_run_again(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    path = paper / "results" / "table1" / "first-d-seed-0.json"
    replace(read_result(path), state="diverged", measured=[], metrics={}).write(path)
    assert tasks(paper, rows=("first/d",)) == []


def test_the_device_of_training_stays_when_it_is_measured_elsewhere(paper: Path, tmp_path: Path) -> None:
    (task,) = tasks(paper, rows=("first/d",))
    carry_out([task], Work(tmp_path / "runs"))
    folder = load(tmp_path / "runs" / task.trial.name).folder
    trained = {"engine": "fused on NVIDIA H200, tf32, 1 stack of up to 128 silos", "engine_choice": {"device": "cuda"}}
    folder.note(trained)
    task.result.unlink()
    carry_out([task], Work(tmp_path / "runs"))
    result = read_result(task.result)
    assert (result.device, result.measured_on) == ("NVIDIA H200", "CPU")


def test_the_network_of_the_standard_fid_is_one_setting_away(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = load_table("tiny/table1")
    (task,) = tasks_of([table], paper.parent, rows=["first/d"], seeds=1, more=MORE, inception="weights.pth")
    asked = []

    def evaluate(run: object, *, settings: object, **_: object) -> dict[str, float]:
        asked.append(settings)
        return {}

    monkeypatch.setattr(Run, "evaluate", evaluate)
    carry_out([task], Work(tmp_path / "runs", inception="weights.pth"))
    assert asked == [
        task.settings,
        replace(
            task.settings, metrics=("frechet", "inception-score"), backbone="inception-2015", weights="weights.pth"
        ),
    ]
    assert [t.wanted for t in tasks(paper, rows=("first/d",))] == []  # the house metrics are there now


def test_processes_write_the_same_results(paper: Path, tmp_path: Path) -> None:
    rows = ("first/d",)
    carry_out(tasks(paper, rows=rows), Work(tmp_path / "alone"))
    alone = json.loads(written(paper)["first-d-seed-0.json"])["metrics"]
    (paper / "results" / "table1" / "first-d-seed-0.json").unlink()
    asked = tasks(paper, rows=rows)
    assert carry_out(asked, Work(tmp_path / "late"), workers=2, seconds=0.0)[asked[0].trial.name].state == "unfinished"
    carry_out(asked, Work(tmp_path / "runs"), workers=2)
    assert json.loads(written(paper)["first-d-seed-0.json"])["metrics"] == alone


def test_a_worker_is_stopped_at_the_deadline(paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[SpawnProcess] = []
    start = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", lambda process: (started.append(process), start(process)))
    monkeypatch.setattr(running, "_work", linger)
    # The time is up as soon as a worker is started, and not before.
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: float(len(started)), sleep=time.sleep))
    (task,) = tasks(paper, rows=("first/d",))
    outcomes = carry_out([task], Work(tmp_path / "runs"), seconds=0.5)
    assert [process.exitcode for process in started] == [-signal.SIGTERM]
    assert outcomes[task.trial.name].state == "unfinished"


@pytest.mark.parametrize(
    ("work", "reason"),
    [(die, "its process ended with exit code -9"), (fail, "ZeroDivisionError: division by zero")],
)
def test_a_worker_that_crashes_has_failed(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: object, reason: str
) -> None:
    monkeypatch.setattr(running, "_work", work)
    (task,) = tasks(paper, rows=("first/d",))
    outcome = carry_out([task], Work(tmp_path / "runs"), workers=2, seconds=600.0)[task.trial.name]
    assert (outcome.state, outcome.reason) == ("failed", reason)


def test_a_run_that_cannot_be_measured_leaves_the_others_alone(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, asked = running._measured, tasks(paper)
    first, second = (task.trial.name for task in asked)

    def fails_once(run: Run, task: NeededRun, work: Work, federation: Federation) -> RunResult:
        if task.trial.name == first:
            raise DataError("no such thing")
        return measured(run, task, work, federation)

    monkeypatch.setattr(running, "_measured", fails_once)
    outcomes = carry_out(asked, Work(tmp_path / "runs"))
    assert (outcomes[first].state, outcomes[first].reason) == ("failed", "no such thing")
    assert outcomes[second].state == "finished"
    assert [task.trial.name for task in tasks(paper)] == [first]


def test_a_result_whose_run_folder_is_gone_has_no_picture(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text(declared.read_text().replace('["spread"]', '["spread", "domain"]'))
    (more,) = tasks(paper, rows=("first/d",))
    assert carry_out([more], Work(tmp_path / "new"), seconds=0.0)[more.trial.name].state == "unfinished"


def test_samples_of_the_first_seed_stand_side_by_side(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper, seeds=2), Work(tmp_path / "runs"))
    part, *_ = load_table("tiny/table1").parts
    sheet = Image.open(paper / "figures" / part.figure)
    grid = Image.open(next((tmp_path / "runs" / "tiny-table1-first-d-seed-0").glob("samples/*/fashion-mnist.png")))
    place = sheet.width // 2, 14
    assert sheet.crop((*place, place[0] + grid.width, place[1] + grid.height)).tobytes() == grid.tobytes()
    assert render_pages(paper, [load_table("tiny/table1")])
    assert "![samples of each row: first part](figures/first.png)" in (paper / "README.md").read_text()


def test_pictures_stay_when_a_table_gains_a_row(paper: Path, tmp_path: Path) -> None:
    carry_out(tasks(paper), Work(tmp_path / "runs"))
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    first = '[[parts.rows]]\nid = "first/fedvae"'
    assert first in declared.read_text()
    added = (
        first.replace("fedvae", "new") + '\nname = "new"\npreset = "demo"\noverrides = ["rounds=1", "model.latent=3"]\n'
    )
    declared.write_text(declared.read_text().replace(first, added + first))
    carry_out(tasks(paper, rows=("first/new",)), Work(tmp_path / "runs"))
    with Image.open(paper / "figures" / "first.png") as sheet:
        for place, row in enumerate(("new", "fedvae", "d")):
            (grid,) = (tmp_path / "runs" / f"tiny-table1-first-{row}-seed-0").glob("samples/*/fashion-mnist.png")
            with Image.open(grid) as panel:
                left = place * (sheet.width // 3)
                assert sheet.crop((left, 14, left + panel.width, 14 + panel.height)).tobytes() == panel.tobytes()


@pytest.mark.parametrize(("figure", "files"), [("outliers", ("outliers-group_a", "outliers-silo_a")), ("latents", ())])
def test_a_figure_may_show_outliers_or_latents(
    figure: str, files: tuple[str, ...], paper: Path, tmp_path: Path
) -> None:
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text(declared.read_text().replace('figure = "first.png"', f'{figure} = "first.png"'))
    asked = tasks(paper, rows=("first/d",))
    carry_out(asked, Work(tmp_path / "runs"))
    folder = tmp_path / "runs" / asked[0].trial.name
    if files:
        assert not (paper / "figures" / "first.png").exists()  # nothing was audited
        (folder / "audit").mkdir()
        for grey, name in enumerate(files):
            Image.new("L", (PANEL, PANEL), grey).save(folder / "audit" / f"{name}.png")
        add_to_figures({asked[0].identity: load(folder)}, paper)
    shown = folder / LATENTS if figure == "latents" else folder / "audit" / f"{files[-1]}.png"
    with Image.open(paper / "figures" / "first.png") as sheet, Image.open(shown) as panel:
        left = sheet.width // 2
        part = sheet.crop((left, 14, left + PANEL, 14 + PANEL)).convert("RGB")
        assert part.tobytes() == panel.convert("RGB").tobytes()
        assert figure == "outliers" or len(part.getcolors() or ()) == 1 + 10  # every digit has its colour
    render_pages(paper, [load_table("tiny/table1")])
    (said,) = (each.shows for each in FIGURES if each.name == figure)
    assert f"![{said}: first part](figures/first.png)" in (paper / "README.md").read_text()


def test_results_that_are_none_are_named(paper: Path) -> None:
    path = paper / "results" / "table1" / "broken.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"row": "x"}')
    with pytest.raises(
        RunFolderError, match=r"broken\.json is not a result file of this version: KeyError\('preset'\)"
    ):
        Results.read(paper / "results")


def test_data_may_lie_elsewhere(paper: Path) -> None:
    row = load_table("tiny/table1").rows[0]
    (task, *_) = tasks_of([load_table("tiny/table1")], paper.parent, seeds=1, more=["data.path=/elsewhere"])
    assert (task.identity, task.trial.config.data.path) == (row.identity, "/elsewhere")
    assert identity(task.trial.config) != row.identity


@pytest.mark.parametrize("setting", ["rounds=2", "model.latent=5"])
def test_settings_that_make_another_experiment_are_refused(paper: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} would make another experiment of row 'first/fedvae'"):
        tasks_of([load_table("tiny/table1")], paper.parent, more=[setting])


def test_missing_data_are_said_before_anything_runs(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "nothing"))
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text(declared.read_text().replace('"demo"', '"fissionvae/mixed-mnist"'))
    with pytest.raises(DataError, match="mnist"):
        carry_out(tasks(paper), Work(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_what_a_run_is_does_not_depend_on_where_it_runs_or_how_it_is_measured() -> None:
    base = identity(load_config("demo"))
    for same in ("seed=7", "name=other", "engine.name=fused", "evaluation.samples=3"):
        assert identity(load_config("demo", [same])) == base
    for other in ("rounds=1", "method.prior=wave", "data.path=/elsewhere", "local.learning_rate=0.5"):
        assert identity(load_config("demo", [other])) != base


def heads_of(tmp_path: Path, paper: Path, seed: int) -> NeededRun:
    """Heads on a table of vectors, drawn with a seed."""
    (tmp_path / "tables" / "tiny" / "heads.toml").write_text(
        """
        title = "heads"
        downstream = true
        evaluation = { metrics = [] }
        columns = ["accuracy, %"]
        [[parts]]
        title = "all"
        [[parts.rows]]
        id = "moments"
        name = "moments"
        preset = "dp-cvae/baselines/moments"
        overrides = ["privacy.mechanism=none", "data.records_per_silo=0", "data.silos=2"]
        """
    )
    tables = {split: vectors(seed, 80) for seed, split in enumerate(("train", "test"), start=seed)}
    arrays = {f"{key}_{split}": getattr(table, key).numpy() for split, table in tables.items() for key in ("x", "y")}
    np.savez(tmp_path / f"vectors-{seed}.npz", **arrays)
    more = [*MORE, f"data.path={tmp_path / f'vectors-{seed}.npz'}"]
    (task,) = tasks_of([load_table("tiny/heads")], paper.parent, seeds=1, more=more)
    return task


def test_tables_of_two_papers_share_a_run(paper: Path, tmp_path: Path) -> None:
    """It lies with the one that asked first, and both show its numbers and its samples."""
    declared = tmp_path / "tables"
    shutil.copytree(declared / "tiny", declared / "other")
    other = paper.with_name("other")
    other.mkdir()
    (other / "README.md").write_text((paper / "README.md").read_text().replace("tiny/", "other/"))
    carry_out(tasks(paper, rows=("first/d",)), Work(tmp_path / "runs"))
    again = tasks_of([load_table("other/table1")], paper.parent, rows=["first/d"], seeds=1, more=MORE)
    assert again == []
    assert not (other / "results").exists()
    render_pages(other, [load_table("other/table1")])
    (result,) = Results.of_papers(paper.parent).found.values()
    assert result.row == "tiny/table1 first/d"
    distance = result.metrics["spread/pixels/n30/group=mnist"]
    assert f"| +D | 30.00 | {distance:.4f} | 0.25 | - | 1 |" in (other / "README.md").read_text()
    assert (other / "figures" / "first.png").read_bytes() == (paper / "figures" / "first.png").read_bytes()
    # What the second needs beside goes into the file of the first.
    table = declared / "other" / "table1.toml"
    table.write_text(table.read_text().replace('metrics = ["spread"]', 'metrics = ["spread", "memorisation"]'))
    (task,) = tasks_of([load_table("other/table1")], paper.parent, rows=["first/d"], seeds=1, more=MORE)
    assert (task.result, task.trial.name) == (
        paper / "results" / "table1" / "first-d-seed-0.json",
        "tiny-table1-first-d-seed-0",
    )


def test_heads_are_scored_where_a_table_asks_for_them(paper: Path, tmp_path: Path) -> None:
    task, table = heads_of(tmp_path, paper, 0), load_table("tiny/heads")
    assert task.wanted == ("downstream",)
    carry_out([task], Work(tmp_path / "runs"))
    (result,) = Results.read(paper / "results").of(table.rows[0].identity)
    found = load(tmp_path / "runs" / task.trial.name).folder.downstream["rows"]["synthetic-only"]["global"]
    assert result.metrics["downstream/synthetic-only/global/accuracy"] == found["accuracy"] > 0.8
    assert f"| moments | {100 * found['accuracy']:.2f} | 1 |" in render(table, Results({paper: result}), paper)


def test_a_row_may_name_the_pathway_of_its_samples(paper: Path, tmp_path: Path) -> None:
    task = heads_of(tmp_path, paper, 0)
    carry_out([task], Work(tmp_path / "runs"))
    run, federation = load(tmp_path / "runs" / task.trial.name), Federations().data(task.trial.config)
    assert heads(run, replace(task.row, pathway="class"), federation, "cpu") == heads(run, task.row, federation, "cpu")
    with pytest.raises(ConfigError, match="--pathway: unknown pathway 'clas'; did you mean 'class'"):
        heads(run, replace(task.row, pathway="clas"), federation, "cpu")


def test_a_result_tells_whether_other_records_were_trained_on(paper: Path, tmp_path: Path) -> None:
    digests = []
    for number, seed in enumerate((0, 0, 5)):
        task = heads_of(tmp_path, paper, seed)
        carry_out([task], Work(tmp_path / f"runs-{number}"))
        digests.append(read_result(task.result).data)
        task.result.unlink()
    assert digests[0] == digests[1] != digests[2]
    assert digests[0] == Federations().data(heads_of(tmp_path, paper, 0).trial.config).digest


def test_membership_of_the_first_seed_is_told_where_a_table_asks_for_it(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []

    def audit_run(run: Run, *, attacks: list[str], effort: Effort, device: str, federation: object) -> dict[str, Any]:
        heard.append((attacks, effort.search, device, run.config.seed))
        scored = (("loss", "group=mnist", 0.5), ("nearest sample", "group=mnist", 0.7), ("loss", "group=b", 0.6))
        rows = [{"attack": attack, "target": target, "area": area} for attack, target, area in scored]
        return {"attacks": {"membership": rows}}

    monkeypatch.setattr(stages, "audit_run", audit_run)
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text("membership = true\n" + declared.read_text())
    asked = tasks(paper, seeds=2, rows=("first/d",))
    assert [task.wanted for task in asked] == [("spread", "membership"), ("spread",)]
    carry_out(asked[:1], Work(tmp_path / "runs"))
    assert heard == [(["membership"], False, "cpu", 0)]
    found = read_result(asked[0].result).metrics
    assert {key: value for key, value in found.items() if key.startswith("audit/")} == {
        "audit/membership-loss/area": 0.6,
        "audit/membership-nearest-sample/area": 0.7,
        "audit/membership-best/area": 0.7,
    }


def audited(target: str, way: str, rates: tuple[float | None, ...]) -> dict[str, Any]:
    """A row of the audit of outliers."""
    kinds = ("outliers", "unseen_outliers", "typical", "unseen_typical")
    found = {kind: None if rate is None else {"value": rate} for kind, rate in zip(kinds, rates, strict=True)}
    return {"target": target, "way": way, "counts": {kind: 10 * len(target) for kind in kinds}, **found}


def test_outliers_of_the_first_seed_are_audited_where_a_table_asks_for_it(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        audited("group=mnist", "reconstructed", (0.1, 0.2, 0.3, 0.4)),
        audited("silo=a", "reconstructed", (0.5, None, 0.6, 0.7)),
        audited("silo=a", "generated", (0.8, None, 0.9, 1.0)),
    ]
    heard: list[object] = []

    def audit_run(run: Run, *, attacks: list[str], device: str, federation: object) -> dict[str, Any]:
        heard.append((attacks, device, run.config.seed))
        return {"attacks": {"outliers": rows}}

    monkeypatch.setattr(stages, "audit_run", audit_run)
    declared = tmp_path / "tables" / "tiny" / "table1.toml"
    declared.write_text("audit = true\n" + declared.read_text())
    columns = declared.with_name("columns.toml")
    columns.write_text(columns.read_text().replace("spread/pixels/n*/group=mnist", "audit/outliers-reconstructed/n*"))
    asked = tasks(paper, seeds=2, rows=("first/d",))
    assert [task.wanted for task in asked] == [("spread", "audit"), ("spread",)]
    carry_out(asked, Work(tmp_path / "runs"))
    assert heard == [(["outliers"], "cpu", 0)]
    first, second = (read_result(task.result) for task in asked)
    assert {key: value for key, value in first.metrics.items() if key.startswith("audit/")} == {
        "audit/outliers-reconstructed/n110/group=mnist": 0.1,
        "audit/unseen-outliers-reconstructed/n110/group=mnist": 0.2,
        "audit/typical-reconstructed/n110/group=mnist": 0.3,
        "audit/unseen-typical-reconstructed/n110/group=mnist": 0.4,
        "audit/outliers-reconstructed/n60/silo=a": 0.5,
        "audit/outliers-reconstructed/n60": 0.5,
        "audit/typical-reconstructed/n60/silo=a": 0.6,
        "audit/typical-reconstructed/n60": 0.6,
        "audit/unseen-typical-reconstructed/n60/silo=a": 0.7,
        "audit/unseen-typical-reconstructed/n60": 0.7,
        "audit/outliers-generated/n60/silo=a": 0.8,
        "audit/outliers-generated/n60": 0.8,
        "audit/typical-generated/n60/silo=a": 0.9,
        "audit/typical-generated/n60": 0.9,
        "audit/unseen-typical-generated/n60/silo=a": 1.0,
        "audit/unseen-typical-generated/n60": 1.0,
    }
    assert not any(key.startswith("audit/") for key in second.metrics)
    results = Results.read(paper / "results")
    assert "| +D | 30.00 | 0.5000 | 0.25 | - | 2 |" in render(load_table("tiny/table1"), results, paper)
    assert tasks(paper, seeds=2, rows=("first/d",)) == []
