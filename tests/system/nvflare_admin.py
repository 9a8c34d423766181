"""An admin of an NVFlare federation, in a process of his own: what came of his orders, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.flare_api import Session, new_secure_session


def main(kit: str, *orders: str) -> None:
    """Orders are ``cat:SITE:FILE``, ``submit:FOLDER``, and ``abort:FOLDER:LOG``, once that log has three rounds."""
    session = new_secure_session("admin@others.org", kit, timeout=60)
    try:
        found = [done(session, *order.split(":")) for order in orders]
    finally:
        session.close()
    print(f"\n{json.dumps(found)}")


def done(session: Session, what: str, about: str, file: str = "") -> Any:
    if what == "cat":
        return session.cat_target(about, file=file)
    job = session.submit_job(about)
    if what == "abort":
        while not Path(file).exists() or len(Path(file).read_text().splitlines()) < 3:
            time.sleep(0.05)
        session.abort_job(job)
    _, meta = session.monitor_job_and_return_job_meta(job, timeout=240)
    return {key: (meta or {}).get(key) for key in ("status", "job_deploy_detail")}


if __name__ == "__main__":
    main(*sys.argv[1:])
