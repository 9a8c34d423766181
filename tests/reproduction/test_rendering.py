from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from fedloom.config import load_config
from fedloom.errors import ConfigError, RunFolderError
from fedloom.privacy.lipschitz import latent_radius
from fedloom.reproduction.bounds import write_bounds
from fedloom.reproduction.rendering import marks, page_of, render, render_pages
from fedloom.reproduction.results import Results
from fedloom.reproduction.running import tasks_of
from fedloom.reproduction.tables import Table, identity, load_table, table_names

NUMBER = r"(?<!\w)-?\d+(?:\.\d+)?"  # not that of a device, such as H200
PAPERS = Path(__file__).parents[2] / "papers"
FACTS: dict[str, Any] = {
    "preset": "demo",
    "overrides": [],
    "reason": "",
    "rounds": 1,
    "measured": ["spread"],
    "engine": "reference",
    "state": "finished",
    "device": "CPU",
    "versions": {"torch": "2"},
    "seconds": {"training": 2.0, "measuring": 1.0},
}


def put(paper: Path, row: str, seed: int, value: float, **changes: Any) -> None:
    """A result file by hand."""
    (declared,) = load_table("tiny/table1").chosen([row])
    metrics = {"spread/pixels/n30/group=fashion-mnist": 9.0, "spread/pixels/n30/group=mnist": value}
    facts = {"row": row, "config": declared.identity, "seed": seed, "metrics": metrics}
    path = paper / "results" / f"{row.replace('/', '-')}-{seed}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**FACTS, **facts, **changes}))


def rendered(paper: Path) -> str:
    render_pages(paper, [load_table("tiny/table1")])
    return (paper / "README.md").read_text(encoding="utf-8")


def test_means_deviations_ratios_and_order(paper: Path) -> None:
    put(paper, "first/fedvae", 0, 0.5)
    for seed, value in enumerate((0.1, 0.2, 0.6)):
        put(paper, "first/d", seed, value)
    text = rendered(paper)
    assert text.startswith("# Tiny\n\n<!-- fedloom reproduce tiny/table1 -->")
    assert text.endswith("<!-- end of tiny/table1 -->\n\nafter\n")
    assert "old" not in text
    over = "over that of FedVAE"
    headers = f"| row | FID, published | distance | FID, published {over} | distance {over} | seeds | seconds a run |"
    assert headers in text
    assert "| FedVAE | 120.00 | 0.5000 | 1.00 | 1.00 | 1 | 3 |" in text
    assert "| +D | 30.00 | 0.3000 ± 0.2646 | 0.25 | 0.60 | 3 | 3 |" in text
    assert "| +D again | diverges | 0.3000 ± 0.2646 | 3 | 3 |" in text  # one experiment, two rows
    assert "- Order by FID, published: +D < FedVAE." in text
    assert "- Order by distance: +D < FedVAE." in text
    assert "the standard FID" not in text  # nobody has it
    assert "Measured on CPU, torch 2 (4 runs)." in text
    assert rendered(paper) == text


def test_seconds_of_different_devices_have_no_mean(paper: Path) -> None:
    def spent(row: str, *runs: tuple[float, str]) -> None:
        for seed, (seconds, device) in enumerate(runs):
            put(paper, row, seed, 0.1, seconds={"training": seconds, "measuring": 1.0}, device=device)

    spent("first/fedvae", (6.0, "NVIDIA H200"))
    assert "| 1 | 7 |" in rendered(paper)
    spent("first/d", (2.0, "CPU"), (3.0, "CPU"), (4.0, "CPU"), (0.5, "NVIDIA H200"))
    assert "| 4 | 4 on CPU; 2 on NVIDIA H200 |" in rendered(paper)
    assert "| 1 | 7 on NVIDIA H200 |" in rendered(paper)  # CPU is now the usual device of this part
    assert "200" not in numbers_in(body_of("tiny/table1", paper))


