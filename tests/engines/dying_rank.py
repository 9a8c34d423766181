"""The command ``fedloom`` on a rank that is killed the first time that it is started: ``RANK WHEN WORDS...``.

Rank 0 dies at its WHEN-th write, another one at the WHEN-th round that it is asked for; 0 is never.
"""

import itertools
import os
import signal
import sys

from engines.killing import die_at_write
from fedloom.__main__ import main
from fedloom.engines import ranked


def die_at_order(number: int) -> None:
    orders, carried_out = itertools.count(1), ranked._carried_out

    def counted(*arguments: object) -> object:
        if next(orders) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return carried_out(*arguments)

    ranked._carried_out = counted


if __name__ == "__main__":
    rank, when, *words = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (die_at_write if rank == "0" else die_at_order)(int(when))
    sys.argv[1:] = words
    main()
