from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.reproduction import tables

SMALL = (
    *("rounds=1", "data.silos=1", "data.records_per_silo=40", "model.hidden=[16]", "model.latent=4"),
    *("local.batch_size=16", "local.epochs=1", "participation.rate=1.0"),
)
TABLE = f"""
title = "a tiny table"
compared = ["FID, published", "distance"]
[evaluation]
samples = 30
backbone = "pixels"
metrics = ["spread"]
[[columns]]
title = "FID, published"
published = "FID"
[[columns]]
title = "distance"
metric = "spread/pixels/n*/group=mnist"
digits = 4
[[columns]]
title = "the standard FID"
metric = "frechet/inception-2015-299/n*"
optional = true
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
    (tmp_path / "tables" / "tiny").mkdir(parents=True)
    (tmp_path / "tables" / "tiny" / "table1.toml").write_text(TABLE.replace("'", '"'), encoding="utf-8")
    monkeypatch.setattr(tables, "TABLES", tmp_path / "tables")
    folder = tmp_path / "papers" / "tiny"
    folder.mkdir(parents=True)
    place = "<!-- fedloom reproduce tiny/table1 -->\nold\n<!-- end of tiny/table1 -->"
    (folder / "README.md").write_text(f"# Tiny\n\n{place}\n\nafter\n", encoding="utf-8")
    return folder
