"""Projections and scalings that never see a record, and backbones that people bring themselves."""

import sys
import types
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedloom.backbones.base import Backbone
from fedloom.backbones.catalogue import load_backbone
from fedloom.backbones.projections import directions, unit_length
from fedloom.errors import ConfigError, DataError, MissingExtraError


class Headed(Backbone):
    """Features of length 3 whose public head looks at the last of them most, then at the first, never at the second."""

    def __init__(self) -> None:
        super().__init__("headed", 3, "cpu", batch_size=8)

    def extract(self, images: Tensor) -> Tensor:
        return images

    @property
    def head(self) -> Tensor:
        return torch.tensor([[0.0, 0.0, 5.0], [2.0, 0.0, 0.0], [0.0, 0.0, -5.0]])


def test_head_directions_are_those_that_the_classes_differ_in() -> None:
    found = directions("head", Headed(), 3, 2)
    torch.testing.assert_close(found.abs(), torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 0.0]], dtype=torch.float64))


def test_random_directions_are_orthonormal_and_the_seeds_own() -> None:
    one, again, other = (directions("random", Headed(), 20, 8, seed) for seed in (1, 1, 2))
    torch.testing.assert_close(one.T @ one, torch.eye(8, dtype=torch.float64))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize(
    ("name", "backbone", "width", "count", "sentence"),
    [
        ("heads", Headed(), 3, 2, "unknown projection 'heads'; did you mean 'head'"),
        ("head", Headed(), 3, 4, "4 directions were asked for, but features of length 3 have 1 to 3"),
        ("head", load_backbone("pixels"), 3, 2, "'pixels' has no class head"),
        ("random", Headed(), 3, 0, "0 directions were asked for"),
    ],
)
def test_impossible_projections_are_named(name: str, backbone: Backbone, width: int, count: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        directions(name, backbone, width, count)


def test_unit_length() -> None:
    scaled = unit_length(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-20, 0.0]]))
    assert scaled.tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [0.0, 0.0], [1.0, 0.0]]


def sum_network() -> nn.Module:
    """A network of one's own: the sum of each channel."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x.sum((2, 3))

    return Sum()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("own_networks")
    module.make = sum_network  # type: ignore[attr-defined]
    module.number = lambda: 3  # type: ignore[attr-defined]
    module.scalar = lambda: nn.Flatten(0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_networks", module)
    return module


def test_a_network_of_ones_own_is_named_by_its_path_and_weights(own: types.ModuleType) -> None:
    backbone = load_backbone("module/own_networks:make", resolution=4)
    assert backbone.features(torch.full((2, 3, 2, 2), 0.5)).tolist() == [[8.0] * 3] * 2
    changed = sum_network()
    nn.init.zeros_(changed.factor)  # type: ignore[arg-type]
    own.changed = changed  # type: ignore[attr-defined]
    own.make_again = sum_network  # type: ignore[attr-defined]
    suffixes = [load_backbone(f"module/own_networks:{name}").name[-12:] for name in ("make", "make_again", "changed")]
    assert suffixes[0] == suffixes[1] != suffixes[2]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "module/nowhere:make",
            "'module/nowhere:make' of no installed package cannot be imported .*have it on PYTHONPATH",
        ),
        ("module/own_networks:nothing", "has no attribute 'nothing'"),
        ("module/own_networks:number", "is a int, not an nn.Module"),
        ("module/", "unknown backbone 'module/'"),
        ("tim/resnet50", "unknown backbone 'tim/resnet50'"),
    ],
)
def test_what_is_no_network_is_named(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_backbone(name)


@pytest.mark.usefixtures("own")
def test_a_network_must_give_a_row_for_each_image() -> None:
    with pytest.raises(ConfigError, match="one row of features for each image"):
        load_backbone("module/own_networks:scalar").features(torch.zeros(2, 1, 2, 2))


class TimmDouble(nn.Module):
    """Stands in for a timm model: its features are the first pixel of each channel."""

    num_features = 3

    def __init__(self, options: dict[str, object]) -> None:
        super().__init__()
        self.options = options
        self.head = nn.Linear(3, 2) if options.get("headed", True) else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        self.seen = x.shape
        return x

    def forward_head(self, x: Tensor, pre_logits: bool) -> Tensor:
        assert pre_logits
        return x[:, :, 0, 0]

    def get_classifier(self) -> nn.Module:
        return self.head


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("timm")
    module.is_model = lambda name: name == "vit"  # type: ignore[attr-defined]
    module.create_model = lambda name, **options: TimmDouble(options)  # type: ignore[attr-defined]
    config = {"input_size": (3, 4, 4), "crop_pct": 0.5, "interpolation": "bicubic", "mean": (0.5, 0.5, 0.5)}
    config["std"] = (0.25, 0.25, 0.25)
    module.data = types.SimpleNamespace(resolve_model_data_config=lambda model: config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


@pytest.mark.usefixtures("timm")
def test_a_timm_model_sees_its_own_crop_and_normalisation(tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"weights")
    backbone = load_backbone("timm/vit.tag", weights=str(weights))
    assert backbone.name == f"timm-vit.tag-4-{sha256(b'weights').hexdigest()[:12]}"
    assert backbone.dimension == 3
    framed = torch.zeros(2, 1, 8, 8)
    framed[:, :, 2:6, 2:6] = 0.75  # exactly what is left when the middle is cut out of 8x8
    assert backbone.features(framed).tolist() == [[1.0] * 3] * 2
    assert backbone.network.options == {  # type: ignore[attr-defined]
        "pretrained": True,
        "pretrained_cfg_overlay": {"file": str(weights)},
    }
    assert backbone.head.shape == (2, 3)
    assert backbone.classify(torch.zeros(1, 3)).shape == (1, 2)


def test_timm_mistakes_are_named(timm: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="timm has no model 'vat'"):
        load_backbone("timm/vat")
    with pytest.raises(DataError, match="are not at nowhere"):
        load_backbone("timm/vit", weights="nowhere")

    def refuse(name: str, **options: object) -> nn.Module:
        raise TypeError("img_size") if "img_size" in options else OSError("no route to the hub")

    timm.create_model = refuse  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="'timm/vit' has one resolution only"):
        load_backbone("timm/vit", resolution=8)
    with pytest.raises(DataError, match="could not be loaded: no route to the hub; give the path of a local copy"):
        load_backbone("timm/vit")
    timm.create_model = lambda name, **options: TimmDouble({"headed": False})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no class head"):
        _ = load_backbone("timm/vit").head
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'timm'; .*fedloom\[backbones\]"):
        load_backbone("timm/vit")


def test_a_torchvision_that_does_not_fit_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> types.ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("fedloom.backbones.timm_models.importlib.import_module", fail)
    with pytest.raises(MissingExtraError, match="needs a torchvision that was built for the installed torch"):
        load_backbone("timm/vit")
