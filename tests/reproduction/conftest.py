from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.reproduction import tables

SMALL = (
    *("rounds=1", "data.silos=1", "data.records_per_silo=40", "model.hidden=[16]", "model.latent=4"),
    *("local.batch_size=16", "local.epochs=1", "participation.rate=1.0"),
)
COLUMNS = """
["FID, published"]
published = "FID"
[distance]
metric = "spread/pixels/n*/group=mnist"
digits = 4
["the standard FID"]
metric = "frechet/inception-2015-299/n*"
optional = true
["accuracy, %"]
metric = "downstream/synthetic-only/global/accuracy"
scale = 100.0
"""
TABLE = f"""
title = "a tiny table"
compared = ["FID, published", "distance"]
columns = ["FID, published", "distance", "the standard FID"]
[evaluation]
samples = 30
backbone = "pixels"
metrics = ["spread"]
[[parts]]
title = "first part"
figure = "first.png"
reference = {{ row = "first/fedvae" }}
[[parts.rows]]
id = "first/fedvae"
name = "FedVAE"
preset = "demo"
overrides = {[*SMALL, "method.name=fedvae"]}
published = {{ FID = 120.0 }}
[[parts.rows]]
id = "first/d"
name = "+D"
preset = "demo"
overrides = {[*SMALL]}
published = {{ FID = 30 }}
[[parts]]
title = "second part"
[[parts.rows]]
id = "second/d"
name = "+D again"
preset = "demo"
overrides = {[*SMALL]}
published = {{ FID = "diverges" }}
"""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a paper with one tiny table and a README that has a place for it."""
    declared = tmp_path / "tables" / "tiny"
    declared.mkdir(parents=True)
    (declared / "columns.toml").write_text(COLUMNS, encoding="utf-8")
    (declared / "table1.toml").write_text(TABLE.replace("'", '"'), encoding="utf-8")
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    folder = tmp_path / "papers" / "tiny"
    folder.mkdir(parents=True)
    place = "<!-- fedloom reproduce tiny/table1 -->\nold\n<!-- end of tiny/table1 -->"
    (folder / "README.md").write_text(f"# Tiny\n\n{place}\n\nafter\n", encoding="utf-8")
    return folder
