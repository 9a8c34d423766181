"""A tour of FissionVAE: what a prior, a decoder and a second level for each group do to samples.

python examples/fissionvae_tour.py                              # seconds: shows how, learns little
python examples/fissionvae_tour.py --rounds 40 --records 1200   # minutes: shows the difference
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fedloom
from fedloom.evaluation.suite import Evaluator
from fedloom.runs.images import save_grid

VARIANTS = {
    "FedVAE": {"name": "fedvae"},
    "+L": {"name": "fissionvae", "prior": "wave", "decoder": "global"},
    "+D": {"name": "fissionvae"},
    "+L+D": {"name": "fissionvae", "prior": "wave"},
    "+H+L+D": {"name": "fissionvae", "prior": "learnable", "hierarchy": True},
}


def tour(out: Path, rounds: int = 2, records: int = 60) -> dict[str, float]:
    """Train every variant; returns the share of samples in their own group's domain."""
    settings = [f"rounds={rounds}", f"data.records_per_silo={records}", "data.silos=2", "participation.rate=1.0"]
    demo = fedloom.load_config("demo", [*settings, "evaluation.samples=100", "evaluation.metrics=['domain']"])
    federation, streams = fedloom.build_federation(demo.data, fedloom.Streams(demo.seed)), fedloom.Streams(demo.seed)
    evaluator = Evaluator(federation, demo.evaluation, streams)  # one judge of real images for all of them
    shares = {}
    for name, method in VARIANTS.items():
        config = fedloom.load_config("demo", [*settings, "evaluation.metrics=[]"], {"method": method})
        run = fedloom.train(config, out / name, federation=federation)
        for group in federation.groups:
            save_grid(run.sample(64, group=group, seed=1), out / f"{name} {group}.png")
        shares[name] = evaluator.evaluate(run.generator())["domain-hit/domain-cnn/n200"]
        print(f"{name:8} {shares[name]:6.1%} of samples look like their own group")
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tour"), help="a new folder")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--records", type=int, default=60, help="of each of the four silos")
    arguments = parser.parse_args()
    tour(arguments.out, arguments.rounds, arguments.records)
    print(f"grids of samples are in {arguments.out}")
