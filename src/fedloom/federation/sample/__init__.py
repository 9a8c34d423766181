"""Embedded samples: 6,000 training and 1,000 test images of MNIST and of Fashion-MNIST, and 5,000 rows of Adult."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import DataError
from fedloom.federation import idx

FOLDER = Path(__file__).parent

# Written by scripts/make_sample.py.
SHA256 = {
    "mnist-train-images-0.idx.xz": "8eab8f4dde15e159ef8c184d9aeca10fc753c7464e84ecc92125985f52bd9ad1",
    "mnist-train-labels-0.idx.xz": "1cbd830bf512873f566320925065a2ff974f80a00c64fa4110ada658b79f4962",
    "mnist-train-images-1.idx.xz": "2e920cfe121c3f9763e18a37ecf6b39e3374533d00847edac726c238e16d4e34",
    "mnist-train-labels-1.idx.xz": "c3ed8ef66da9416ace1697b98117f83b60632b1885c2b31a363a848cb6d246c3",
    "mnist-test-images-0.idx.xz": "b74e69d0410b3d41a52fefe54c0e4d122e49e6c87b035cb6191c5504c7b70d6e",
    "mnist-test-labels-0.idx.xz": "9272953c7b89e6895a7c03e6c3fb175a3e56d361d4eecb1bbd873bc8f9f34244",
    "fashion-mnist-train-images-0.idx.xz": "e6f2937e83bac3e44d279fe440f464a1aa9d8f8be62fa604f2d6f5489074ec44",
    "fashion-mnist-train-labels-0.idx.xz": "0f64066d5145d31a3113ccba061b6278b3233ddb115e681565e135daa85beea6",
    "fashion-mnist-train-images-1.idx.xz": "0009db1276fa8c8a58752b3365cf0deb0911b91b264b3d775beb32044647e2b9",
    "fashion-mnist-train-labels-1.idx.xz": "474bbf343b03a52bd189b1e299e81c8a90546de1afed6318b610073b57d5473b",
    "fashion-mnist-test-images-0.idx.xz": "1c4260e2079b9979e7d888a36aa94078fb4ac1988a8195f4613c4c5efb9cf896",
    "fashion-mnist-test-labels-0.idx.xz": "940804dd842deddf0c82511c86dbc4e41a579ec2bf4c896f2aea7b67a774b913",
    "adult-train.csv.xz": "4155aa81b83e7e72bc0e95ddbd09e6245b28a4ad9c1166359e8fda71168cc78c",
    "adult-test.csv.xz": "0e19d6f008d884280a04b1f462476f1a1726142f3bd8e8914e994c5b15d3424f",
}


def load(name: str, split: str, kind: str, folder: Path = FOLDER) -> NDArray[np.uint8]:
    """The ``images`` or ``labels`` of ``mnist`` or ``fashion-mnist``, of the split ``train`` or ``test``."""
    parts = [file for file in SHA256 if file.startswith(f"{name}-{split}-{kind}-")]
    return np.concatenate([idx.decode(verified(folder / part), part) for part in parts])


def verified(path: Path | str) -> bytes:
    """A file as its owner left it, unpacked."""
    path = FOLDER / path
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror
        raise DataError(f"cannot read the embedded sample {path}: {reason}; reinstall fedloom") from error
    if hashlib.sha256(content).hexdigest() != SHA256[path.name]:
        raise DataError(f"the embedded sample {path} is damaged (checksum differs); reinstall fedloom")
    return lzma.decompress(content)
