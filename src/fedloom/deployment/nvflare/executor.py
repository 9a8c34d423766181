"""The silo's half as NVFlare's executor, in the process that a site starts for a job."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from fedloom.deployment.hosted.seat import Said, answer_at, awake
from fedloom.deployment.nvflare.job import CHARTER, FRAME, TASK
from fedloom.deployment.nvflare.kit import SEAT
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError


class SiloExecutor(Executor):
    """Answers tasks; whose silo it is, the site's certificate says, and where that lies, the site's own file."""

    def __init__(self) -> None:
        super().__init__()
        # One thread for all tasks: how torch treats the smallest numbers is a setting of a thread's own.
        self._hand = ThreadPoolExecutor(1)
        self._awake = lru_cache(maxsize=1)(awake)

    def handle_event(self, event_type: str, _fl_ctx: FLContext) -> None:
        """Let the thread end with the job."""
        if event_type == EventType.END_RUN:
            self._hand.shutdown(wait=False)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, _abort: Signal) -> Shareable:
        """The answer to a task, which is not cut short when its job is aborted: it is paid for, and kept."""
        try:
            frame, charter = Frame.of_bytes(shareable[FRAME]), str(shareable[CHARTER])
        except (FedloomError, KeyError):
            return make_reply(ReturnCode.BAD_TASK_DATA)
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        said = said_at(Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_site_config_dir()), fl_ctx)
        found = self._hand.submit(answer_at, said, {CHARTER: charter}, frame, self._awake).result()
        reply = make_reply(ReturnCode.OK)
        reply[FRAME] = found.to_bytes()
        return reply


def said_at(local: Path, fl_ctx: FLContext) -> Said:
    """What a site's operator says."""
    try:
        values = tomllib.loads((local / SEAT).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        values = {}
    return Said({**values, "silo": fl_ctx.get_identity_name()}, f"this site's {local.name}/{SEAT}")
