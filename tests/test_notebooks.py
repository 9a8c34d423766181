"""The notebooks of examples/ run from top to bottom, as they are, in a folder of their own."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_it_is(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    source = str(Path(__file__).parents[1] / "src")
    monkeypatch.setenv("PYTHONPATH", source + os.pathsep + os.environ.get("PYTHONPATH", ""))
    found = nbformat.read(notebook, as_version=4)
    NotebookClient(found, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in found.cells for output in cell.get("outputs", [])]
    assert any("text/html" in output.get("data", {}) for output in shown)  # runs and federations show themselves
    assert any("image/png" in output.get("data", {}) for output in shown)  # and samples


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_what_it_printed(notebook: Path) -> None:
    for cell in nbformat.read(notebook, as_version=4).cells:
        assert not cell.get("outputs"), notebook
        assert cell.get("execution_count") is None
