from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import ConfigError
from fedloom.experiment import load, train
from fedloom.reports.report import write_report
from html_pages import Page
from support import tiny_config

Reported = Callable[..., Page]


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def page(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of the tiny run, for tests that only look."""
    out = tmp_path_factory.mktemp("page") / "tiny.html"
    write_report([load(trained)], out)
    found = Page(out.read_text(encoding="utf-8"))
    found.numbers = json.loads(out.with_suffix(".json").read_text())["runs"][0]
    return found


def test_the_page_stands_alone(page: Page) -> None:
    page.assert_harmless()
    assert "http" not in re.sub(r'"data:image[^"]*"', "", page.html).replace("http-equiv", "").replace(
        'xmlns="http://www.w3.org/2000/svg"', ""
    )
    assert page.html.startswith("<!DOCTYPE html>")
    assert len(page.html) < 1_000_000


def test_only_its_own_script_and_style_may_run(page: Page) -> None:
    (policy,) = (meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'; img-src data:" in policy


def test_sections_come_in_order(page: Page) -> None:
    assert [section["id"] for section in page.all("section")] == [
        *("samples", "silos", "sharing", "metrics", "training", "reconstructions", "interpolations", "latent-space"),
        *("prior-swap", "nearest-neighbours", "egress", "privacy", "reproduce", "environment", "configuration"),
    ]


def test_its_numbers_are_those_of_the_run(page: Page, trained: Path) -> None:
    numbers, rows = page.numbers, logged(trained, "metrics.jsonl")
    keys = [key for key, value in rows[0].items() if key != "round" and isinstance(value, int | float)]
    assert set(keys) | {"bytes"} == set(numbers["metrics"])
    assert {"seconds", "blend/domain-cnn/n1000/group=mnist"} < set(keys)
    for key in keys:
        assert numbers["metrics"][key] == [[row["round"], row[key]] for row in rows]
    sent = Counter[str]()
    for row in logged(trained, "egress.jsonl"):
        sent[row["silo"]] += row["bytes"]
    assert {silo["name"]: silo["bytes"] for silo in numbers["silos"]} == sent
    assert [silo["records"] for silo in numbers["silos"]] == [40] * 4
    assert all(sum(silo["classes"].values()) == 40 for silo in numbers["silos"])
    assert numbers["config"] == load(trained).config.to_mapping()
    assert numbers["environment"]["python"] == load(trained).folder.environment["python"]
    assert numbers["samples"] == {"mnist": [1, 2], "fashion-mnist": [1, 2]}
    assert numbers["guarantee"] == "no DP guarantee"
    assert numbers["findings"] == []


def test_it_says_what_people_ask(page: Page) -> None:
    for words in (
        "demo: fissionvae",
        "no DP guarantee",
        "Nothing in the numbers of this run calls for a warning.",
        "encoder@all, decoder@group=mnist",
        "declared public: the silo's number of records",
        "0.125",
        "fedloom run ",
        "[participation]",
    ):
        assert words in page.text, words
    assert "Not shown" not in page.text


def test_the_slider_has_a_picture_for_each_round_and_group(page: Page, trained: Path) -> None:
    (slider,) = page.all("input")
    assert json.loads(slider["data-rounds"]) == [1, 2]
    frames = [image for image in page.all("img") if "data-round" in image]
    assert [(image["data-round"], "hidden" in image) for image in frames] == [("1", True), ("2", False)] * 2
    assert len({image["src"] for image in frames}) == 4


def test_a_swapped_prior_is_shown_for_each_pair_of_groups(page: Page) -> None:
    assert page.text.count("prior of mnist") == page.text.count("prior of fashion-mnist") == 2
    assert page.text.count("(its own)") == 2


def test_later_evaluations_belong_to_the_history(run_folder: Path, reported: Reported) -> None:
    load(run_folder).folder.record_evaluation(2, {"recall/pixels-k5/n500/group=mnist": 0.75}, seconds=1.0)
    found = reported(run_folder)
    assert found.numbers["runs"][0]["metrics"]["recall/pixels-k5/n500/group=mnist"] == [[2, 0.75]]
    assert "0.75" in found.text


def test_what_a_deployment_sent_down_is_a_curve_beside_what_came_up(run_folder: Path, reported: Reported) -> None:
    asked = {"round": 1, "silo": "mnist-0", "event": "asked", "bytes": 2_000_000}
    rows = [asked, {**asked, "silo": "mnist-1"}, {**asked, "event": "answered"}, {**asked, "round": 2}]
    (run_folder / "silos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = reported(run_folder)
    assert found.numbers["runs"][0]["metrics"]["bytes_down"] == [[1, 4_000_000], [2, 2_000_000]]
    assert "MB that silos were sent in a round" in found.text


def test_metrics_stand_group_beside_group(run_folder: Path, reported: Reported) -> None:
    values = {
        "recall/pixels/n20": 0.5,
        "recall/pixels/n10/group=mnist": 0.25,
        "recall/pixels/n10/group=fashion-mnist": 1,
    }
    cost = "cost/bytes-up-per-round/n2/silo=mnist-0"
    more = {"recall/pixels/n400": 0.75, cost: 12.0}
    load(run_folder).folder.record_evaluation(2, more | values, seconds=1.0)
    found = reported(run_folder).html
    cells = '<td class="n">{}</td>'.format
    recall = '<td><span title="recall/pixels">Recall (pixels)</span></td>'
    assert f"{recall}{''.join(map(cells, (0.5, 0.25, 1, '20 / 10', 2)))}</tr>" in found
    assert f"{recall}{''.join(map(cells, (0.75, '', '', 400, 2)))}</tr>" in found
    words = "Bytes that left in a round</span></td><td>silo mnist-0</td><td>2 rounds</td>"
    assert f'<span title="{cost}">{words}{"".join(map(cells, (12, 2)))}</tr>' in found


def test_a_group_keeps_its_colour_in_every_chart(run_folder: Path, reported: Reported) -> None:
    for number in (1, 2):
        values = {"recall/pixels/n20": 0.5, "recall/pixels/n10/group=mnist": 0.5, "spread/pixels/n200/group=mnist": 0.5}
        load(run_folder).folder.record_evaluation(number, values, seconds=1.0)
    legends = re.findall(r'<path class="line (c\d d\d)" d="M1 5H21"/></svg>(mnist|all) ', reported(run_folder).html)
    assert sorted(set(legends)) == [("c0 d0", "all"), ("c1 d0", "mnist")]
    assert len(legends) == 4  # blend, recall twice, spread


def test_several_runs_are_compared(trained: Path, run_folder: Path, reported: Reported) -> None:
    log = run_folder / "metrics.jsonl"
    log.write_text(log.read_text().replace("0.125}", "0.75}"))
    found = reported(trained, run_folder)
    found.assert_harmless()
    one, other = found.numbers["comparison"]["blend/domain-cnn/n1000/group=mnist"].items()
    assert (one, other) == (("tiny [1]", 0.125), ("tiny [2]", 0.75))
    assert re.findall(r'<td class="n best">([^<]*)</td>', found.html) == ["0.125"]
    assert "Metrics of single runs" not in found.text
    assert [details["id"] for details in found.all("details")] == ["run1", "run2"]
    assert len(found.all("input")) == 1
    assert len([image for image in found.all("img") if "data-round" in image]) == 8
    assert "Samples of mnist look blended: the classifier cannot tell the group of 75% (domain-cnn)" in found.text


def test_the_same_run_twice_has_two_names(trained: Path, reported: Reported) -> None:
    found = reported(trained, trained)
    found.assert_harmless()
    assert [run["label"] for run in found.numbers["runs"]] == ["tiny [1]", "tiny [2]"]


@pytest.mark.parametrize(
    ("overrides", "shown", "missing"),
    [
        (("method.name=fedvae",), (), ("prior-swap", "pathways")),
        (
            ("method.hierarchy=true", "method.prior=wave", "model.top_latent=3", "model.top_hidden=[8]"),
            ("prior-swap", "pathways", "latent-space"),
            (),
        ),
        (("model.latent=2", "data.layout=centralised"), ("latent-space",), ("prior-swap",)),
        (
            ("method.name=fedgan", "model.channels=[4, 8]", "data.records_per_silo=20"),
            ("interpolations",),
            ("pathways",),
        ),
        (("sharing.scopes.encoder=silo",), ("interpolations",), ("pathways",)),
    ],
    ids=["fedvae", "hierarchy", "two-dimensions", "fedgan", "encoders-at-home"],
)
def test_every_kind_of_method_has_a_page(
    overrides: tuple[str, ...], shown: tuple[str, ...], missing: tuple[str, ...], tmp_path: Path, reported: Reported
) -> None:
    options = overrides if any("method.name" in one for one in overrides) else ("method.name=fissionvae", *overrides)
    train(tiny_config("rounds=1", *options), tmp_path / "run")
    found = reported(tmp_path / "run")
    found.assert_harmless()
    panels = found.numbers["runs"][0]["panels"]
    assert all(not panels[name]["missing"] for name in shown)
    assert not set(missing) & set(panels)
    if "method.name=fedgan" in options:
        assert panels["latent-space"]["missing"] == "method 'fedgan' has no encoder"
    if "sharing.scopes.encoder=silo" in options:
        assert "never leave the silos" in panels["reconstructions"]["missing"]
        assert "keeps encoder" in found.html
    assert ("records were pooled" in found.html) == ("data.layout=centralised" in options)
    assert ("records stayed at their silos" in found.html) == ("data.layout=centralised" not in options)


def test_two_latent_dimensions_are_shown_as_they_are(tmp_path: Path, reported: Reported) -> None:
    train(tiny_config("rounds=1", "model.latent=2"), tmp_path / "run")
    numbers = reported(tmp_path / "run").numbers["runs"][0]["panels"]["latent-space"]["numbers"]
    assert (numbers["dimensions"], numbers["explained_variance"]) == (2, [])


def test_principal_components_are_centred_and_explain_less_and_less(page: Page) -> None:
    numbers = page.numbers["panels"]["latent-space"]["numbers"]
    first, second = numbers["explained_variance"]
    assert 1 >= first >= second > 0
    points = [point for group in numbers["points"].values() for point in group]
    assert len(points) == 600
    assert [sum(axis) / 600 for axis in zip(*points, strict=True)] == pytest.approx([0, 0], abs=1e-4)


def test_the_nearest_training_images_are_among_the_group(page: Page) -> None:
    numbers = page.numbers["panels"]["nearest-neighbours"]["numbers"]
    for group in ("mnist", "fashion-mnist"):
        assert numbers[group]["training_images"] == numbers[group]["training_images_searched"] == 80
        assert 0 < numbers[group]["smallest_distance_of_a_sample"] <= numbers[group]["median_distance_of_samples"]


def test_the_page_must_be_html(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out = '.*report.pdf' must end in .html"):
        write_report([load(trained)], tmp_path / "report.pdf")


def test_the_command_writes_into_the_run_folder_unless_told(run_folder: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["report", str(run_folder), "--json"])
    out = run_folder / "report.html"
    assert json.loads(found.stdout) == {
        "out": str(out),
        "json": str(run_folder / "report.json"),
        "runs": [str(run_folder)],
    }
    assert Page(out.read_text()).all("title")
    wrong = CliRunner().invoke(app, ["report", str(run_folder), "--out", str(tmp_path / "page.txt")])
    said = f"Error: --out = '{tmp_path / 'page.txt'}' must end in .html (more in docs/how-to/report.md)\n"
    assert (wrong.exit_code, wrong.stderr) == (2, said)
