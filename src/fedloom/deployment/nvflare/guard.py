"""What a hardened site's process does for NVFlare's server: it runs fedloom's job, and nothing else.

NVFlare asks for rights (``authorization.json``) only where a message of the server's says that it wants to be checked,
and grants all to the role 'super', which a server may name as it likes. So whoever runs a server of his own making gets
past them, and past the list of allowed classes. The guard looks at what a message is, not at what it says of itself.
"""

from __future__ import annotations

import io
import re
import zipfile
from typing import Any

import nvflare
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

from fedloom.deployment.nvflare.job import SITE_CONFIG, SITE_TEXT
from fedloom.deployment.nvflare.kit import VERSION

SIGNATURES = {
    f"{folder}{name}" for folder in ("", "config/") for name in (NVFLARE_SIG_FILE, NVFLARE_SUBMITTER_CRT_FILE)
}
LARGEST = 2**20  # bytes of an entry
# As NVFlare numbers jobs. A job's number names its folder in the kit, and what lies there is removed for it; it also
# stands in the command of its process.
JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
TOPICS = frozenset(
    {
        TrainingTopic.DEPLOY,
        TrainingTopic.START_JOB,
        TrainingTopic.ABORT,
        TrainingTopic.ABORT_TASK,
        TrainingTopic.CHECK_STATUS,
        TrainingTopic.CHECK_RESOURCE,
        TrainingTopic.CANCEL_RESOURCE,
        TrainingTopic.NOTIFY_JOB_STATUS,
        TrainingTopic.GET_SCOPES,
        SysCommandTopic.REPORT_VERSION,
    }
)


class SiteGuard(FLComponent):
    """Stands in ``local/resources.json``; where it cannot do its work, the site does not start."""

    def handle_event(self, event_type: str, _fl_ctx: FLContext) -> None:
        """Before the site connects its commands."""
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            if nvflare.__version__ != VERSION:
                raise UnsafeComponentError(f"the guard knows NVFlare {VERSION}, and this is {nvflare.__version__}")
            found = ClientRequestProcessors.request_processors
            found[:] = guarded(found)  # in place: the process has taken hold of this list already


def guarded(processors: list[RequestProcessor]) -> list[RequestProcessor]:
    """Those that a job needs, each with the guard before it; all others are unknown to this site."""
    kept = [each for each in processors if TOPICS.issuperset(each.get_topics())]
    return [each if isinstance(each, Guarded) else Guarded(each) for each in kept]


class Guarded(RequestProcessor):
    """A processor of NVFlare's that is given fedloom's job alone."""

    def __init__(self, inner: RequestProcessor) -> None:
        self._inner = inner

    def get_topics(self) -> list[str]:
        """As the other's."""
        return list(self._inner.get_topics())

    def process(self, req: Message, app_ctx: object) -> Message:
        """Refuse, or pass on."""
        job = req.get_header(RequestHeader.JOB_ID, "")
        if req.topic in (TrainingTopic.DEPLOY, TrainingTopic.START_JOB) and not JOB.fullmatch(str(job)):
            return error_reply(f"this site knows jobs by NVFlare's own numbers, and '{job}' is none")
        if req.topic == TrainingTopic.DEPLOY and (problem := objection(req.body)):
            return error_reply(f"this site runs fedloom's job alone: {problem}")
        return self._inner.process(req, app_ctx)


def objection(app: Any) -> str:
    """Why an app is not exactly the one that fedloom writes for sites; a signature may lie beside."""
    try:
        with zipfile.ZipFile(io.BytesIO(app)) as archive:
            held = archive.infolist()
            names = [entry.filename for entry in held if entry.filename not in {*SIGNATURES, "config/"}]
            if names != [SITE_CONFIG] or any(entry.file_size > LARGEST for entry in held):
                return f"it holds {', '.join(sorted(entry.filename for entry in held))}"
            return "" if archive.read(SITE_CONFIG) == SITE_TEXT else f"its {SITE_CONFIG} is another"
    except (TypeError, OSError, zipfile.BadZipFile) as error:
        return f"it is no archive ({error})"