def test_a_run_that_diverged_is_no_number(paper: Path) -> None:
    put(paper, "first/d", 0, 0.1, state="diverged", metrics={})
    assert "| +D | 30.00 | diverges | 0.25 | - | 1 | 3 |" in rendered(paper)
    put(paper, "first/d", 1, 0.4)
    assert "| +D | 30.00 | 0.4000 (1 of 2 diverged) | 0.25 | - | 2 |" in rendered(paper)
    put(paper, "first/d", 2, 0.5)
    assert "| +D | 30.00 | 0.4500 ± 0.0707 (1 of 3 diverged) | 0.25 | - | 3 |" in rendered(paper)
    assert "| +D again | diverges | 0.4500 ± 0.0707 (1 of 3 diverged) | 3 |" in rendered(paper)
    found = set(numbers_in(body_of("tiny/table1", paper)))
    assert found <= numbers_that_results_give(load_table("tiny/table1"), paper)


def test_where_a_run_was_trained_and_measured_is_told(paper: Path) -> None:
    trained = {"device": "NVIDIA H200", "precision": "tf32"}
    put(paper, "first/d", 0, 0.1, **trained, measured_on="NVIDIA H200")
    put(paper, "first/d", 1, 0.1, **trained, measured_on="CPU", seconds={"training": 2.0, "measuring": 500.0})
    told = "NVIDIA H200, tf32, torch 2 (1 run); CPU (trained on NVIDIA H200), tf32, torch 2 (1 run)"
    assert f"Measured on {told}." in rendered(paper)
    assert "| 2 | 3 on NVIDIA H200; 502 on CPU (trained on NVIDIA H200) |" in rendered(paper)


def test_a_metric_that_is_there_twice_is_refused(paper: Path) -> None:
    twice = {"spread/pixels/n30/group=mnist": 0.1, "spread/pixels/n60/group=mnist": 0.2}
    put(paper, "first/d", 0, 0.1, metrics=twice)
    with pytest.raises(RunFolderError) as caught:
        rendered(paper)
    told = f"the result of first/d, seed 0, has several spread/pixels/n*/group=mnist: {list(twice)}"
    assert str(caught.value) == told


def test_a_column_may_be_the_mean_of_what_fits(paper: Path) -> None:
    put(paper, "first/d", 0, 0.1)  # of the other group: 9.0
    declared = load_table("tiny/table1")
    column = replace(declared.columns[1], metric="spread/pixels/n*/group=*", mean=True)
    table = replace(declared, columns=(declared.columns[0], column))
    assert "| +D | 30.00 | 4.5500 | 0.25 | - | 1 |" in render(table, Results.read(paper / "results"), paper)


def test_a_part_of_which_the_paper_says_nothing_has_no_column_for_it(paper: Path) -> None:
    declared = paper.parents[1] / "tables" / "tiny" / "table1.toml"
    text = declared.read_text()
    declared.write_text(text.replace("published = { FID = 120.0 }", "").replace("published = { FID = 30 }", ""))
    first, second = (rendered(paper).split("**second part**")[number].split("|---")[0] for number in (0, 1))
    assert "| row | distance | distance over that of FedVAE | seeds |" in first
    assert "| row | FID, published | distance | seeds |" in second


def test_a_readme_without_a_place_is_told_how_to_make_one(paper: Path) -> None:
    (paper / "README.md").write_text("nothing")
    table = load_table("tiny/table1")
    with pytest.raises(ConfigError, match="has no place for 'tiny/table1': write '<!-- fedloom reproduce"):
        page_of(paper, table)
    turned = "\n".join((*reversed(marks(table.name)), "the rest of the page"))
    (paper / "README.md").write_text(turned)
    with pytest.raises(ConfigError, match="and, below it, '<!-- end of tiny/table1 -->' there"):
        render_pages(paper, [table])
    assert (paper / "README.md").read_text() == turned
    with pytest.raises(ConfigError, match="--papers names the folder"):
        page_of(paper / "elsewhere", table)
    (paper / "tables.md").write_text("\n".join(marks(table.name)))  # it need not be the README
    assert render_pages(paper, [table]) == [paper / "tables.md"]


