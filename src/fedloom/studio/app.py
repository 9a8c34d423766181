"""What the studio answers: pages, their parts, pictures, frames and the stream of changes."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl

import torch
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.exceptions import HTTPException
from torch import Tensor

from fedloom.errors import ConfigError, FedloomError
from fedloom.reports.pictures import BROKEN_IMAGE, encoded_file
from fedloom.runs.folder import RunFolder
from fedloom.runs.images import grid_of
from fedloom.studio import pages
from fedloom.studio.catalogue import NotServedError
from fedloom.studio.explorer import ATLAS, STRIP, Explorer, View
from fedloom.studio.gate import DEED, Admission, StudioGate, lock
from fedloom.studio.handing_on import CERTIFICATE_TYPES, certificate_file, handing_on
from fedloom.studio.pages import MOST_COMPARED
from fedloom.studio.studio import Studio
from fedloom.studio.watch import MOST_WATCHERS, RunWatch
from fedloom.studio.workbench import HAND_ON, Workbench
from fedloom.templating import MARK, TOKENS

ROOM = Path(__file__).parent
SHARED = (TOKENS, MARK, "reports/page.css", "reports/page.js")
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Everything that is served as it is, by name: no address is ever turned into a path.
STATIC = {
    file.name: file
    for file in (*(ROOM / "static").iterdir(), *(ROOM.parent / name for name in SHARED))
    if file.suffix in TYPES
}
A_DAY = {"Cache-Control": "private, max-age=86400"}

router = APIRouter()


def studio_of(request: Request) -> Studio:
    """The studio that the application was made for."""
    found: Studio = request.app.state.studio
    return found


@dataclass(frozen=True)
class Look:
    """A view through the generators of one round."""

    explorer: Explorer
    view: View


Name = Annotated[str, Query(max_length=200)]
Keys = Annotated[list[str], Query(default_factory=list)]
Here = Annotated[Studio, Depends(studio_of)]


def look_of(
    studio: Here, key: str, round: int, group: Name = "", prior: Name = "", pathway: Name = "", label: Name = ""
) -> Look:
    """What the address of a frame says about the view."""
    explorer = studio.explorer(key, round)
    return Look(explorer, explorer.settled(View(group, prior, pathway, label)))


def values_of(values: Annotated[str, Query(max_length=200)] = "") -> list[float]:
    """Numbers with commas between them."""
    try:
        return [float(value) for value in values.split(",")] if values else []
    except ValueError as error:
        raise ConfigError(f"values = '{values}' must be numbers with commas between them") from error


Looked = Annotated[Look, Depends(look_of)]
Values = Annotated[list[float], Depends(values_of)]


def make_app(studio: Studio, door: Admission) -> FastAPI:
    """The application, behind its gate."""
    app = FastAPI(title="fedloom studio", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.studio = studio
    app.include_router(router)
    app.add_exception_handler(FedloomError, _mistake)
    app.add_exception_handler(RequestValidationError, _mistake)
    app.add_exception_handler(HTTPException, _mistake)
    app.add_exception_handler(Exception, _fault)
    app.add_middleware(StudioGate, door=door)
    return app


def _mistake(request: Request, error: Exception) -> Response:
    """One sentence: a page for people, a line for scripts."""
    status, sentence = 400, str(error)
    if isinstance(error, NotServedError):
        status = 404
    elif isinstance(error, HTTPException):
        status, sentence = error.status_code, "there is nothing at this address"
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        sentence = f"{first['loc'][-1]}: {first['msg']}"
    return _sentence(request, sentence, status)


def _fault(request: Request, _: Exception) -> Response:
    """Of the studio's own, which its terminal shows; this answer does not pass the gate."""
    answer = _sentence(request, "the studio failed at this; its terminal says how", 500)
    lock(answer.headers)
    return answer


def _sentence(request: Request, sentence: str, status: int) -> Response:
    if "text/html" in request.headers.get("accept", ""):
        return _html(pages.error_page(sentence), status)
    return PlainTextResponse(sentence.encode("utf-8", errors="replace"), status)


