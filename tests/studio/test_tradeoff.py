"""Quality over epsilon: which runs belong together, and what their chart says."""

from __future__ import annotations

from pathlib import Path

from fedloom.privacy.summary import NONE
from fedloom.studio.catalogue import FoundRun
from fedloom.studio.run_summary import Best, RunSummary
from fedloom.studio.tradeoff import tradeoffs
from html_pages import Page
from support import tiny_config


def spent(name: str, epsilon: float | None, value: float, *settings: str) -> RunSummary:
    """A run that has come to a value of one metric."""
    private = () if epsilon is None else ("privacy.mechanism=dp-sgd", f"privacy.epsilon={epsilon}")
    return RunSummary(
        FoundRun(name, name, Path(name)),
        "stamp",
        0.0,
        method="fedvae",
        data="demo",
        seed="1",
        best=(Best("frechet/pixels", value / 2, 1, value),),
        privacy=NONE if epsilon is None else f"ε {epsilon:g}",
        epsilon=epsilon,
        config=tiny_config(*private, *settings),
    )


def test_runs_that_differ_in_privacy_and_seed_alone_are_one_line() -> None:
    """Seeds of one epsilon are averaged, the newest value counts, and no privacy lies beside it as a level."""
    runs = [spent("b", 8.0, 20.0), spent("a", 2.0, 40.0, "seed=1"), spent("c", 2.0, 60.0, "seed=2", "name=c")]
    (found,) = tradeoffs([*runs, spent("free", None, 10.0)])
    assert found.title == "fedvae on demo"
    assert [(row[0].entry.name, *row[1:]) for row in found.runs.rows] == [  # type: ignore[attr-defined]
        ("a", "ε 2", "40"),
        ("c", "ε 2", "60"),
        ("b", "ε 8", "20"),
        ("free", NONE, "10"),
    ]
    ((_, chart),) = found.charts
    (hover,) = Page(f"<main>{chart}</main>").values("data-hover")
    assert "epsilon spent 2\\nwith privacy: 50\\nno DP guarantee: 10" in hover
    assert "epsilon spent 8\\nwith privacy: 20\\nno DP guarantee: 10" in hover


def test_other_settings_make_another_family() -> None:
    other = "model.latent=3"
    assert tradeoffs([spent("a", 2.0, 40.0), spent("b", 8.0, 20.0, other)]) == []
    families = [spent(f"{e}{s}", e, 1.0, *s) for e in (2.0, 8.0) for s in ((), (other,))]
    assert [len(found.runs.rows) for found in tradeoffs(families)] == [2, 2]


def test_one_epsilon_or_none_is_no_curve() -> None:
    assert tradeoffs([spent("a", 2.0, 1.0), spent("b", 2.0, 3.0, "seed=4"), spent("free", None, 1.0)]) == []