def numbers_that_results_give(table: Table, paper: Path) -> set[str]:
    """Every number that may stand in a table, straight from its declaration and the files."""
    files = [json.loads(path.read_text()) for path in paper.parent.glob("*/results/**/*.json")]
    allowed: set[str] = set()
    means: dict[str, dict[str, float]] = {}  # column -> row -> value
    rows = list(table.rows)
    for part in table.parts:
        if part.reference.table:
            rows += load_table(part.reference.table).chosen([part.reference.row])
    for row in rows:
        runs = [file for file in files if file["config"] == row.identity]
        if runs:
            allowed |= {str(len(runs)), str(sum(run["state"] == "diverged" for run in runs))}
            spent: dict[tuple[str, str], list[float]] = {}
            for run in runs:
                places = run["device"], run.get("measured_on") or run["device"]
                spent.setdefault(places, []).append(sum(run["seconds"].values()))
            allowed |= {f"{mean(seconds):.0f}" for seconds in spent.values()}
        for column in table.columns:
            if column.published:
                value = row.published.get(column.published)
                if isinstance(value, str):
                    allowed |= set(re.findall(NUMBER, value))
                if isinstance(value, int | float):
                    allowed.add(f"{value:.{column.digits}f}")
                    means.setdefault(column.title, {})[row.id] = value
                continue
            pattern = re.compile(re.escape(column.metric).replace(r"\*", "[^/]*"))
            found = ([v for k, v in run["metrics"].items() if pattern.fullmatch(k)] for run in runs)
            values = [column.scale * mean(fitting) for fitting in found if fitting]
            if values:
                allowed.add(f"{mean(values):.{column.digits}f}")
                means.setdefault(column.title, {})[row.id] = mean(values)
            if len(values) > 1:
                allowed.add(f"{stdev(values):.{column.digits}f}")
    shares = (
        {f"{one / other:.2f}" for one in found.values() for other in found.values() if other}
        for title, found in means.items()
        if title in table.compared
    )
    return allowed.union(*shares)


def numbers_in(text: str) -> list[str]:
    """The cells of tables between a table's marks, but for names of rows and presets."""
    cells = (line.strip("|").split("|")[1:-1] for line in text.splitlines() if line.startswith("| "))
    return [number for cell in chain(*cells) for number in re.findall(NUMBER, cell)]


def body_of(name: str, paper: Path) -> str:
    start, end = marks(name)
    text = page_of(paper, load_table(name)).read_text(encoding="utf-8")
    body = text.partition(start)[2].partition(end)[0]
    return "\n".join(line for line in body.splitlines() if not line.startswith("| row |"))


@pytest.mark.parametrize("name", table_names())
def test_every_number_of_a_papers_table_comes_from_a_result_file(name: str) -> None:
    paper, table = PAPERS / name.partition("/")[0], load_table(name)
    body = body_of(name, paper)
    assert body.count("\n| ") == len(table.rows)
    assert set(numbers_in(body)) <= numbers_that_results_give(table, paper)


@pytest.mark.parametrize("name", table_names())
def test_a_papers_page_is_what_its_results_render(name: str, tmp_path: Path) -> None:
    paper = PAPERS / name.partition("/")[0]
    copy = tmp_path / paper.name
    copy.mkdir()
    if (paper / "figures").exists():
        (copy / "figures").symlink_to(paper / "figures")
    for results in PAPERS.glob("*/results"):  # tables of several papers may share a run
        (tmp_path / results.parent.name).mkdir(exist_ok=True)
        (tmp_path / results.parent.name / "results").symlink_to(results)
    for page in paper.glob("*.md"):
        (copy / page.name).write_bytes(page.read_bytes())
    assert render_pages(copy, [load_table(name)]) == []


