"""The commands as people use them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from click.testing import Result
from PIL import Image
from rich.console import Console

import fedloom as package
from fedloom.cli import catalogue
from fedloom.errors import FedloomWarning
from fedloom.presets import preset_names
from support import assert_same_run

Command = Callable[..., Result]


def python(*code: str) -> str:
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list", "presets"], ["run", "--help"]])
def test_what_needs_no_torch_does_not_wait_for_it(arguments: list[str]) -> None:
    command = "from fedloom.cli import app; app(sys.argv[1:], standalone_mode=False)"
    assert python("-c", f"import sys; {command}; assert 'torch' not in sys.modules", *arguments)


def test_the_module_is_the_command() -> None:
    assert python("-m", "fedloom", "--version") == f"fedloom {package.__version__}\n"


@pytest.mark.parametrize(
    ("kind", "name", "summary"),
    [
        ("methods", "fedvae", "one VAE averaged over everybody, groups ignored"),
        ("datasets", "mnist-sample", "MNIST, 6,000 + 1,000 images, in the package"),
        ("priors", "identical", "every group N(0, I)"),
        ("metrics", "kernel", "The kernel distance of samples to held-out records."),
    ],
)
def test_list_names_each_thing_with_a_summary(fedloom: Command, kind: str, name: str, summary: str) -> None:
    assert json.loads(fedloom("list", kind, "--json").stdout)[name] == summary
    line = next(line for line in fedloom("list", kind).stdout.splitlines() if line.startswith(f"{name} "))
    assert line.split(maxsplit=1)[1].strip() == summary


def test_backbones_are_listed_with_their_families(fedloom: Command) -> None:
    found = json.loads(fedloom("list", "backbones", "--json").stdout)
    assert list(found)[-3:] == ["pixels", "timm/...", "module/..."]
    assert found["pixels"] == "Flattened values, at their own resolution or at one that is asked for."
    assert (
        found["timm/..."] == "A model of timm: pooled features before its head; weights from the hub, or from a file."
    )


def test_every_preset_is_listed_with_a_line_about_it(fedloom: Command) -> None:
    found = json.loads(fedloom("list", "presets", "--papers", "--json").stdout)
    assert list(found) == preset_names()
    assert all(found.values())


def test_preset_names_stay_whole_in_the_list(fedloom: Command) -> None:
    lines = fedloom("list", "presets", "--papers").stdout.splitlines()
    assert set(preset_names()) <= set(lines)
    assert max(map(len, lines)) <= 80


def test_run_summarises_and_tells_what_to_do_next(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = fedloom("run", tiny_toml, "rounds=1", "--out", out)
    assert (result.exit_code, result.stderr.count("\n")) == (0, 3)  # what runs, where, and its one round
    lines = result.stdout.splitlines()
    assert lines[0].startswith("fissionvae is finished, 1 of 1 round done, in 0:0")
    assert "engine  reference, 1 worker x 1 thread" in lines
    assert f"grids   {out}/samples/round-0001" in lines
    assert lines[-2:] == [
        f"next    fedloom inspect {out}",
        f"or      fedloom sample {out} --group mnist --out grid.png",
    ]


def test_a_run_that_cannot_generate_does_not_ask_to_be_sampled(
    fedloom: Command, tiny_toml: Path, tmp_path: Path
) -> None:
    nothing = ("method.name=fedvae", "sharing.scopes.encoder=silo", "sharing.scopes.decoder=silo")
    result = fedloom("run", tiny_toml, "rounds=1", *nothing, "--out", tmp_path / "run")
    assert result.stdout.splitlines()[-2:] == ["grids   none", f"next    fedloom inspect {tmp_path / 'run'}"]


def test_run_without_out_names_the_folder_itself(
    fedloom: Command, tiny_toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(fedloom("run", tiny_toml, "rounds=1", "seed=7", "method.name=fedvae", "--json").stdout)
    assert found["folder"] == "runs/demo-fedvae-s7"
    assert (tmp_path / "runs/demo-fedvae-s7/run.toml").is_file()
    assert (found["state"], found["round"], found["groups"]) == ("finished", 1, ["mnist", "fashion-mnist"])
    assert {name.rpartition("/")[2] for name in found["loss"]} >= {"nll", "kl"}


def test_resume_of_a_finished_run_says_so(fedloom: Command, finished: Path) -> None:
    result = fedloom("resume", finished)
    assert (result.exit_code, result.stderr) == (0, "")
    ending = f"nothing is left to resume in {finished}: the run is finished, 2 of 2 rounds done"
    assert result.stdout.splitlines() == [ending, "privacy: no DP guarantee"]
    assert json.loads(fedloom("resume", finished, "--json").stdout)["state"] == "finished"


def test_resume_goes_on_where_a_run_stopped(fedloom: Command, finished: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    shutil.copytree(finished, stopped)
    shutil.rmtree(stopped / "checkpoints" / "round-0002")
    (stopped / "status.json").unlink()
    found = json.loads(fedloom("resume", stopped, "--json").stdout)
    assert (found["state"], found["round"]) == ("finished", 2)
    assert_same_run(stopped, finished)


def test_a_run_that_diverges_says_so(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    explosive = ["local.optimizer=sgd", "local.learning_rate=1e12"]
    result = fedloom("run", tiny_toml, *explosive, "--out", out)
    assert result.stdout.startswith("fissionvae diverged in round 1: ")
    assert fedloom("resume", out).stdout.startswith(f"nothing is left to resume in {out}: the run diverged in round 1")
    assert json.loads(fedloom("inspect", out, "--json").stdout)["status"]["state"] == "diverged"


def test_sample_writes_a_grid_that_the_seed_determines(fedloom: Command, finished: Path, tmp_path: Path) -> None:
    def grid(name: str, *arguments: str) -> bytes:
        out = tmp_path / f"{name}.png"
        result = fedloom("sample", finished, "--group", "mnist", "--n", "9", "--out", out, *arguments, "--json")
        found = json.loads(result.stdout)
        assert (found["out"], found["group"], found["n"], found["pathway"]) == (str(out), "mnist", 9, "z1")
        with Image.open(out) as image:
            assert image.size == (3 * 28 + 4 * 2, 3 * 28 + 4 * 2)
        return out.read_bytes()

    first = grid("first")
    assert grid("again", "--seed", "0", "--round", "2", "--pathway", "z1") == first
    assert grid("other-seed", "--seed", "1") != first
    assert grid("other-round", "--round", "1") != first
    assert grid("same-prior", "--prior-of", "fashion-mnist") == first  # +D has one prior for all groups


def test_inspect_shows_what_is_shared_and_what_left(fedloom: Command, finished: Path) -> None:
    found = json.loads(fedloom("inspect", finished, "--json").stdout)
    assert found["rounds"] == {"done": 2, "planned": 2}
    assert found["checkpoints"] == [1, 2]
    assert found["plan"]["encoder"] == {"scope": "global", "up": True, "down": "merged"}
    assert found["plan"]["decoder"] == {"scope": "group", "up": True, "down": "merged"}
    # One hidden layer of 16, latent 4: weights and biases in float32, and two weights of 8 bytes (all, group).
    encoder = 784 * 16 + 16 + 16 * 8 + 8
    decoder = 4 * 16 + 16 + 16 * 784 + 784
    sent = 4 * (encoder + decoder) + 2 * 8
    silos = ["fashion-mnist-0", "fashion-mnist-1", "mnist-0", "mnist-1"]
    assert found["bytes_up"] == {silo: {"1": sent, "2": sent} for silo in silos}
    text = fedloom("inspect", finished).stdout
    assert "rounds  2 of 2 done, checkpoints of 1, 2" in text.splitlines()
    assert ["decoder", "group", "yes", "merged"] in [line.split() for line in text.splitlines()]
    assert ["mnist-0", "2", "104.4", "kB", "208.9", "kB"] in [line.split() for line in text.splitlines()]


def test_inspect_shows_what_a_deployment_sent_down(fedloom: Command, finished: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished, tmp_path / "deployed")
    asked = {"round": 1, "silo": "mnist-0", "event": "asked", "bytes": 1000}
    rows = [asked, {**asked, "event": "answered", "bytes": 7}, asked, {**asked, "round": 2, "bytes": 500}]
    (run / "silos.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(fedloom("inspect", run, "--json").stdout)
    assert found["bytes_down"] == {"mnist-0": {"1": 2000, "2": 500}}  # asked twice in the first round
    text = fedloom("inspect", run).stdout
    assert ["mnist-0", "2", "104.4", "kB", "208.9", "kB", "2.5", "kB"] in [line.split() for line in text.splitlines()]


def test_inspect_before_the_first_checkpoint(fedloom: Command, finished: Path, tmp_path: Path) -> None:
    young = tmp_path / "young"
    young.mkdir()
    for name in ("run.toml", "environment.json"):
        shutil.copy(finished / name, young / name)
    result = fedloom("inspect", young)
    assert result.exit_code == 0
    assert "rounds  0 of 2 done, no checkpoint yet" in result.stdout.splitlines()


def with_metrics(finished: Path, folder: Path, metrics: dict[str, float]) -> Path:
    """A copy of a run that was measured."""
    shutil.copytree(finished, folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[-1] |= metrics
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


HIT, BLEND = "domain-hit/domain-cnn/n100", "blend/domain-cnn/n100"


def test_compare_puts_runs_side_by_side(
    fedloom: Command, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    one = with_metrics(
        finished,
        tmp_path / "one",
        {f"{HIT}/group=a": 0.5, f"{BLEND}/group=a": 0.75, f"{HIT}/group=b": 0.25, "oddity/x/n1": 3.0},
    )
    two = with_metrics(finished, tmp_path / "two", {f"{HIT}/group=a": 1.0, f"{BLEND}/group=a": 0.125})
    found = json.loads(fedloom("compare", one, two, "--json").stdout)
    assert found["mean_domain_hit"] == {str(one): 0.375, str(two): 1.0}
    assert found["runs"][str(two)] == {f"{HIT}/group=a": 1.0, f"{BLEND}/group=a": 0.125}

    marked = fedloom("compare", one, two).stdout.replace("\x1b[1;32m", "<").replace("\x1b[0m", "")
    lines = [line.split() for line in marked.splitlines()]
    blend, hit = "Samples that look blended (domain-cnn)", "Samples in their own group (domain-cnn)"
    assert lines[1] == [*f"{blend} group a 100 samples".split(), "0.75", "<0.125"]
    assert lines[2] == [*f"{hit} group a 100 samples".split(), "0.5", "<", "1"]  # padded to the width of its column
    assert lines[3] == [*f"{hit} group b 100 samples".split(), "0.25", "-"]
    assert lines[4] == ["oddity/x", "all", "1", "3", "-"]
    # however many samples look like their own group
    assert {line[0]: line[1:3] for line in lines[-2:]} == {name: ["Not", "usable:"] for name in ("one:", "two:")}


def test_data_show_counts_records_and_labels(fedloom: Command) -> None:
    arguments = ["data", "show", "mnist-sample", "data.partition=classes", "data.silos=5", "seed=3"]
    found = json.loads(fedloom(*arguments, "--json").stdout)
    assert (found["shape"], found["held_out"], len(found["silos"])) == ([1, 28, 28], 1000, 5)
    assert sum(silo["records"] for silo in found["silos"]) == 6000
    for number, silo in enumerate(found["silos"]):
        assert silo["groups"] == ["mnist"]
        assert list(silo["classes"]) == [f"mnist/{2 * number}", f"mnist/{2 * number + 1}"]
        assert sum(silo["classes"].values()) == silo["records"]
    lines = fedloom(*arguments).stdout.splitlines()
    assert lines[0] == "mnist-sample: 5 silos, 1,000 held-out records"
    first = next(line for line in lines if line.startswith("silo-0")).split()
    assert first[1] == f"{found['silos'][0]['records']:,}"
    assert first[-1].endswith("········")
    assert "█" in first[-1][:2]


def test_data_show_takes_a_preset_with_overrides(fedloom: Command, tiny_toml: Path) -> None:
    found = json.loads(fedloom("data", "show", tiny_toml, "data.records_per_silo=7", "--json").stdout)
    assert [(silo["name"], silo["records"]) for silo in found["silos"]] == [
        ("mnist-0", 7),
        ("mnist-1", 7),
        ("fashion-mnist-0", 7),
        ("fashion-mnist-1", 7),
    ]


def test_data_get_says_where_the_data_lie(fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.federation import download

    def get(name: str, source: Path | None, destination: Path | None, progress: Callable[[int, int], None]) -> Path:
        progress(5, 0)
        progress(10, 10)
        assert (name, source, destination) == ("mnist", tmp_path / "from", tmp_path / "to")
        return tmp_path / "to" / "mnist"

    monkeypatch.setattr(download, "get", get)
    result = fedloom("data", "get", "mnist", "--from", tmp_path / "from", "--to", tmp_path / "to")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"mnist is complete and verified in {tmp_path / 'to' / 'mnist'}\n"


def test_a_warning_is_one_line_on_stderr(fedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def warns() -> dict[str, str]:
        warnings.warn("the sample is small", FedloomWarning, stacklevel=2)
        return {}

    monkeypatch.setitem(catalogue.LISTINGS, catalogue.Listed.PRIORS, warns)
    result = fedloom("list", "priors", "--json")
    assert (result.exit_code, result.stderr) == (0, "Warning: the sample is small\n")


def test_an_unexpected_exception_keeps_its_traceback(fedloom: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalogue.LISTINGS, catalogue.Listed.PRIORS, lambda: {}["bug"])
    assert isinstance(fedloom("list", "priors").exception, KeyError)


def test_ctrl_c_stops_a_run_and_tells_how_to_go_on(fedloom: Command, tiny_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "run", tiny_toml, "rounds=10000", "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that runs in the background has inherited that Ctrl-C is ignored; a person's terminal has not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not list(out.glob("checkpoints/round-*")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, "")
    assert stderr.splitlines()[-1] == f"stopped; `fedloom resume {out}` goes on"
    found = json.loads(fedloom("inspect", out, "--json").stdout)
    assert found["status"]["state"] == "unfinished"
    assert found["rounds"]["done"] >= 1


def test_progress_in_a_terminal_fits_80_columns(tiny_toml: Path, tmp_path: Path) -> None:
    from fedloom.cli.progress import RoundProgress
    from fedloom.config import load_config
    from fedloom.experiment import train

    file = StringIO()
    with RoundProgress(Console(force_terminal=True, width=80, file=file)) as progress:
        train(load_config(tiny_toml), tmp_path / "run", observer=progress)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    lines = [line.rstrip() for line in re.split(r"\x1b\[\??[0-9]*[A-Za-z]|\r|\n", plain)]
    assert "fissionvae on mixed-mnist-sample, 4 silos" in lines
    assert "groups: mnist, fashion-mnist; engine: reference, 1 worker x 1 thread" in lines
    assert any(re.fullmatch(r"round 2/2  .*  silos 4/4  \d+ steps/s  \d+:\d\d left", line) for line in lines)
    assert any(re.fullmatch(r"loss \S+  nll \S+  kl \S+", line) for line in lines)
    assert max(map(len, lines)) <= 80
