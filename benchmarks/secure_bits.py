"""What whole numbers of few bits cost in privacy: epsilon of discrete noise beside continuous noise of the same size.

    python benchmarks/secure_bits.py

For a noise multiplier of 1 and one release. ``noise_grows``: by how much a silo's noise is larger than without a grid,
so that what is charged, ``epsilon``, holds; ``ratio``: that over the epsilon of continuous noise of the larger size.
"""

from __future__ import annotations

from common import keep, show
from fedloom.errors import ConfigError
from fedloom.privacy.accounting import Gaussian, spent
from fedloom.privacy.grids import SharedSum
from fedloom.privacy.trust import Distributed

DELTA = 1e-5
CASES = {  # silos, records of all of them, numbers
    "5 silos, 500 records, 10 values": (5, 500, 10),
    "10 silos, 16 000 records, 7 000 values": (10, 16_000, 7_000),
    "10 silos, 16 000 records, 1.1 million values": (10, 16_000, 1_100_000),
    "100 silos, 160 000 records, 6.6 million values": (100, 160_000, 6_600_000),
}


def main() -> None:
    rows = []
    for case, (silos, units, size) in CASES.items():
        for bits in (16, 18, 20, 24, 28, 32, 36, 40):
            try:
                grid = SharedSum(bits, Distributed(silos), units, 1.0, 1.0, size).grid()
            except ConfigError:
                rows.append({"case": case, "bits": bits, "noise_grows": "refused", "epsilon": "", "ratio": ""})
                continue
            charged = spent([Gaussian(grid.effective)], DELTA)
            continuous = spent([Gaussian(1 + grid.loss)], DELTA)
            found = {"epsilon": round(charged, 5), "ratio": round(charged / continuous, 6)}
            rows.append({"case": case, "bits": bits, "noise_grows": f"{grid.loss:.3g}", **found})
    show("discrete noise by the bits of its numbers", rows)
    keep("secure_bits-cpu", rows, delta=DELTA)


if __name__ == "__main__":
    main()
