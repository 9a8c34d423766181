from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.killing import sweep_until_killed
from fedloom import sweep
from fedloom.cluster import Cluster, JobCall
from fedloom.engines.fused_support import UnsupportedError
from fedloom.errors import ConfigError, FedloomWarning
from fedloom.experiment import Observer, RunLoop
from fedloom.federation.records import Federation, Records, Silo
from fedloom.presets import preset_names
from fedloom.privacy.ledger import read_accounts
from fedloom.runs.checkpoint import load_checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.sweep import Federations, Outcome, Trial, pack_of, packs_of, read_sweep, run_sweep, sweep_on
from support import assert_same_run, grids, logged, names_in, tiny_config

Written = Callable[[str], Path]


@contextmanager
def unobserved(packed: Sequence[Trial]) -> Iterator[Observer]:
    yield Observer()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """A sweep file beside the tiny experiment that it starts from."""
    (tmp_path / "tiny.toml").write_text(tiny_config().to_toml(), encoding="utf-8")

    def write(text: str) -> Path:
        path = tmp_path / "sweep.toml"
        path.write_text(f'base = "tiny.toml"\n{text}', encoding="utf-8")
        return path

    return write


def test_every_combination_with_a_name_of_its_own(written: Written) -> None:
    trials = read_sweep(
        written(
            """
            [grid]
            seed = [1, 2]
            method.name = ["fedvae", "fissionvae"]
            "model.hidden" = [[8], [8, 4]]
            local.epochs = [1]
            [[variant]]
            name = "plain"
            [[variant]]
            name = "long"
            overrides.rounds = 3
            """
        )
    )
    assert len(trials) == 2 * 2 * 2 * 2
    assert [trial.name for trial in trials][:3] == [
        "plain-fedvae-hidden-8-seed-1",
        "plain-fedvae-hidden-8-4-seed-1",
        "plain-fissionvae-hidden-8-seed-1",
    ]
    by_name = {trial.name: trial.config for trial in trials}
    assert len(by_name) == 16
    config = by_name["long-fissionvae-hidden-8-4-seed-2"]
    assert (config.seed, config.rounds, config.method.name, config.model.hidden) == (2, 3, "fissionvae", (8, 4))
    assert by_name["plain-fedvae-hidden-8-seed-1"].rounds == 2


def test_another_method_takes_none_of_the_options_of_the_base(tmp_path: Path) -> None:
    base = next(name for name in preset_names() if name.endswith("mixed-mnist/federated/l-d"))
    path = tmp_path / "sweep.toml"
    path.write_text(f'base = "{base}"\n[grid]\nmethod.name = ["fedvae"]\nseed = [1]')
    (trial,) = read_sweep(path)
    assert (trial.config.method.name, trial.config.method.options) == ("fedvae", {})


def test_a_variants_options_go_with_the_grids_method(written: Written) -> None:
    text = '[grid]\nmethod.name = ["fissionvae"]\n[[variant]]\nname = "w"\noverrides.method.prior = "wave"'
    assert read_sweep(written(text))[0].config.method.options == {"prior": "wave"}


