"""A silo's process under the direct wire: it calls the server, and answers itself or lets its worker answer.

Where bubblewrap can be had, key and network are in this process and records in the worker; else both would have the
same rights, and this one does all.
"""

from __future__ import annotations

import logging
import signal
import sys
from functools import partial
from pathlib import Path

import fedloom
from fedloom.deployment.direct.attendant import Answering, Attendant
from fedloom.deployment.direct.credentials import Credentials
from fedloom.deployment.direct.mailbox import Mailbox
from fedloom.deployment.direct.parts import PartStore
from fedloom.deployment.directories import SiloDirectory
from fedloom.deployment.link import DEVICE, ask_worker
from fedloom.deployment.processes import loading
from fedloom.deployment.signing import Signatory
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError

log = logging.getLogger(__name__)
LARGEST = 16 * 2**30  # bytes of an order


def main(folder: str, proxy: str, worker: str, data: str = "", source: str = "") -> None:
    """Attend until told to stop; ``worker`` is the socket of the worker, empty where this process is both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; 'join' stops this in order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        home = SiloDirectory.open(Path(folder))
        if worker:
            asking: Answering = partial(ask_worker, Path(worker))
        else:
            with loading():
                from fedloom.deployment.worker import answering

            asking = answering(Path(folder), Path(data), source)
        device = str(asking(Frame({"kind": DEVICE})).header["device"])
    except FedloomError as error:
        log.error("%s", error)
        sys.exit(2)
    attend(home, proxy, asking, device)


def attend(home: SiloDirectory, proxy: str, asking: Answering, device: str) -> None:
    """Work through what the server asks, with signed statements."""
    signatory = Signatory.of(home)

    def answer(frame: Frame) -> Frame:
        return signatory.passed(frame, asking(frame))

    home.post.mkdir(mode=0o700, exist_ok=True)
    attendant = Attendant(
        channel=Credentials(home, log.warning, proxy).channel,
        mailbox=Mailbox(home.post / "mailbox.sqlite"),
        parts=PartStore(home.post / "parts"),
        silo=home.name,
        facts={"version": fedloom.__version__, "device": device},
        largest=LARGEST,
    )
    attendant.work(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
