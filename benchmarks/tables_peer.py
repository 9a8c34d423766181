"""Fit a peer's generator to coded rows and write as many rows of its own; run by the peer's own Python.

    python tables_peer.py CODES.npz OUT.npz {mst,aim} EPSILON DELTA SEED

No bins are learned: the codes are those of the public schema, so the whole budget goes to the generator.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import pandas as pd
from dpmm.pipelines import AIMPipeline, MSTPipeline

PIPELINES = {"mst": MSTPipeline, "aim": AIMPipeline}

if __name__ == "__main__":
    source, out, name, epsilon, delta, seed = sys.argv[1:]
    with np.load(source) as stored:
        codes, sizes = stored["codes"], stored["sizes"]
    names = [f"c{number}" for number in range(len(sizes))]
    rows = pd.DataFrame(codes, columns=names)
    settings = {"epsilon": float(epsilon), "delta": float(delta), "disable_processing": True, "n_jobs": 1}
    pipeline = PIPELINES[name](**settings)
    wall, processor = time.perf_counter(), time.process_time()
    pipeline.fit(rows, domain=dict(zip(names, sizes.tolist(), strict=True)), random_state=int(seed))
    seconds = [time.perf_counter() - wall, time.process_time() - processor]
    made = pipeline.generate(n_records=len(rows), random_state=int(seed))
    np.savez(out, codes=made[names].to_numpy().astype(np.int64), seconds=seconds)
