"""The server's half as NVFlare's controller: the rounds are fedloom's, the tasks NVFlare's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedloom.deployment.hosted.conducting import conduct
from fedloom.deployment.hosted.run import HostedRun
from fedloom.deployment.nvflare.job import CHARTER, FRAME, TASK, read_told
from fedloom.deployment.nvflare.wire import Came, NVFlareWire
from fedloom.engines.remote.frames import Frame
from fedloom.errors import FedloomError


class Conductor(Controller):
    """Carries an experiment out; a job that is submitted again goes on where it stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: Counter[str] = Counter()  # how often a site was gone and came back

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to put away: a run's folder is whole at every moment."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """What comes after it was given up is not read."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Count returns."""
        if event_type == EventType.CLIENT_RECONNECTED:
            self.returns[str(fl_ctx.get_prop(FLContextKey.RECONNECTED_CLIENT_NAME))] += 1

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """A run, from its start or from where it stopped, to its end."""
        try:
            told = read_told(Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)))
            hosted = HostedRun.of(told)
            _check_place(hosted.run)
            sites = JobSites(self, fl_ctx, abort_signal, told)
            conduct(hosted, NVFlareWire(sites, hosted.charter.silos), "nvflare job submit")
        except FedloomError as error:
            self.system_panic(str(error), fl_ctx)


def _check_place(run: str) -> None:
    """Who submits a job is not who operates its server: he has nothing written elsewhere."""
    home = Path.home().resolve()
    if home not in (home / run).resolve().parents:
        raise FedloomError(f"run = '{run}' is no folder below the home of this server's user")


class JobSites:
    """The sites of a job, as its controller knows them."""

    def __init__(self, conductor: Conductor, fl_ctx: FLContext, abort: Signal, told: Mapping[str, Any]) -> None:
        self._conductor, self._fl_ctx, self._abort = conductor, fl_ctx, abort
        self._charter = str(told["charter"])

    def present(self) -> dict[str, int]:
        """Those that NVFlare has not given up."""
        if self._abort.triggered:
            raise FedloomError("the job was aborted; submit it again to go on with its run")
        names = [client.name for client in self._fl_ctx.get_engine().get_clients()]
        gone = self._conductor.get_client_disconnect_time
        return {name: self._conductor.returns[name] for name in names if not gone(name)}

    def assign(self, site: str, frame: Frame, came: Came) -> Callable[[], None]:
        """A task of its own, which takes the charter along: a site keeps nothing of a job."""
        data = Shareable()
        data[FRAME], data[CHARTER] = frame.to_bytes(), self._charter

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._conductor.log_debug(fl_ctx, f"{site} has answered")
            code = client_task.result.get_return_code()
            if code != ReturnCode.OK:
                return came(None, f"NVFlare says {code}")
            try:
                return came(Frame.of_bytes(client_task.result[FRAME]), "")
            except (FedloomError, KeyError) as error:
                return came(None, f"its answer is none of fedloom's: {error}")

        def done(task: Task, fl_ctx: FLContext) -> None:
            self._conductor.log_debug(fl_ctx, f"the task of {site} ended: {task.completion_status}")
            if task.completion_status != TaskCompletionStatus.OK:  # after an answer nobody listens any more
                came(None, f"NVFlare says {task.completion_status.value}")

        task = Task(name=TASK, data=data, result_received_cb=received, task_done_cb=done)
        self._conductor.send(task, self._fl_ctx, targets=[site])
        return partial(self._conductor.cancel_task, task)