def _html(document: str, status: int = 200) -> HTMLResponse:
    # A lone half of a surrogate pair, from a hostile name, has no bytes in UTF-8.
    return HTMLResponse(document.encode("utf-8", errors="replace"), status)


@router.get("/static/{name}")
def static(name: str) -> Response:
    """A file of the front end."""
    if name not in STATIC:
        raise NotServedError("there is no such file in the studio")
    return Response(STATIC[name].read_bytes(), media_type=TYPES[STATIC[name].suffix])


@router.get("/")
async def runs(studio: Here) -> Response:
    """All runs at a summary."""
    return _html(
        pages.runs_page(studio.catalogue.root.name, await studio.watch.shared_look(), studio.workbench is not None)
    )


@router.get("/events")
async def events(studio: Here, run: Keys) -> Response:
    """Runs as they change: all, or some by their keys."""
    if len(run) > MOST_COMPARED or studio.watch.watchers >= MOST_WATCHERS:
        return PlainTextResponse(f"at most {MOST_WATCHERS} pages may watch, each {MOST_COMPARED} runs or all", 503)
    return StreamingResponse(_stream(studio.watch, run), media_type="text/event-stream")


async def _stream(watch: RunWatch, keys: Sequence[str]) -> AsyncIterator[str]:
    async for event in watch.changes(keys):
        if event is None:
            yield ": still here\n\n"
            continue
        key, live_run = event
        found: dict[str, Any] = {"key": key}
        if live_run is not None:
            found |= {
                "stamp": live_run.summary.stamp,
                "state": live_run.state,
                "name": live_run.summary.entry.name,
                "row": pages.run_row(live_run),
                "progress": pages.progress(live_run.summary),
                "mark": pages.state_mark(live_run.state),
            }
        yield f"event: {'run' if live_run else 'gone'}\ndata: {json.dumps(found)}\n\n"


@router.get("/compare")
def compare(studio: Here, run: Keys) -> Response:
    """Chosen runs side by side."""
    return _html(pages.compare_page(*studio.compared(run)))


@router.get("/compare/body")
def compare_body(studio: Here, run: Keys) -> Response:
    """The same, without the frame of the page."""
    return _html(pages.compare_body(*studio.compared(run)))


@router.get("/privacy")
async def privacy(studio: Here) -> Response:
    """Quality over epsilon."""
    live_runs = await studio.watch.shared_look()
    return _html(
        await asyncio.to_thread(
            pages.privacy_page, studio.catalogue.root.name, [each.summary for each in live_runs.values()]
        )
    )


@router.get("/work/begin")
def begin_run(studio: Here) -> Response:
    """What a run may begin from."""
    return _html(pages.begin_page(studio.catalogue.root.name, _workbench(studio).presets))


@router.get("/work/look")
def look_at_deed(studio: Here, request: Request) -> Response:
    """A deed before it is done."""
    bench, asked = _workbench(studio), dict(request.query_params)
    deed = bench.deed(asked)
    return _html(pages.confirm_page(deed, asked, bench.seal(deed)))


@router.post(DEED)
async def work(studio: Here, request: Request) -> Response:
    """A deed that was confirmed."""
    asked = dict(parse_qsl((await request.body()).decode("utf-8", errors="replace"), keep_blank_values=True))
    await asyncio.to_thread(_workbench(studio).carry_out, asked)
    key = asked.get("run", "")
    after = "/release" if asked["deed"] in HAND_ON else ""
    return RedirectResponse(f"/runs/{key}{after}" if key in studio.catalogue.entries() else "/", 303)


def _workbench(studio: Studio) -> Workbench:
    if studio.workbench is None:
        raise NotServedError("this studio only reads; 'fedloom studio --work' works on runs too")
    return studio.workbench


@router.get("/papers")
def papers() -> Response:
    """Which tables of papers there are."""
    return _html(pages.papers_page())


@router.get("/papers/{paper}/{table}")
async def paper_table(studio: Here, paper: str, table: str) -> Response:
    """A table, obtained beside published."""
    live_runs = await studio.watch.shared_look()
    return _html(await asyncio.to_thread(pages.table_page, f"{paper}/{table}", studio.papers, live_runs.values()))


