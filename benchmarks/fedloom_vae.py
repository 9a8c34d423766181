"""FedAvg of the MLP VAE in fedloom; run by versus_flower.py as one process from start to end.

python benchmarks/fedloom_vae.py IMAGES.npy ROUNDS OUT
"""

from __future__ import annotations

import sys

import numpy as np

from fedloom import federation_from_arrays, load_config, train


def main() -> None:
    images, rounds, out = np.load(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    silos = {f"silo-{number}": part for number, part in enumerate(images)}
    # Held-out images are given, so that all of a silo's own are trained on; nothing is evaluated, as in Flower.
    federation = federation_from_arrays(silos, test={"silo-0": images[0, :1]})
    settings = ("method.name=fedvae", "model.hidden=[512, 256]", "model.latent=40", "local.epochs=1")
    rest = ("local.batch_size=32", "participation.rate=1.0", "evaluation.metrics=[]", "engine.device=cpu")
    run = train(load_config("demo", [*settings, *rest, f"rounds={rounds}"]), out, federation)
    print("loss", run.metrics()[-1]["train/vae/loss"], "engine", run.folder.environment["engine"])


if __name__ == "__main__":
    main()