def test_names_that_coincide_are_told_apart(written: Written) -> None:
    names = [trial.name for trial in read_sweep(written('[grid]\ndata.path = ["a b", "a_b"]\nrounds = [1, 2]'))]
    assert len(set(names)) == 4
    assert all(name.startswith("path-a_b-rounds-") for name in names)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[gird]\nseed = [1]", ["unknown key 'gird'", "did you mean 'grid'"]),
        ("[grid]\nseed = 1", ["grid.seed = 1", "list of at least one value"]),
        ("[grid]\nseed = []", ["grid.seed = []", "list of at least one value"]),
        ("[grid]\nsed = [1]", ["unknown key 'sed'", "did you mean 'seed'"]),
        ("[grid]\nrounds = [0]", ["rounds = 0", "at least 1"]),
        ("[grid]\nseed = [1, 1]", ["same settings", "seed-1"]),
        ("grid = 3", ["grid = 3", "table of lists"]),
        ("[variant]\nname = 'a'", ["[[variant]]"]),
        ("[[variant]]\nnmae = 'a'", ["unknown variant key 'nmae'", "did you mean 'name'"]),
        ("[[variant]]\noverrides.seed = 1", ["variant.name = None"]),
        ("[[variant]]\nname = 'a'\noverrides = 3", ["variant.overrides = 3"]),
    ],
)
def test_mistakes_are_said_before_anything_runs(written: Written, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read_sweep(written(text))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("base = 3", "base = 3 must be"),
        ("", "base = None must be"),
        ('base = "dmeo"', "did you mean 'demo'"),
        ('base = "nowhere.toml"', "cannot read"),
        ("base = = 3", "not valid TOML"),
    ],
)
def test_a_sweep_needs_a_base(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_sweep(path)


def test_a_missing_sweep_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_sweep(tmp_path / "sweep.toml")


def test_a_sweep_goes_on_after_a_diverged_and_a_failed_run_and_records_both(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
        [[variant]]
        name = "exploding"
        overrides.local.optimizer = "sgd"
        overrides.local.learning_rate = 1e12
        [[variant]]
        name = "missing"
        overrides.data.source = "mixed-mnist"
        [[variant]]
        name = "broken"
        overrides.rounds = 4
        [[variant]]
        name = "well"
        overrides.rounds = 1
    """
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    train = sweep.train

    def train_or_break(config, out, observer):
        return 1 / 0 if config.rounds == 4 else train(config, out, observer=observer)

    monkeypatch.setattr(sweep, "train", train_or_break)
    trials = read_sweep(written(text))
    outcomes = run_sweep(trials, tmp_path / "out", unobserved)
    states = {name: outcome.state for name, outcome in outcomes.items()}
    assert states == {"exploding": "diverged", "missing": "failed", "broken": "failed", "well": "finished"}
    assert "fedloom data get" in outcomes["missing"].reason
    assert outcomes["broken"].reason == "ZeroDivisionError: division by zero"
    assert "train_or_break" in outcomes["broken"].trace
    recorded = json.loads((tmp_path / "out" / "sweep.json").read_text())["trials"]
    assert {name: Outcome(**outcome) for name, outcome in recorded.items()} == outcomes

    monkeypatch.setattr(sweep, "train", train)
    started: list[str] = []

    class Started(Observer):
        def started(self, experiment, engine, rounds_done):
            started.append(experiment.config.rounds)

    @contextmanager
    def observe(packed: Sequence[Trial]) -> Iterator[Observer]:
        yield Started()

    again = run_sweep(trials, tmp_path / "out", observe)
    assert started == [4]  # what failed is tried again; what ended is left alone
    assert again["broken"] == Outcome("finished")
    assert again["exploding"] == outcomes["exploding"]


def test_a_folder_with_other_settings_is_left_alone(written: Written, tmp_path: Path) -> None:
    run_sweep(read_sweep(written("[[variant]]\nname = 'a'\noverrides.rounds = 1")), tmp_path / "out", unobserved)
    outcomes = run_sweep(
        read_sweep(written("[[variant]]\nname = 'a'\noverrides.rounds = 2")), tmp_path / "out", unobserved
    )
    assert outcomes["a"].state == "failed"
    assert "other settings" in outcomes["a"].reason
    assert RunFolder.open(tmp_path / "out" / "a").rounds_done == 1


def test_a_killed_sweep_goes_on_where_it_stopped(written: Written, tmp_path: Path) -> None:
    path = written("[grid]\nseed = [1, 2]\nrounds = [3]")
    out = tmp_path / "out"
    sweep_until_killed(path, out, "seed-2")
    assert RunFolder.open(out / "seed-2").rounds_done == 1
    assert RunFolder.open(out / "seed-1").status["state"] == "finished"
    assert RunFolder.open(out / "seed-2").status["state"] == "unfinished"
    before = {file: file.stat().st_mtime_ns for file in (out / "seed-1").rglob("*")}

    trials = read_sweep(path)
    assert {outcome.state for outcome in run_sweep(trials, out, unobserved).values()} == {"finished"}
    assert {file: file.stat().st_mtime_ns for file in (out / "seed-1").rglob("*")} == before
    run_sweep(trials, tmp_path / "whole", unobserved)
    assert names_in(out) == [*(trial.name for trial in trials), "sweep.json"]
    for trial in trials:
        assert_same_run(out / trial.name, tmp_path / "whole" / trial.name)


PACKABLE = """
    [grid]
    seed = [1, 2]
    engine.name = ["fused"]
    evaluation.every = [2]
    rounds = [3]
    participation.rate = [0.7]
    [[variant]]
    name = "fedvae"
    [[variant]]
    name = "random"
    overrides.method = { name = "fissionvae", prior = "random" }
"""


DP_SGD = "'privacy.mechanism' = ['dp-sgd']\n'privacy.accountant' = ['rdp']"
PRETRAINING = "'privacy.pretraining' = [2]\n'sharing.scopes.encoder' = ['silo']"


class Here(Cluster):
    """Jobs that are done at once, in this process."""

    def carry_out(self, calls: Sequence[JobCall], say: Callable[[str], None]) -> dict[str, Any]:
        """What a cluster would."""
        for call in calls:
            say(",".join(call.names))
        return {name: found for call in calls for name, found in call.work().items()}


def test_packs_are_jobs_and_only_what_has_not_ended_is_asked_for(written: Written, tmp_path: Path) -> None:
    text = '[grid]\nengine.name = ["fused"]\nseed = [1, 2, 3]\n'
    trials, out, heard = read_sweep(written(text)), tmp_path / "jobs", list[str]()
    place = Here("local", tmp_path / "unused")
    outcomes = sweep_on(place, trials[:2], out, 2, heard.append)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {"seed-1": "finished", "seed-2": "finished"}
    outcomes = sweep_on(place, trials, out, 2, heard.append)
    assert heard == ["seed-1,seed-2", "seed-3"]
    assert list(outcomes) == ["seed-1", "seed-2", "seed-3"]
    assert json.loads((out / "sweep.json").read_text())["trials"].keys() == outcomes.keys()
    alone = tmp_path / "alone"
    run_sweep(trials, alone, unobserved, 2)
    for trial in trials:
        assert_same_run(out / trial.name, alone / trial.name)


def test_a_trial_that_fails_in_its_job_is_told(tmp_path: Path) -> None:
    trials = [Trial("good", tiny_config()), Trial("bad", tiny_config("data.source=npz", "data.path=nowhere.npz"))]
    outcomes = sweep_on(Here("local", tmp_path), trials, tmp_path / "out", 1, print)
    assert outcomes["good"] == Outcome("finished")
    assert outcomes["bad"].state == "failed"
    assert "nowhere.npz" in outcomes["bad"].reason


def tensors_of(path: Path) -> dict[str, Tensor]:
    checkpoint = load_checkpoint(path)
    return checkpoint.server | {f"{s}/{n}": t for s, kept in checkpoint.silos.items() for n, t in kept.items()}


def assert_nearly_same_run(one: Path, other: Path) -> None:
    """What left is the same; numbers are, up to rounding."""
    ours, theirs = logged(one), logged(other)
    assert ours["egress"] == theirs["egress"]
    for row, wanted in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert row.pop("participants") == wanted.pop("participants")
        assert row == pytest.approx(wanted, rel=1e-3)
    assert grids(one).keys() == grids(other).keys()
    for name, tensor in tensors_of(other).items():
        torch.testing.assert_close(tensors_of(one)[name], tensor, rtol=1e-3, atol=1e-4)


class Stopping(Observer):
    """Stops in the second round after the first run of the pack is on disk, so that the others are behind."""

    def round_done(self, report, metrics):
        if report.context.round == 2:
            raise KeyboardInterrupt


@contextmanager
def stopping(packed: Sequence[Trial]) -> Iterator[Observer]:
    yield Stopping()


def test_packed_trials_end_as_they_end_alone_and_as_if_never_stopped(written: Written, tmp_path: Path) -> None:
    trials = read_sweep(written(PACKABLE))
    run_sweep(trials, tmp_path / "alone", unobserved, pack=1)
    seen: list[list[str]] = []

    @contextmanager
    def observe(packed: Sequence[Trial]) -> Iterator[Observer]:
        seen.append([trial.name for trial in packed])
        yield Observer()

    outcomes = run_sweep(trials, tmp_path / "packed", observe, pack=3)
    assert seen == [["fedvae-seed-1", "fedvae-seed-2", "random-seed-1"], ["random-seed-2"]]
    assert {outcome.state for outcome in outcomes.values()} == {"finished"}
    assert "3 runs packed" in RunFolder.open(tmp_path / "packed" / "fedvae-seed-2").environment["engine"]
    for trial in trials:
        assert_nearly_same_run(tmp_path / "packed" / trial.name, tmp_path / "alone" / trial.name)

    with pytest.raises(KeyboardInterrupt):
        run_sweep(trials, tmp_path / "stopped", stopping, pack=3)
    assert [RunFolder.open(tmp_path / "stopped" / name).rounds_done for name in seen[0]] == [2, 1, 1]
    run_sweep(trials, tmp_path / "stopped", unobserved, pack=3)
    for trial in trials:
        assert_nearly_same_run(tmp_path / "stopped" / trial.name, tmp_path / "alone" / trial.name)


# Noise 1 for 3 steps of batches of 16 out of 40 records: a round costs epsilon 3.9, and two cost 5.4.
PRIVATE = f"""
    [grid]
    engine.name = ["fused"]
    local.epochs = [1]
    rounds = [3]
    {DP_SGD}
    'privacy.noise_multiplier' = [1.0]
    [[variant]]
    name = "rich"
    overrides = {{ seed = 1, privacy.epsilon = 20.0, privacy.clip = 0.5 }}
    [[variant]]
    name = "poor"
    overrides = {{ seed = 2, privacy.epsilon = 5.0 }}
"""


@pytest.mark.filterwarnings("ignore:silo '.*' sits out")
@pytest.mark.parametrize("noise", ["secure", "test"])
def test_packed_private_trials_spend_what_they_spend_alone(noise: str, written: Written, tmp_path: Path) -> None:
    """Also if they were stopped: a round that is done again is not paid again. One of them runs out of budget.

    They learn the same where their noise is the same, for which there is no budget to keep to.
    """
    trials = read_sweep(written(PRIVATE.replace("[grid]", f"[grid]\n    privacy.noise = ['{noise}']")))
    run_sweep(trials, tmp_path / "alone", unobserved, pack=1)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(trials, tmp_path / "packed", stopping, pack=2)
    run_sweep(trials, tmp_path / "packed", unobserved, pack=2)
    for trial in trials:
        alone, packed = (RunFolder.open(tmp_path / way / trial.name) for way in ("alone", "packed"))
        assert "2 runs packed" in packed.environment["engine"]
        assert read_accounts(packed.ledger) == read_accounts(alone.ledger)
        attended = [len(row["participants"]) for row in packed.metrics()]
        if noise == "test":
            assert_nearly_same_run(packed.path, alone.path)
        else:
            assert attended == {"rich": [4, 4, 4], "poor": [4, 0, 0]}[trial.name]


def test_a_trial_that_fails_leaves_its_pack(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = RunLoop._evaluate

    def evaluate_or_break(life, *arguments):
        return 1 / 0 if life.experiment.config.seed == 2 else evaluate(life, *arguments)

    monkeypatch.setattr(RunLoop, "_evaluate", evaluate_or_break)
    trials = read_sweep(written("[grid]\nseed = [1, 2, 3]\nengine.name = ['fused']"))
    with pytest.warns(FedloomWarning, match="seed-2 left its pack: division by zero"):
        outcomes = run_sweep(trials, tmp_path / "out", unobserved, pack=3)
    assert [outcome.state for outcome in outcomes.values()] == ["finished", "failed", "finished"]
    assert "evaluate_or_break" in outcomes["seed-2"].trace


def test_a_pack_that_cannot_be_made_is_run_one_by_one(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_):
        raise UnsupportedError("no")

    monkeypatch.setattr(sweep, "make_pack", refuse)
    trials = read_sweep(written("[grid]\nseed = [1, 2]\nengine.name = ['fused']\nrounds = [1]"))
    with pytest.warns(FedloomWarning, match="the pack of seed-1, seed-2 broke up: no"):
        outcomes = run_sweep(trials, tmp_path / "out", unobserved, pack=2)
    assert [outcome.state for outcome in outcomes.values()] == ["finished", "finished"]


@pytest.mark.parametrize(
    ("text", "pack", "sizes"),
    [
        ("engine.name = ['fused']", 2, [2, 1]),
        ("engine.name = ['fused']", "auto", [1, 1, 1]),  # no GPU
        ("engine.name = ['auto']", 3, [1, 1, 1]),
        (f"engine.name = ['fused']\n{DP_SGD}\n'privacy.noise_multiplier' = [1.0, 2.0]", 3, [3, 3]),
        (f"engine.name = ['fused']\n{DP_SGD}\n'privacy.noise_multiplier' = [1.0]\n{PRETRAINING}", 3, [1, 1, 1]),
    ],
)
def test_what_is_packed(written: Written, tmp_path: Path, text: str, pack: sweep.Pack, sizes: list[int]) -> None:
    trials = read_sweep(written(f"[grid]\nseed = [1, 2, 3]\n{text}"))
    assert [len(packed) for packed in packs_of(trials, tmp_path, pack, Federations())] == sizes


class Vectors(Federations):
    """One silo of labelled vectors, whatever is asked for."""

    def data(self, config):
        records = Records(torch.eye(40, 6), torch.arange(40) % 2, torch.zeros(40, dtype=torch.int64))
        return Federation("vectors", (Silo("s", records),), records, ("all",), ("ant", "bee"))


@pytest.mark.parametrize(("method", "sizes"), [("dp_cvae", [2]), ("moments", [1, 1])])
def test_what_trains_nothing_is_not_packed(method: str, sizes: list[int], written: Written, tmp_path: Path) -> None:
    trials = read_sweep(written(f"[grid]\nseed = [1, 2]\nengine.name = ['fused']\nmethod.name = ['{method}']"))
    assert [len(packed) for packed in packs_of(trials, tmp_path, 2, Vectors())] == sizes


def test_on_a_gpu_runs_are_packed_until_silos_fill_the_program(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep, "CUDA_CHUNK", 9)  # two runs of four silos
    trials = read_sweep(written("[grid]\nseed = [1, 2, 3]\nengine.name = ['auto']"))
    assert [len(packed) for packed in packs_of(trials, tmp_path, "auto", Federations())] == [2, 1]


@pytest.mark.parametrize(("text", "wanted"), [("auto", "auto"), ("off", 1), ("4", 4)])
def test_how_packing_is_asked_for(text: str, wanted: sweep.Pack) -> None:
    assert pack_of(text) == wanted


@pytest.mark.parametrize("text", ["on", "1", "-2", "2.5"])
def test_packing_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--pack = '{text}' must be auto, off or a number of at least 2"):
        pack_of(text)
