"""Parquet files that synthesis wrote become records again; others are refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from fedloom.errors import DataError, MissingExtraError
from fedloom.federation.parquet import load_parquet
from fedloom.release.formats import ParquetWriter, RecordKind


def written(folder: Path, x: torch.Tensor) -> Path:
    writer = ParquetWriter(folder, RecordKind(tuple(x.shape[1:]), ("ct", "mri"), ("ill", "well")))
    writer.add(x[:30], "mri", "well")
    writer.add(x[30:], "ct", "ill")
    writer.close()
    (file,) = (folder / "data").glob("*.parquet")
    return file


@pytest.mark.parametrize("shape", [(1, 5, 4), (2, 5, 4), (3, 5, 4), (6,)], ids=str)
def test_records_come_back_with_their_groups_and_labels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pixels = torch.randint(0, 256, (50, *shape), generator=torch.Generator().manual_seed(2)) / 255
    dataset = load_parquet(str(written(tmp_path, pixels)))
    assert (dataset.train.shape, dataset.groups, dataset.classes) == (shape, ("ct", "mri"), ("ill", "well"))
    found = {
        (tuple(x), y, group)
        for records in (dataset.train, dataset.test)
        for x, y, group in zip(
            records.values.flatten(1).tolist(), records.y.tolist(), records.group.tolist(), strict=True
        )
    }
    assert found == {(tuple(x), int(n < 30), int(n < 30)) for n, x in enumerate(pixels.flatten(1).tolist())}


def test_what_says_nothing_of_its_records_or_is_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"age": [1, 2]}), tmp_path / "plain.parquet")
    with pytest.raises(DataError, match=r"plain.parquet does not say what its records are; 'fedloom synthesize"):
        load_parquet(str(tmp_path / "plain.parquet"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1, and no more")
    with pytest.raises(DataError, match=r"^cannot read .*torn.parquet as a Parquet file: "):
        load_parquet(str(tmp_path / "torn.parquet"))
    file = written(tmp_path, torch.rand(50, 6))
    table = pyarrow.parquet.read_table(file)
    renamed = table.rename_columns(["age", "group", "label"]).replace_schema_metadata(table.schema.metadata)
    pyarrow.parquet.write_table(renamed, file)
    with pytest.raises(DataError, match=r"^vectors have the columns values, not age$"):
        load_parquet(str(file))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"^data.source = 'parquet' needs the package 'pyarrow'; install it"):
        load_parquet(str(file))
