"""Sources for labelled vectors and for Camelyon17."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.config import DataConfig
from fedloom.errors import ConfigError, DataError
from fedloom.federation.building import build_federation
from fedloom.federation.records import Federation
from fedloom.federation.sources import SOURCES
from fedloom.streams import Streams

VECTORS = np.random.default_rng(0).normal(size=(400, 5)).astype(np.float16)
GOOD = {
    "x_train": VECTORS,
    "y_train": np.arange(400) % 4,
    "owner_train": np.arange(400) % 3,
    "x_test": VECTORS[:8],
    "y_test": np.arange(8) % 4,
}


def federation(path: Path, arrays: dict[str, Any], **settings: Any) -> Federation:
    np.savez(path / "vectors.npz", **arrays)
    return build_federation(DataConfig(source="embeddings", path=str(path / "vectors.npz"), **settings), Streams(1))


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"partition": "iid", "silos": 2}, [200, 200]),
        ({"partition": "iid", "silos": 100}, [4] * 100),
        ({"partition": "iid", "silos": 10, "records_per_silo": 16}, [16] * 10),
        ({"partition": "shards", "silos": 10}, [40] * 10),
        ({"partition": "classes", "silos": 2}, [200, 200]),
        ({"partition": "natural"}, [134, 133, 133]),
        ({"partition": "auto"}, [134, 133, 133]),
    ],
)
def test_every_partition_divides_vectors(tmp_path: Path, settings: dict[str, Any], sizes: list[int]) -> None:
    assert [len(silo) for silo in federation(tmp_path, GOOD, **settings).silos] == sizes


def test_dirichlet_leaves_nobody_empty_and_loses_nothing(tmp_path: Path) -> None:
    sizes = [len(silo) for silo in federation(tmp_path, GOOD, partition="dirichlet", silos=50, alpha=0.3).silos]
    assert min(sizes) >= 1
    assert sum(sizes) == 400


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"x_train": np.ones((400, 1, 5, 1), np.float16)}, r"records of shape \(1, 5, 1\), not vectors"),
        ({"x_train": np.where(np.arange(5) == 2, np.nan, VECTORS)}, "x_train of .* holds values that are not finite"),
        ({"y_train": None, "y_test": None}, "gives 400 of its training records no label; all need one"),
        ({"y_train": np.arange(400) % 4 - 1}, "gives 100 of its training records no label"),
        ({"y_test": np.array([-1] + [0] * 7)}, "gives 1 of its held-out records no label"),
        ({"y_train": np.zeros(400, int), "y_test": np.zeros(8, int)}, "has the class '0' alone"),
        ({"y_test": np.arange(8)}, "holds out class '4', which no training record has"),
        ({"x_test": VECTORS[:8, :3]}, "held-out examples of 'vectors' are"),
        ({"attribute_sex_train": np.zeros(400, int)}, "gives attributes to some of its records only"),
        ({"subject_train": np.arange(400) - 1}, "gives some of its records no subject"),
    ],
)
def test_what_could_not_be_learned_from_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    arrays = {key: value for key, value in (GOOD | changes).items() if value is not None}
    if "x_train" in changes:
        arrays["x_test"] = changes["x_train"][:8]
    with pytest.raises(DataError, match=sentence):
        federation(tmp_path, arrays, partition="iid")


@pytest.fixture
def wilds(tmp_path: Path) -> Path:
    """Five hospitals with two patients each and two patches a patient, tumour and not."""
    lines = ["patient,node,x_coord,y_coord,tumor,slide,center,split"]
    for patient in range(10):
        for tumor in range(2):
            name = f"patient_{patient:03d}_node_1"
            (tmp_path / "patches" / name).mkdir(parents=True, exist_ok=True)
            patch = Image.fromarray(np.full((4, 4, 3), 10 * patient + tumor, dtype=np.uint8))
            patch.save(tmp_path / "patches" / name / f"patch_{name}_x_{tumor}_y_7.png")
            lines.append(f"{patient},1,{tumor},7,{tumor},0,{patient // 2},0")
    (tmp_path / "metadata.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_camelyon_holds_out_a_hospital_or_patients(wilds: Path) -> None:
    official = SOURCES["camelyon17"].load(str(wilds))
    assert official.owners == ("hospital-0", "hospital-3", "hospital-4")
    assert sorted(official.test.x[:, 0, 0, 0].tolist()) == [40, 41, 50, 51]
    assert official.classes == ("normal", "tumor")
    everybody = SOURCES["camelyon17-hospitals"].load(str(wilds))
    assert everybody.owners == tuple(f"hospital-{number}" for number in range(5))
    assert sorted(everybody.test.x[::2, 0, 0, 0].tolist()) == [10, 30, 50, 70, 90]
    assert everybody.train.subject is not None
    assert not set(everybody.train.subject.tolist()) & set(everybody.test.subject.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda root: (root / "metadata.csv").unlink(), "must name the WILDS folder of Camelyon17"),
        (lambda root: (root / "metadata.csv").write_text("patient,node\n1,2\n"), "has no column 'x_coord'"),
        (
            lambda root: (root / "metadata.csv").write_text("patient,node,x_coord,y_coord,tumor,center\n"),
            "lists no patch",
        ),
        (
            lambda root: (root / "metadata.csv").write_text("patient,node,x_coord,y_coord,tumor,center\n1,1,a,1,1,1\n"),
            "not a whole number",
        ),
        (lambda root: next(root.glob("patches/*/*.png")).unlink(), "cannot read .*png as an image"),
        (
            lambda root: (root / "metadata.csv").write_text("patient,node,x_coord,y_coord,tumor,center\n0,1,0,7,0,0\n"),
            "needs patches to train on and patches to hold out",
        ),
    ],
)
def test_a_spoilt_wilds_folder_is_named(wilds: Path, spoil: Any, sentence: str) -> None:
    spoil(wilds)
    with pytest.raises((ConfigError, DataError), match=sentence):
        SOURCES["camelyon17"].load(str(wilds))