def test_a_number_from_nowhere_is_found(paper: Path) -> None:
    put(paper, "first/d", 0, 0.1)
    rendered(paper)
    allowed = numbers_that_results_give(load_table("tiny/table1"), paper)
    assert set(numbers_in(body_of("tiny/table1", paper))) <= allowed
    readme = paper / "README.md"
    readme.write_text(readme.read_text().replace("0.1000", "0.0900"))
    assert set(numbers_in(body_of("tiny/table1", paper))) - allowed == {"0.0900"}


@pytest.mark.parametrize("name", table_names())
def test_every_table_of_the_papers_is_sound(name: str) -> None:
    table = load_table(name)
    assert table.title
    assert (PAPERS / table.paper).is_dir()
    for row in table.rows:
        assert row.preset or row.lipschitz
        if row.preset:
            table.settings(row, row.config(0))
        assert not table.audit or row.config(0).data.outliers.source, "there is nothing to audit"
    used = {value for row in table.rows for value in row.published}
    assert used <= {column.published for column in table.columns}
    for part in table.parts:
        assert table.audit or not part.outliers
        if part.reference.row:
            assert len((load_table(part.reference.table or name)).chosen([part.reference.row])) == 1


def test_results_belong_to_rows() -> None:
    known = {row.identity for name in table_names() for row in load_table(name).rows}
    for paper in {name.partition("/")[0] for name in table_names()}:
        for path, result in Results.read(PAPERS / paper / "results").found.items():
            assert result.config in known, f"{result.row} is not what its table asks for any more"
            if result.preset:
                assert result.config == identity(load_config(result.preset, result.overrides)), path


def test_the_bound_of_figure_6_needs_no_run(tmp_path: Path) -> None:
    table = load_table("align-fl/fig6")
    write_bounds(table, tmp_path)
    results = Results.read(tmp_path / "align-fl" / "results")
    (row,) = table.chosen(["1e-6"])
    (result,) = results.of(row.identity)
    alpha = 2 * 1e-6 * latent_radius(2, 1e-5) * 28
    assert result.metrics["bound/epsilon/radius-28"] == pytest.approx(2 * 10 * 25_000 * math.sqrt(alpha))
    assert result.metrics["bound/vacuous/radius-28"] == (alpha >= 0.25) == 0
    assert "| Lipschitz constant 1e-6 |" in render(table, results, tmp_path)
    assert tasks_of([table], tmp_path) == []


def test_the_page_about_reproduction_lists_every_table() -> None:
    page = (PAPERS.parent / "docs" / "reproduction.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|.*?\| (`.+`) \| \[(\w+\.md)\]\(\.\./papers/([\w-]+)/", page, re.MULTILINE)
    listed = {f"{paper}/{table}": file for tables, file, paper in rows for table in re.findall(r"`([^`]+)`", tables)}
    assert {f"fissionvae/table{number}" for number in (1, 2, 3)} < set(listed) == set(table_names())
    for name, file in listed.items():
        table = load_table(name)
        assert page_of(PAPERS / table.paper, table).name == file


@pytest.mark.parametrize("page", sorted(PAPERS.glob("*/README.md")), ids=lambda page: page.parent.name)
def test_a_papers_page_is_one_screen(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 1000
    assert (page.parent / "appendix.md").is_file()


@pytest.mark.parametrize("name", [name for name in table_names() if name.endswith("/summary")])
def test_a_summary_has_six_columns_and_no_row_without_a_result(name: str) -> None:
    table = load_table(name)
    text = render(table, Results.of_papers(PAPERS), PAPERS / table.paper)
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert {len(row) for row in rows[:1] + rows[2:]} == {len(rows[0])} <= {5, 6}
    assert [row[-1] for row in rows] == ["seeds", rows[1][-1], *["3"] * len(table.rows)]
    assert "Measured on" not in text


def test_a_column_that_no_file_tells_of_is_named(paper: Path) -> None:
    declared = paper.parents[1] / "tables" / "tiny" / "table1.toml"
    declared.write_text(declared.read_text().replace('columns = ["FID, published"', 'columns = ["FID, publsihed"'))
    with pytest.raises(ConfigError, match="unknown column 'FID, publsihed'; did you mean 'FID, published'"):
        load_table("tiny/table1")
