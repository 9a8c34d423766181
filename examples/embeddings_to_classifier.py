"""From images to a classifier without sharing either: embeddings, DP-CVAE, and heads at each silo.

python examples/embeddings_to_classifier.py                     # seconds, on vectors of pixels
python examples/embeddings_to_classifier.py --backbone efficientnet-lite0 --rounds 25 --records 1000   # minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedloom
from fedloom.backbones.catalogue import load_backbone
from fedloom.downstream.stage import downstream
from fedloom.embedding import Preparation, embed
from fedloom.federation.sources import SOURCES


def embeddings_to_classifier(
    out: Path, backbone: str = "pixels", rounds: int = 3, records: int = 100, epsilon: float = 8.0
) -> dict[str, Any]:
    """Embed once, learn a private generator together, train heads at home. Returns what they score."""
    out.mkdir(parents=True)
    vectors = out / "embedded.npz"
    preparation = Preparation(projection="random", dimension=32)
    embed(SOURCES["mnist-sample"].load(""), load_backbone(backbone), preparation, vectors, out / "features")
    config = fedloom.load_config(
        "dp-cvae/cifar10",
        [
            *(f"data.path={vectors}", "data.silos=4", f"data.records_per_silo={records}", "data.validation=0.2"),
            *(f"rounds={rounds}", "local.batch_size=32", "model.hidden=[32]", "model.latent=4"),
            *(f"privacy.epsilon={epsilon}", "evaluation.every=0", "evaluation.metrics=['utility']"),
        ],
    )
    scores = downstream(fedloom.train(config, out / "run"), synthetic=500)
    print(scores["guarantee"])
    for head, tests in scores["rows"].items():
        print(f"{head:22} {tests['silo']['accuracy']:6.1%} right, at the silos")
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/embeddings"), help="a new folder")
    parser.add_argument("--backbone", default="pixels", help="such as efficientnet-lite0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=100, help="of each of the four silos")
    parser.add_argument("--epsilon", type=float, default=8.0, help="each silo's budget")
    embeddings_to_classifier(**vars(parser.parse_args()))
