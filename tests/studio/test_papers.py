"""The papers' tables: published values, results beside them, and links to runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.config import load_config
from fedloom.reproduction.results import RunResult, result_path
from fedloom.reproduction.tables import load_table, table_names
from fedloom.runs.folder import RunFolder
from html_pages import Page
from studio.conftest import Ask

TABLE, ROW = "fissionvae/table3", 0


def test_every_table_is_listed(ask: Ask, tmp_path: Path) -> None:
    links = Page(ask(tmp_path).get("/papers").text).values("href")
    assert [link.removeprefix("/papers/") for link in links if link.startswith("/papers/")] == table_names()


def test_without_results_a_table_shows_what_was_published(ask: Ask, tmp_path: Path) -> None:
    page = Page(ask(tmp_path).get(f"/papers/{TABLE}").text)
    assert f"fedloom reproduce {TABLE}" in page.text
    for row in load_table(TABLE).rows:
        assert row.name in page.text
        assert row.command in page.text
        assert all(str(value) in page.text for value in row.published.values())


def test_results_and_runs_stand_beside_it(ask: Ask, tmp_path: Path) -> None:
    """Seeds 0 and 1 with 40 and 44: 42.00 ± 2.83; a run of another seed in the folder is of that row as well."""
    table = load_table(TABLE)
    row = table.rows[ROW]
    column = next(column for column in table.columns if column.metric)
    for seed, value in ((0, 40.0), (1, 44.0)):
        result = RunResult(
            row=f"{TABLE}/{row.id}",
            preset=row.preset,
            overrides=list(row.overrides),
            config=row.identity,
            seed=seed,
            state="finished",
            reason="",
            rounds=70,
            measured=["frechet"],
            metrics={column.metric.replace("*", "10000"): value / column.scale},
            seconds={"training": 5.0},
            device="cpu",
            engine="fused",
            versions={"torch": "2"},
        )
        result.write(result_path(tmp_path / "papers" / table.paper, TABLE, row.id, seed))
    runs = tmp_path / "runs"
    RunFolder.create(runs / "third", load_config(row.preset, [*row.overrides, "seed=2", "data.path=elsewhere"]))
    RunFolder.create(runs / "other", load_config("demo"))
    client = ask(runs)
    page = Page(client.get(f"/papers/{TABLE}").text)
    assert f"42.{'0' * column.digits} ± 2.83"[: 8 + column.digits] in page.text
    keys = {entry.name: key for key, entry in client.app.state.studio.catalogue.entries().items()}  # type: ignore[attr-defined]
    assert f"/runs/{keys['third']}" in page.values("href")
    assert f"/runs/{keys['other']}" not in page.values("href")


@pytest.mark.parametrize("name", ["fissionvae/table9", "..%2f../etc", "fissionvae/..%2ftable1"])
def test_a_table_that_is_not_there(ask: Ask, tmp_path: Path, name: str) -> None:
    answer = ask(tmp_path).get(f"/papers/{name}")
    assert answer.status_code == 404


def test_a_damaged_result_is_one_sentence(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "papers" / "fissionvae" / "results").mkdir(parents=True)
    (tmp_path / "papers" / "fissionvae" / "results" / "x.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    answer = ask(tmp_path / "runs").get(f"/papers/{TABLE}")
    assert answer.status_code == 400
    assert "x.json is not a result file of this version" in answer.text
