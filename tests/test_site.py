"""The documentation builds without a warning, needs nothing from elsewhere, and its reference leaves nothing out."""

from __future__ import annotations

import html
import posixpath
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import click
import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import fedloom
from documentation import COMMAND, ROOT
from fedloom.cli.catalogue import LISTINGS, Listed
from fedloom.config import Config
from fedloom.evaluation.metric import METRICS
from fedloom.methods.base import METHODS
from fedloom.modalities.base import Modality
from fedloom.presets import preset_names
from plugins import LOOMS, LOOMS_POINTS, install
from support import script


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """What makes a site of the pages."""
    return script("docs_site")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """What makes the reference pages."""
    return script("reference")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))  # a warning raises
    return folder


def shown(site: Path, page: str) -> str:
    """A page's text without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", (site / f"{page}.html").read_text(encoding="utf-8")))


def test_pages_ask_nobody_for_anything(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", text):
            assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", tag), f"{page.name}: {tag}"


def test_search_needs_no_server(site: Path) -> None:
    assert "Secure sums" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "javascripts/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_the_reference_has_every_setting_with_its_meaning(site: Path, reference: ModuleType) -> None:
    text = shown(site, "reference/configuration")
    for key, cls, field, _ in reference.settings_of(Config):
        assert key.replace(".options", ".<option>") in text
        assert len(reference.meanings(cls)[field.name]) >= 5, key


def test_pages_that_are_made_from_the_source_are_as_it_is_now(reference: ModuleType) -> None:
    pages = {path.name: path.read_text(encoding="utf-8") for path in reference.PAGES.glob("*.md")}
    assert {name for name, text in pages.items() if reference.PLACE.search(text)} >= {"commands.md", "configuration.md"}
    stale = [name for name, text in pages.items() if reference.made(text) != text]
    assert not stale, "run: python scripts/reference.py"


def test_the_catalogue_says_which_package_a_plug_in_comes_from(reference: ModuleType, plugin_folder: Path) -> None:
    install(plugin_folder, "looms", "1.2", LOOMS, LOOMS_POINTS)
    text = reference.catalogue()
    methods = re.split(r"^### ", text, flags=re.MULTILINE)
    assert [part.split("\n")[0] for part in methods if "From the package `looms==1.2`." in part] == ["`shuttle`"]
    assert "| `threes` | 3 everywhere (from looms==1.2) |" in text


def test_the_reference_has_every_command_and_option(site: Path) -> None:
    text = shown(site, "reference/commands")

    def visit(command: click.Command, path: str) -> None:
        assert path in text
        for parameter in command.params:
            assert all(option in text for option in parameter.opts if option.startswith("-")), parameter
        for name, inner in getattr(command, "commands", {}).items():
            visit(inner, f"{path} {name}")

    visit(COMMAND, "fedloom")


def test_the_reference_has_every_method_with_its_options(site: Path, reference: ModuleType) -> None:
    text = shown(site, "reference/catalogue")
    for name, recipe in METHODS.listed():
        assert name in text
        assert all(f"method.{field.name}" in text for _, _, field, _ in reference.settings_of(recipe.options))


@pytest.mark.parametrize("kind", [kind for kind in Listed if kind not in (Listed.PRESETS, Listed.SETTINGS)])
def test_the_reference_has_all_that_can_be_listed(site: Path, kind: Listed) -> None:
    text = shown(site, "reference/catalogue")
    assert [name for name in LISTINGS[kind]() if name not in text] == []


def test_the_reference_has_every_family_of_presets(site: Path) -> None:
    text = shown(site, "reference/catalogue")
    assert {family for name in preset_names() if (family := posixpath.dirname(name)) not in text} == set()


def test_the_reference_has_every_field_of_a_modality_with_its_meaning(site: Path, reference: ModuleType) -> None:
    text = shown(site, "reference/modality")
    for field in fields(Modality):
        assert field.name in text
        assert len(reference.meanings(Modality)[field.name]) >= 5, field.name


def test_every_metric_has_a_definition_and_no_other_has_one() -> None:
    headings = re.findall(
        r"^## `(.+)`$", (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(headings) == sorted(METRICS)


def test_who_chooses_a_method_is_told_of_all() -> None:
    text = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
    assert [name for name in METHODS if f"`{name}`" not in text] == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference/api.html").read_text(encoding="utf-8")
    assert [name for name in fedloom.__all__ if not re.search(rf'id="fedloom[\w.]*\.{name}"', text)] == []


def test_a_comment_above_and_one_beside_are_both_a_meaning(reference: ModuleType) -> None:
    found = reference.meanings(fedloom.config.DataConfig)
    assert found["alpha"] == 'of "dirichlet": the smaller, the more silos differ'
    assert found["partition"].startswith("'fedloom list partitions' names them")


def test_links_to_files_that_are_no_pages_keep_their_text_alone(hook: ModuleType) -> None:
    def linked(text: str, page: str) -> str:
        return hook.LINK.sub(lambda link: hook._linked(link, page), text)

    assert linked("[x](../papers/align-fl/README.md#limits)", "privacy.md") == "[x](papers/align-fl.md#limits)"
    assert linked("[x](../../docs/privacy.md)", "papers/align-fl.md") == "[x](../privacy.md)"
    assert linked("[x](figures/a.py)", "papers/align-fl.md") == "x"
    assert linked("[x](https://example.org/a)", "privacy.md") == "[x](https://example.org/a)"
