from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.backbones.base import Backbone
from fedloom.evaluation import features as features_module
from fedloom.evaluation.features import FeatureCache, content_digest
from fedloom.evaluation.frechet import Moments


class Counting(Backbone):
    """Doubles the values and counts how many records it was asked about."""

    def __init__(self, name: str = "counting") -> None:
        super().__init__(name, None, "cpu", batch_size=4)
        self.extracted = 0

    def extract(self, images: Tensor) -> Tensor:
        self.extracted += len(images)
        return 2 * images.flatten(1)


BYTES = torch.randint(0, 256, (10, 1, 3, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def test_features_are_extracted_once_and_shared() -> None:
    cache = FeatureCache(Counting())
    features = cache.features(BYTES)
    torch.testing.assert_close(features, BYTES.flatten(1) / 127.5)
    assert torch.equal(cache.features(BYTES.clone()), features)
    moments = cache.moments(BYTES)
    assert torch.equal(moments.covariance, Moments.of(features).covariance)
    assert moments.count == 10
    assert cache.backbone.extracted == 10


def test_stored_results_outlive_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    first = FeatureCache(Counting(), folder)
    moments, features = first.moments(BYTES, stored=True), first.features(BYTES, stored=True)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{kind}-{content_digest(BYTES, 'counting')}.safetensors" for kind in ("features", "moments")
    )
    later = FeatureCache(Counting(), folder)
    again = later.moments(BYTES, stored=True)
    assert torch.equal(again.mean, moments.mean)
    assert torch.equal(again.covariance, moments.covariance)
    assert torch.equal(later.features(BYTES, stored=True), features)
    assert later.backbone.extracted == 0


def test_generated_samples_leave_no_file(tmp_path: Path) -> None:
    FeatureCache(Counting(), tmp_path).moments(BYTES)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_computed_and_written_anew(tmp_path: Path) -> None:
    FeatureCache(Counting(), tmp_path).features(BYTES, stored=True)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:40])
    repaired = FeatureCache(Counting(), tmp_path)
    torch.testing.assert_close(repaired.features(BYTES, stored=True), BYTES.flatten(1) / 127.5)
    assert repaired.backbone.extracted == 10
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("x", "extractor"),
    [
        (BYTES, "other"),
        (BYTES.flip(0), "counting"),
        (BYTES.reshape(10, 9), "counting"),
        (BYTES.float(), "counting"),
    ],
)
def test_the_digest_sees_name_values_shape_and_type(x: Tensor, extractor: str) -> None:
    assert content_digest(x, extractor) != content_digest(BYTES, "counting")


def test_memory_holds_a_few_tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "_IN_MEMORY", 2)
    cache = FeatureCache(Counting())
    for rows in (4, 5, 4, 6, 4, 5):  # 5 is the oldest when 6 comes, so it alone is extracted again
        cache.features(BYTES[:rows])
    assert cache.backbone.extracted == 4 + 5 + 6 + 5
