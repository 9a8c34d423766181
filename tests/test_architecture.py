"""The house keeps its shape: imports run one way, methods stay small and cite their source, the start stays fast."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedloom

SOURCE = Path(fedloom.__file__).parent
LAYERS = (  # a room may import the rooms above it in this list
    {"errors", "outline"},
    {"settings", "registry"},
    {"presets"},
    {"config", "streams", "templating"},
    {"shown"},
    {"modalities"},
    {"federation", "backbones", "secure"},
    {"models", "objectives", "sharing", "privacy"},
    {"discovery"},
    {"methods", "runs"},
    {"operations", "cluster"},
    {"engines", "evaluation"},
    {"reports", "release"},
    {"experiment", "embedding", "certificate"},
    {"sweep", "deployment", "audit", "downstream"},
    {"reproduction"},
    {"workflow"},
    {"cli", "studio", "__main__"},
)
# The only imports between rooms of one layer.
BESIDE = {("objectives", "models"), ("cli", "studio"), ("__main__", "cli")}
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
METHODS = [
    path for path in (SOURCE / "methods").glob("*.py") if re.search(r"^RECIPE\b", path.read_text(), re.MULTILINE)
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> Iterator[str]:
    """Every room that a module names in an import, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("fedloom."))


def relative(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_run_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in LAYER, f"say in which layer the room '{room}' lies"
    for other in rooms_imported(path):
        if other in LAYER and other != room:  # other names, such as __version__, belong to the package itself
            assert LAYER[other] < LAYER[room] or (room, other) in BESIDE, f"{relative(path)} imports {other}"


def test_there_are_imports_to_look_at() -> None:
    assert {"settings", "errors", "models", "objectives"} <= set(rooms_imported(SOURCE / "methods" / "fissionvae.py"))
    assert "engines" in set(rooms_imported(SOURCE / "experiment" / "experiment.py"))


def test_a_class_has_a_name_of_its_own() -> None:
    """Whoever reads of a class, or looks for it, finds one."""
    found = Counter(
        node.name
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in found.items() if count > 1] == []


@pytest.mark.parametrize("path", METHODS, ids=relative)
def test_a_method_is_one_short_file_headed_by_its_source(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    heading = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    assert len(text.splitlines()) <= 120
    assert re.search(r"\b(19|20)\d\d\b", heading), "the year of the source"
    assert re.search(r"arXiv \d{4}\.\d{5}|\"[^\"]{20,}\"", heading), "the title or the arXiv number of the source"


LONGEST_MODULE, LONGEST_FUNCTION = 350, 50  # lines


def test_modules_and_functions_are_short() -> None:
    long_modules, long_functions = [], []
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > LONGEST_MODULE:
            long_modules.append(relative(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                    long_functions.append(f"{relative(path)}:{node.name}")
    assert (long_modules, long_functions) == ([], [])


def test_linters_are_nowhere_told_to_look_away() -> None:
    assert [relative(path) for path in MODULES if "noqa" in path.read_text(encoding="utf-8")] == []


def test_what_a_newcomer_asks_for_is_where_the_page_says() -> None:
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## Where is ...?")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+\?) \| (.+) \|$", section, re.MULTILINE)
    assert len(rows) >= 10
    for question, answer in rows:
        paths = re.findall(r"`(src/[^`]+)`", answer)
        assert paths, question
        assert [path for path in paths if not (SOURCE.parents[1] / path).exists()] == []


def test_methods_are_found() -> None:
    assert {"fedvae.py", "fissionvae.py"} <= {path.name for path in METHODS}


@pytest.mark.parametrize("module", ["fedloom", "fedloom.cli"])
def test_the_start_does_not_wait_for_torch(module: str) -> None:
    program = (
        f"import sys, {module}; print([name for name in ('torch', 'numpy', 'PIL', 'jinja2') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_public_name_can_be_imported() -> None:
    for name in fedloom.__all__:
        assert getattr(fedloom, name).__name__ == name
    assert set(fedloom.__all__) <= set(dir(fedloom))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = fedloom.trian