@router.get("/runs/{key}")
def one_run(studio: Here, key: str) -> Response:
    """A run's page."""
    live_run = studio.live_run(key)
    return _html(pages.run_page(live_run, studio.story(live_run), studio.workbench is not None))


@router.get("/runs/{key}/body")
def run_body(studio: Here, key: str) -> Response:
    """The same, without the frame of the page."""
    return _html(pages.run_body(studio.story(studio.live_run(key))))


@router.get("/runs/{key}/samples/{number}/{place}")
def samples(studio: Here, key: str, number: int, place: int) -> Response:
    """A grid of samples, encoded anew."""
    try:
        kind, content = encoded_file(studio.sample_file(key, number, place))
    except BROKEN_IMAGE as error:
        raise NotServedError(f"the picture of round {number} cannot be read") from error
    return Response(content, media_type=kind, headers=A_DAY)


@router.get("/runs/{key}/records/{place}")
def records(studio: Here, key: str, place: int) -> Response:
    """A grid of held-out records, where they may be shown."""
    kind, content = studio.real_picture(key, place)
    return Response(content, media_type=kind)


@router.get("/runs/{key}/release")
def release(studio: Here, key: str) -> Response:
    """What is handed on, and what stands against it."""
    live_run = studio.live_run(key)
    found = handing_on(RunFolder.open(live_run.summary.entry.path))
    return _html(pages.release_page(live_run, found, studio.workbench is not None))


@router.get("/runs/{key}/certificate/{name}")
def certificate(studio: Here, key: str, name: str) -> Response:
    """A file of a run's certificate, to be kept and not opened here."""
    file = certificate_file(studio.live_run(key).summary.entry.path, name)
    kept = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(file.read_bytes(), media_type=CERTIFICATE_TYPES[name], headers=kept)


@router.get("/runs/{key}/explore")
def explore(studio: Here, key: str) -> Response:
    """The latent explorer."""
    return _html(pages.explore_page(studio.live_run(key), studio.explorer(key)))


@router.get("/runs/{key}/{round}/start")
def start(look: Looked, draw: int = 0) -> Response:
    """Where a random place lies along the main directions, and how much each of them changes."""
    directions = look.explorer.directions(look.view)
    values = look.explorer.coordinates(look.view, draw)
    return JSONResponse({"values": values, "shares": directions.shares, "size": directions.axes.shape[0]})


@router.get("/runs/{key}/{round}/frame")
def frame(look: Looked, values: Values, draw: int = 0) -> Response:
    """The image at a place."""
    return _picture(look, look.explorer.images(look.view, look.explorer.place(look.view, draw, values).unsqueeze(0)))


@router.get("/runs/{key}/{round}/sample")
def sample(look: Looked, draw: int) -> Response:
    """The image at a random place."""
    return _picture(look, look.explorer.images(look.view, look.explorer.drawn(look.view, draw).unsqueeze(0)))


@router.get("/runs/{key}/{round}/atlas")
def atlas(look: Looked, values: Values, draw: int = 0) -> Response:
    """Images all over the plane of the first two directions."""
    return _picture(look, look.explorer.atlas(look.view, draw, values), ATLAS)


@router.get("/runs/{key}/{round}/between")
def between(look: Looked, first: int, last: int, share: Annotated[float, Query(ge=0, le=1)]) -> Response:
    """The image on the way from one random place to another."""
    return _picture(look, look.explorer.between(look.view, (first, last), torch.tensor([share])))


@router.get("/runs/{key}/{round}/strip")
def strip(look: Looked, first: int, last: int) -> Response:
    """Several images on that way, side by side."""
    return _picture(look, look.explorer.between(look.view, (first, last), torch.linspace(0, 1, STRIP)), STRIP)


def _picture(look: Look, images: Tensor, columns: int = 1) -> Response:
    buffer = io.BytesIO()
    grid_of(images, columns, margin=0, kind=look.explorer.generator.kind).save(buffer, format="PNG", compress_level=1)
    return Response(buffer.getvalue(), media_type="image/png")
