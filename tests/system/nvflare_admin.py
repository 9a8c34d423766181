"""An admin of an NVFlare federation, in a process of his own: what came of his orders, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from nvflare.fuel.flare_api.flare_api import new_secure_session


def main(kit: str, *orders: str) -> None:
    """Orders are ``submit:FOLDER`` and ``cat:SITE:FILE``."""
    session = new_secure_session("admin@others.org", kit, timeout=60)
    found: list[Any] = []
    try:
        for order in orders:
            what, _, about = order.partition(":")
            if what == "cat":
                site, _, file = about.partition(":")
                found.append(session.cat_target(site, file=file))
            else:
                _, meta = session.monitor_job_and_return_job_meta(session.submit_job(about), timeout=240)
                found.append({key: (meta or {}).get(key) for key in ("status", "job_deploy_detail")})
    finally:
        session.close()
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
