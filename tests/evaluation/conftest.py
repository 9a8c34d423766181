import pytest
from torch import Tensor

from fedloom.federation.records import Dataset
from fedloom.federation.sources import SOURCES


@pytest.fixture(scope="session")
def mixed_mnist() -> Dataset:
    """MNIST and Fashion-MNIST as two groups: the sample in the package."""
    return SOURCES["mixed-mnist-sample"].load("")


@pytest.fixture(scope="session")
def held_out(mixed_mnist: Dataset) -> list[Tensor]:
    """The test images of each group in [0, 1]."""
    return [mixed_mnist.test.of_group(group).values for group in range(2)]
