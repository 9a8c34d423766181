"""Private decoders: ALIGN-FL under DP-SGD, what its ledger says was spent, and what an audit finds.

python examples/private_decoders.py                                         # seconds: few records, much noise
python examples/private_decoders.py --rounds 20 --records 1200 --canaries 200   # minutes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedloom
from fedloom.audit import audit_run
from fedloom.evaluation.auditing import Effort
from fedloom.privacy.ledger import format_epsilon, read_accounts


def private_decoders(
    out: Path, epsilon: float = 10.0, rounds: int = 2, records: int = 80, canaries: int = 20
) -> dict[str, Any]:
    """Decoders go up, noisy; the server learns from their samples; then the run is attacked. Returns the audit."""
    config = fedloom.load_config(
        "demo",
        [
            *("method={name='align_fl'}", "data.source=mnist-sample", "data.partition=iid", "data.silos=3"),
            *(f"rounds={rounds}", f"data.records_per_silo={records}", "local.batch_size=32", "participation.rate=1.0"),
            *("model.hidden=[32]", "model.latent=4", "server.samples=200", "server.epochs=2"),
            *("privacy.mechanism=dp-sgd", f"privacy.epsilon={epsilon}", f"audit.canaries={canaries}"),
            *("evaluation.every=0", "evaluation.metrics=['spread']"),
        ],
    )
    run = fedloom.train(config, out)
    for account in read_accounts(run.folder.ledger):
        print(f"{account.silo}: epsilon {format_epsilon(account.spent)} of {account.budget.epsilon:g} spent")
    audit = audit_run(run, attacks=["canaries", "membership"], effort=Effort(records=50, samples=200))
    for sentence in audit["sentences"]:
        print(sentence)
    return audit


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/private-decoders"), help="a new folder")
    parser.add_argument("--epsilon", type=float, default=10.0, help="each silo's budget")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--records", type=int, default=80, help="of each of the three silos")
    parser.add_argument("--canaries", type=int, default=20, help="in all; a run that has some is not for release")
    private_decoders(**vars(parser.parse_args()))
