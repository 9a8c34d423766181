from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.config import Config, DataConfig, EngineConfig, MethodConfig, load_config
from fedloom.errors import ConfigError
from fedloom.presets import preset_names
from fedloom.settings import override, parse


def file_with(folder: Path, text: str) -> Path:
    path = folder / "experiment.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("preset", preset_names())
def test_presets_survive_the_round_trip_through_toml(preset: str, tmp_path: Path) -> None:
    config = load_config(preset)
    assert load_config(file_with(tmp_path, config.to_toml())) == config


def test_defaults_and_method_options_survive_the_round_trip(tmp_path: Path) -> None:
    options = {"prior": "wave", "decoder": "global"}
    for config in (Config(), Config(method=MethodConfig(name="fissionvae", options=options))):
        assert load_config(file_with(tmp_path, config.to_toml())) == config


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(file_with(tmp_path, "")) == Config()


@pytest.mark.parametrize(
    ("assignment", "path", "expected"),
    [
        ("rounds=3", ("rounds",), 3),
        ("local.learning_rate=2e-4", ("local", "learning_rate"), 2e-4),
        ("participation.rate=1", ("participation", "rate"), 1.0),
        ("local.keep_optimizer=true", ("local", "keep_optimizer"), True),
        ("model.hidden=[8, 4]", ("model", "hidden"), (8, 4)),
        ('name="quoted"', ("name",), "quoted"),
        ("name=plain text", ("name",), "plain text"),
        ("name=a=b", ("name",), "a=b"),
        ("name=", ("name",), ""),
        ("method.prior=wave", ("method", "options"), {"prior": "wave"}),
        ("sharing.scopes.encoder=silo", ("sharing", "scopes"), {"encoder": "silo"}),
    ],
)
def test_overrides(assignment: str, path: tuple[str, ...], expected: Any) -> None:
    value: Any = load_config("demo", [assignment])
    for part in path:
        value = getattr(value, part)
    assert value == expected
    assert type(value) is type(expected)


def test_later_overrides_win_and_the_mapping_given_stays_as_it_was() -> None:
    mapping = {"rounds": 1, "local": {"epochs": 1}}
    assert override(mapping, ["local.epochs=2", "local.epochs=3"]) == {"rounds": 1, "local": {"epochs": 3}}
    assert mapping == {"rounds": 1, "local": {"epochs": 1}}


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("roundz=3", r"unknown key 'roundz'; did you mean 'rounds'\?"),
        ("local.epoch=3", r"unknown key 'local.epoch'; did you mean 'local.epochs'\?"),
        ("model.penalty=jacobi", r"model.penalty: unknown value 'jacobi'; did you mean 'jacobian'\?"),
        ("rounds=1.5", r"rounds = 1.5 must be a whole number"),
        ("rounds=true", r"rounds = True must be a whole number"),
        ("seed=many", r"seed = 'many' must be a whole number"),
        ("local.learning_rate=fast", r"local.learning_rate = 'fast' must be a number"),
        ("local.keep_optimizer=1", r"local.keep_optimizer = 1 must be true or false"),
        ("name=5", r"name = 5 must be text"),
        ("name=2026-01-31", r"name = datetime.date\(2026, 1, 31\) must be text"),
        ("model.hidden=8", r"model.hidden = 8 must be a list, each item a whole number"),
        ("model.hidden=[8.5]", r"model.hidden = 8.5 must be a whole number"),
        ("model.hidden=[8, 0]", r"model.hidden = \[8, 0\] must be a list of numbers of at least 1"),
        ("sharing.scopes=silo", r"sharing.scopes = 'silo' must be a table"),
        ("local=fast", r"local = 'fast' must be a table of settings, such as local.epochs"),
        ("method=fedvae", r"method = 'fedvae' must be a table of settings, such as method.name"),
        ("rounds=0", r"rounds = 0 must be at least 1"),
        ("rounds=-4", r"rounds = -4 must be at least 1"),
        ("participation.rate=0", r"participation.rate = 0 must be greater than 0 and at most 1"),
        ("participation.rate=1.01", r"participation.rate = 1.01 must be greater than 0 and at most 1"),
        ("local.learning_rate=inf", r"local.learning_rate = inf must be greater than 0"),
        ("participation.rate=nan", r"participation.rate = nan must be greater than 0 and at most 1"),
        ("local.learning_rate=0", r"local.learning_rate = 0 must be greater than 0"),
        ("rounds", r"override 'rounds' must look like key.sub=value"),
        ("=3", r"override '=3' must look like key.sub=value"),
        ("rounds.sub=3", r"override 'rounds.sub=3': rounds is a single value, not a table"),
    ],
)
def test_mistakes_are_named(assignment: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{complaint}"):
        load_config("demo", [assignment])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rounds = ", "is not valid TOML"),
        ("name = 2026-01-31", "must be text"),
        ("[engine]\nwrokers = 2", "did you mean 'engine.workers'"),
    ],
)
def test_mistakes_in_files_are_named(text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(file_with(tmp_path, text))


def test_a_date_among_the_options_of_a_method_reaches_the_method_as_text() -> None:
    config = load_config("demo", ["method.prior=2026-01-31"])
    assert config.to_mapping()["method"] == {"name": "fissionvae", "prior": "2026-01-31"}


def test_a_missing_file_and_an_unknown_preset_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml: No such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="unknown preset 'dmeo'; did you mean 'demo'"):
        load_config("dmeo")


def test_a_tree_made_in_python_is_checked_when_parsed() -> None:
    with pytest.raises(ConfigError, match="rounds = -1 must be at least 1"):
        parse(Config, replace(Config(), rounds=-1).to_mapping())


def test_the_digest_ignores_the_name_and_the_engine_alone() -> None:
    digest = Config().digest()
    assert replace(Config(), name="other").digest() == digest
    assert replace(Config(), engine=EngineConfig(workers=7, device="cuda", checkpoint_every=3)).digest() == digest
    changed = ["seed=9", "rounds=9", "participation.rate=0.9", "method.name=fissionvae", "method.prior=wave"]
    changed += ["model.latent=9", "data.alpha=0.9", "sharing.weights=equal-groups", "sharing.scopes.encoder=silo"]
    changed += ["local.epochs=9", "evaluation.every=9", "privacy.epsilon=9", "server.samples=9"]
    changed += ["audit.canaries=9", "discovery.most=9", "data.outliers.share=0.1", "model.lipschitz=9"]
    digests = {parse(Config, override({}, [assignment])).digest() for assignment in changed}
    assert len(digests | {digest}) == len(changed) + 1


def test_every_section_but_name_and_engine_enters_the_digest() -> None:
    """The list above must grow with the tree."""
    sections = set(Config().to_mapping()) - {"name", "engine"}
    tested = {"seed", "rounds", "participation", "method", "model", "data", "sharing", "privacy", "local", "evaluation"}
    assert sections - tested == {"server", "audit", "discovery"}


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        DataConfig().silos = 3  # type: ignore[misc]
