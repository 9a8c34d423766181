"""A damaged or hostile run folder neither breaks the page nor injects anything into it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fedloom.privacy.accounting import Budget
from fedloom.privacy.ledger import Ledger
from fedloom.runs.checkpoint import checkpoint_rounds, folder_of
from fedloom.runs.files import digest
from html_pages import Page

ATTACK = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>"
FILE_NAME = "'><img src=x onerror=alert(2)>"  # without slashes, which no file name has


def append(folder: Path, name: str, line: str) -> None:
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def replace_in(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text(encoding="utf-8")
    assert old in text
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    for number in checkpoint_rounds(folder):
        path = folder_of(folder, number) / "index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))


def wrong_weights(folder: Path) -> None:
    """Tensors of another model, with checksums that fit."""
    for number in checkpoint_rounds(folder):
        path = folder_of(folder, number) / "server.safetensors"
        save_file({name: tensor[:1].contiguous() for name, tensor in load_file(path).items()}, path)
    rewrite_index(folder, lambda index: index["sha256"].update({path.name: digest(path.read_bytes())}))


def nan_weights(folder: Path) -> None:
    for number in checkpoint_rounds(folder):
        path = folder_of(folder, number) / "server.safetensors"
        save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path)
    rewrite_index(folder, lambda index: index["sha256"].update({path.name: digest(path.read_bytes())}))


def group_names(folder: Path) -> None:
    rewrite_index(folder, lambda index: index["setting"].update(groups=[ATTACK, "fashion-mnist"]))


def sample_names(folder: Path) -> None:
    grid = folder / "samples" / "round-0002" / "mnist.png"
    shutil.copy(grid, grid.with_name(f"{FILE_NAME}.png"))
    grid.with_name(f"broken {FILE_NAME}.png").write_bytes(b"nothing")


def ledger_of_nonsense(folder: Path) -> None:
    replace_in(folder, "run.toml", 'mechanism = "none"', 'mechanism = "dp-sgd"')
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.enrol("mnist-0", "digest", Budget(8.0, 1e-5))
    ledger.close()
    with contextlib.closing(sqlite3.connect(ledger.path)) as charged:
        charged.execute("INSERT INTO charges VALUES (1, 'run', 'mnist-0', 1, 'update', 0, '7', NULL)")
        charged.commit()


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "markup in a metric": (
        lambda folder: append(folder, "metrics.jsonl", json.dumps({"round": 2, f"recall/{ATTACK}/n5": 0.5})),
        ATTACK,
    ),
    "markup in an evaluation": (
        lambda folder: append(
            folder, "evaluations.jsonl", json.dumps({"round": 2, "key": f"recall/x/n500/group={ATTACK}", "value": 1})
        ),
        ATTACK,
    ),
    "markup in the environment": (
        lambda folder: (folder / "environment.json").write_text(json.dumps({"command": ATTACK, ATTACK: {ATTACK: 1}})),
        ATTACK,
    ),
    "markup in the status": (
        lambda folder: (folder / "status.json").write_text(
            json.dumps({"state": "diverged", "round": ATTACK, "reason": ATTACK})
        ),
        ATTACK,
    ),
    "markup in the state": (
        lambda folder: (folder / "status.json").write_text(json.dumps({"state": ATTACK})),
        ATTACK,
    ),
    "a status that is none": (lambda folder: (folder / "status.json").write_text("[1]"), "no DP guarantee"),
    "more rounds than any number": (
        lambda folder: replace_in(folder, "run.toml", "rounds = 2\n", f"rounds = {'9' * 400}\n"),
        "no DP guarantee",
    ),
    "markup in the egress log": (
        lambda folder: append(
            folder,
            "egress.jsonl",
            json.dumps({"round": 1, "silo": ATTACK, "bytes": 5, "blocks": {ATTACK: {}}, "payloads": [ATTACK]}),
        ),
        ATTACK,
    ),
    "markup in the name": (
        lambda folder: replace_in(folder, "run.toml", 'name = "demo"', f"name = {json.dumps(ATTACK)}"),
        ATTACK,
    ),
    "markup in the data's path": (
        lambda folder: replace_in(folder, "run.toml", 'path = ""', f"path = {json.dumps(ATTACK)}"),
        ATTACK,
    ),
    "markup in groups": (group_names, ATTACK),
    "markup in file names": (sample_names, FILE_NAME),
    "half of a surrogate pair": (
        lambda folder: append(folder, "metrics.jsonl", '{"round": 2, "recall/\\ud800/n500": 0.5}'),
        "Recall (?)",
    ),
    "huge and infinite numbers": (
        lambda folder: append(
            folder,
            "metrics.jsonl",
            f'{{"round": 3, "a/b": 1e308, "a/c": -1e308, "a/d": NaN, "a/e": -Infinity, "a/f": 1{"0" * 400}}}\n'
            '{"round": 4, "a/b": -1e308, "a/c": 1e-320, "a/d": 1, "a/e": 1, "a/f": 2}',
        ),
        "a/e is not a finite number in round 3",
    ),
    "numbers of the wrong kind": (
        lambda folder: append(
            folder,
            "egress.jsonl",
            '{"round": 1, "silo": 5}\n{"round": 1, "silo": "x", "bytes": -1, "blocks": 7, "payloads": {"a": [1]}}\n'
            '{"round": 1, "silo": "x", "bytes": 1e99, "blocks": [[1]], "payloads": null}',
        ),
        "no DP guarantee",
    ),
    "markup in an audit": (
        lambda folder: (folder / "audit.json").write_text(
            json.dumps(
                {
                    "sentences": [ATTACK],
                    "attacks": {
                        "membership": [{"target": ATTACK, "area": 10**400, "true_positive_rates": [1]}, 7],
                        "outliers": [{"way": ATTACK, "typical": {"value": 1, "low": "x", "high": None}}],
                    },
                }
            )
        ),
        ATTACK,
    ),
    "an audit of the wrong kind": (
        lambda folder: (folder / "audit.json").write_text('{"sentences": 5, "attacks": [1], "refuted": 1}'),
        "no DP guarantee",
    ),
    "a broken audit": (
        lambda folder: (folder / "audit.json").write_text("{"),
        "audit.json cannot be read (JSONDecodeError)",
    ),
    "a ledger of nonsense": (ledger_of_nonsense, "ledger.sqlite cannot be read (TypeError)"),
    "broken lines": (lambda folder: append(folder, "metrics.jsonl", '{"round": 3, "tr'), "no DP guarantee"),
    "a log in another encoding": (
        lambda folder: (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\x00"),
        "metrics.jsonl cannot be read (UnicodeDecodeError)",
    ),
    "a log too deep": (
        lambda folder: (folder / "egress.jsonl").write_text("[" * 100_000),
        "egress.jsonl cannot be read (RecursionError)",
    ),
    "an environment that is none": (
        lambda folder: (folder / "environment.json").write_text("[1, 2]"),
        "no DP guarantee",
    ),
    "a broken status": (
        lambda folder: (folder / "status.json").write_text("{"),
        "status.json cannot be read (JSONDecodeError)",
    ),
    "no logs": (
        lambda folder: [(folder / name).unlink() for name in ("metrics.jsonl", "egress.jsonl", "environment.json")],
        "The egress log is empty",
    ),
    "no checkpoint": (lambda folder: shutil.rmtree(folder / "checkpoints"), "there is no generator to ask"),
    "a damaged checkpoint": (
        lambda folder: [
            (folder_of(folder, number) / "server.safetensors").write_bytes(b"?") for number in checkpoint_rounds(folder)
        ],
        "does not match its checksum",
    ),
    "a checkpoint of another model": (wrong_weights, "the checkpoint does not fit this run (RuntimeError"),
    "a checkpoint without a setting": (
        lambda folder: rewrite_index(folder, lambda index: index.pop("setting")),
        "the checkpoint does not fit this run (KeyError",
    ),
    "weights that are no numbers": (nan_weights, "Latent space"),
    "no samples": (lambda folder: shutil.rmtree(folder / "samples"), "There are no sample grids"),
    "a broken sample": (
        lambda folder: (folder / "samples" / "round-0002" / "mnist.png").write_bytes(b"\x89PNG\r\n\x1a\n"),
        "Not readable as a picture: samples/round-0002/mnist.png",
    ),
    "odd things among the samples": (
        lambda folder: [
            (folder / "samples" / name).mkdir(parents=True) for name in ("round-x", f"round-{'9' * 200}", "round-0007")
        ],
        "no DP guarantee",
    ),
    "other data": (
        lambda folder: replace_in(folder, "run.toml", "records_per_silo = 40", "records_per_silo = 41"),
        "the data that run.toml describes are not those it was trained on",
    ),
    "no data": (
        lambda folder: replace_in(
            folder, "run.toml", 'source = "mixed-mnist-sample"\npath = ""', 'source = "charm"\npath = "nowhere"'
        ),
        "the data cannot be loaded again",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_page_survives(damage: str, run_folder: Path, reported: Callable[..., Page]) -> None:
    act, words = DAMAGES[damage]
    act(run_folder)
    page = reported(run_folder)
    page.assert_harmless()
    assert words in page.text
    assert "nan" not in " ".join(page.values("d") + page.values("x") + page.values("y"))
    assert [section["id"] for section in page.all("section")][-1] == "configuration"


def test_a_comparison_survives_as_well(trained: Path, tmp_path: Path, reported: Callable[..., Page]) -> None:
    folders = []
    for number, name in enumerate(("markup in a metric", "no checkpoint", "no samples", "no logs")):
        folders.append(Path(shutil.copytree(trained, tmp_path / f"{number} {FILE_NAME}")))
        DAMAGES[name][0](folders[-1])
    page = reported(trained, *folders)
    page.assert_harmless()
    assert page.text.count(FILE_NAME) > 4
    assert len(page.numbers["runs"]) == 5
