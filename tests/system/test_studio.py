"""The studio in a real browser, over a real connection, while a run of another process goes on."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fedloom.experiment import train
from fedloom.runs.at_work import worker_of
from fedloom.runs.files import write_atomically
from fedloom.runs.folder import RunFolder
from fedloom.studio import app
from fedloom.studio.watch import RunWatch
from studio.serving import Running, serving
from support import tiny_config, wait_for

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.system

HOSTILE = "'><img src=x onerror=alerted=1>"
SMALL = "rounds=5000+data.silos=2+data.records_per_silo=40+model.hidden=[16]+local.steps=1+evaluation.metrics=[]"


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Over two finished runs, one with two latent dimensions."""
    root = tmp_path_factory.mktemp("studio") / "runs"
    small = ("rounds=3", "evaluation.every=1", "evaluation.samples=20", "evaluation.metrics=['spread']")
    train(tiny_config(*small, "method.prior=symmetrical"), root / "four")
    train(tiny_config(*small, "model.latent=2"), root / "plane")
    with serving(root) as running:
        yield running


@pytest.fixture
def page(browser: Chrome) -> Iterator[Chrome]:
    """The browser; whatever happens, its console stays silent."""
    browser.get("about:blank")
    browser.get_log("browser")
    yield browser
    assert browser.get_log("browser") == []
    browser.get("about:blank")


def one(page: Chrome, selector: str) -> Any:
    return page.find_element("css selector", selector)


def confirm(page: Chrome) -> None:
    """Say yes on the page that a click has led to, once it is there."""
    wait_for(lambda: page.find_elements("css selector", "#confirm"))[0].click()


def said(page: Chrome, selector: str) -> str:
    """The text of an element that may be replaced at any moment."""
    found: str = page.execute_script("return document.querySelector(arguments[0])?.textContent || ''", selector)
    return found


def said_at_once(page: Chrome, *selectors: str) -> list[str]:
    """The texts of several elements at one moment: between two questions the page may go on."""
    found: list[str] = page.execute_script(
        "return [...arguments].map(one => document.querySelector(one)?.textContent || '')", *selectors
    )
    return found


def pixels(page: Chrome, canvas: str) -> str:
    """What is on a canvas."""
    found: str = page.execute_script(f"return document.getElementById('{canvas}').toDataURL()")
    return found


def picture(page: Chrome, button: Any) -> str:
    """What is on a button, as if it were on a canvas."""
    found: str = page.execute_script(
        """
        const image = arguments[0].querySelector("img"), canvas = document.createElement("canvas");
        canvas.width = image.naturalWidth;
        canvas.height = image.naturalHeight;
        canvas.getContext("2d").drawImage(image, 0, 0);
        return canvas.toDataURL();
        """,
        button,
    )
    return found


def painted(page: Chrome) -> None:
    """Wait until the explorer has all its pictures: each that comes moves what lies below it."""
    ready = "document.images.length === 12 && [...document.images].every(one => one.naturalWidth)"
    unpainted = "[...document.querySelectorAll('canvas')].some(one => one.width === 300)"  # as wide as a new one is
    wait_for(lambda: page.execute_script(f"return {ready} && !{unpainted}"))


# Stops itself as soon as a round is logged: however fast it is, it goes on before somebody's eyes.
HALTING_RUN = """
import os, runpy, signal
from fedloom.runs.folder import RunFolder

record = RunFolder.record_round

def record_and_halt(*arguments):
    RunFolder.record_round = record
    record(*arguments)
    os.kill(os.getpid(), signal.SIGSTOP)

RunFolder.record_round = record_and_halt
runpy.run_module("fedloom", run_name="__main__", alter_sys=True)
"""


def test_a_demo_run_is_watched_to_its_end(studio: Running, page: Chrome) -> None:
    """It is started in another process, appears by itself, goes on before one's eyes, and ends."""
    page.get(studio.address)
    wait_for(lambda: len(page.find_elements("css selector", "table.runs tbody tr")) == 2)
    box = one(page, f"input[value='{studio.key('four')}']")
    box.click()
    toml = studio.root.parent / "demo.toml"
    rounds = 20
    toml.write_text(tiny_config(f"rounds={rounds}", "evaluation.every=10").to_toml())
    command = [sys.executable, "-c", HALTING_RUN, "run", str(toml), "--out", str(studio.root / "live")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        halted = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert halted is not None
        assert halted.si_code == os.CLD_STOPPED
        wait_for(lambda: said(page, "tr[data-name='live'] .count") == f"1 of {rounds}")
        assert one(page, "tr[data-name='live']").get_attribute("data-state") == "running"
        one(page, "tr[data-name='live'] a").click()
        seen: list[str] = [wait_for(lambda: said(page, "#progress .count"))]
        process.send_signal(signal.SIGCONT)

        def over() -> bool:
            count, state, whole = said_at_once(page, "#progress .count", "#state", "main")
            if count not in seen:
                seen.append(count)
            return state.endswith("finished") and count == f"{rounds} of {rounds}" and f"round {rounds}" in whole

        wait_for(over, seconds=120)
    finally:
        process.send_signal(signal.SIGCONT)
        process.wait(timeout=60)
    assert len(seen) >= 2, "it was seen to go on"
    wait_for(lambda: said(page, "#news") == "live: finished")
    wait_for(lambda: page.execute_script("return [...document.images].every(one => one.complete && one.naturalWidth)"))
    page.back()
    wait_for(lambda: said(page, "tr[data-name='live'] .state").endswith("finished"))


@pytest.mark.parametrize("path", ["", "runs/KEY", "compare?run=KEY&run=OTHER"])
def test_an_end_before_the_page_listens_is_said(
    studio: Running, page: Chrome, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The page was made while the run went on; the first that its stream says is that it has finished."""
    stream, over = app._stream, threading.Event()

    async def late(watch: RunWatch, keys: Sequence[str]) -> AsyncIterator[str]:
        await asyncio.to_thread(over.wait)
        async for line in stream(watch, keys):
            yield line

    monkeypatch.setattr(app, "_stream", late)
    monkeypatch.setattr(studio.server.studio.watch, "tick", 0.0)  # nobody is told what was seen before
    folder = studio.root / "brief"
    shutil.copytree(studio.root / "four", folder, ignore=shutil.ignore_patterns("status.json"))
    (folder / "run.toml").touch()  # a sign of life
    try:
        page.get(studio.address + path.replace("KEY", studio.key("brief")).replace("OTHER", studio.key("four")))
        shown = {"": "tr[data-name='brief'] .state", "runs/KEY": "#state"}
        assert path not in shown or said(page, shown[path]).endswith("running")
        RunFolder.open(folder).end("finished", 3)
        over.set()
        wait_for(lambda: said(page, "#news") == "brief: finished")
    finally:
        over.set()
        page.get("about:blank")
        shutil.rmtree(folder)


def test_a_choice_survives_what_happens_meanwhile(studio: Running, page: Chrome) -> None:
    page.get(studio.address)
    box = wait_for(lambda: page.find_elements("css selector", f"input[value='{studio.key('plane')}']"))[0]
    box.click()
    log = studio.root / "plane" / "evaluations.jsonl"
    write_atomically(log, json.dumps({"round": 3, "key": "frechet/x/n9", "value": 5.0}).encode() + b"\n")
    toml = (studio.root / "plane" / "run.toml").read_text()
    write_atomically(studio.root / "plane" / "run.toml", toml.replace('name = "demo"', 'name = "renamed"').encode())
    wait_for(lambda: "renamed" in said(page, "tr[data-name='plane']"))
    assert box.is_selected()
    assert page.switch_to.active_element == box
    one(page, "#filter").send_keys("four")
    wait_for(lambda: not one(page, "tr[data-name='plane']").is_displayed())
    assert one(page, "tr[data-name='four']").is_displayed()


def test_two_runs_are_compared_by_keyboard_alone(studio: Running, page: Chrome) -> None:
    from selenium.webdriver.common.keys import Keys

    page.get(studio.address)
    wait_for(lambda: page.find_elements("css selector", "tr[data-name='four']"))
    keys = {studio.key("four"), studio.key("plane")}
    one(page, "body").send_keys(Keys.TAB)
    assert page.switch_to.active_element.text == "Skip to the content"
    passed: list[str] = []
    while not keys <= set(passed):
        assert len(passed) < 30
        focused = page.switch_to.active_element
        passed.append(focused.get_attribute("value") or focused.text)
        if passed[-1] in keys:
            focused.send_keys(Keys.SPACE)
        focused.send_keys(Keys.TAB)
    assert passed[:3] == ["Skip to the content", "fedloom studio", "Runs"], "the frame, then the lines"
    assert one(page, "#runs button").is_enabled()
    one(page, "#filter").send_keys(Keys.ENTER)
    wait_for(lambda: said_at_once(page, "h1", ".player output") == ["2 runs compared", "round 3"])
    headers = {cell.text for cell in page.find_elements("css selector", "#metrics th")}
    assert {"four", "plane"} <= headers
    slider = one(page, "#slider")
    slider.send_keys(Keys.ARROW_LEFT)
    wait_for(lambda: said(page, ".player output") == "round 2")
    assert {shown.text for shown in page.find_elements("css selector", ".player .shown")} == {"round 2"}


def test_the_plane_is_walked_by_pointer_and_by_arrows(studio: Running, page: Chrome) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    page.get(f"{studio.address}runs/{studio.key('plane')}/explore")
    painted(page)
    plane, middle = one(page, "#plane"), pixels(page, "frame")
    assert one(page, "#where").text == "0.00, 0.00"
    page.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", plane)
    size = plane.size
    ActionChains(page).move_to_element(plane).click_and_hold().move_by_offset(
        size["width"] // 3, -size["height"] // 4
    ).release().perform()
    x, y = (float(part) for part in one(page, "#where").text.split(", "))
    assert x == pytest.approx(2.0, abs=0.05)
    assert y == pytest.approx(1.5, abs=0.05)
    wait_for(lambda: pixels(page, "frame") != middle)
    plane.send_keys(Keys.HOME)
    wait_for(lambda: pixels(page, "frame") == middle)
    plane.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_UP, Keys.SHIFT, Keys.ARROW_UP)
    assert one(page, "#where").text == "0.10, 0.60"
    assert [output.text for output in page.find_elements("css selector", "#sliders output")] == ["0.10", "0.60"]
    assert page.switch_to.active_element == plane


def test_directions_groups_and_two_images(studio: Running, page: Chrome) -> None:
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.select import Select

    page.get(f"{studio.address}runs/{studio.key('four')}/explore")
    wait_for(lambda: len(page.find_elements("css selector", "#sliders input")) == 4)
    painted(page)
    seen = [pixels(page, "frame")]

    def changed() -> None:
        wait_for(lambda: pixels(page, "frame") not in seen)
        seen.append(pixels(page, "frame"))

    page.find_elements("css selector", "#sliders input")[2].send_keys(Keys.END)
    changed()
    Select(one(page, "select[name='group']")).select_by_value("fashion-mnist")
    changed()
    Select(one(page, "select[name='prior']")).select_by_value("mnist")
    changed()
    painted(page)
    ends = page.find_elements("css selector", ".ends button")
    ends[4].click()
    ends[7].click()
    marks = [button.find_element("tag name", "span").text for button in ends]
    assert marks == ["", "", "", "", "A", "", "", "B", "", "", "", ""]
    first, last = (picture(page, ends[place]) for place in (4, 7))
    wait_for(lambda: pixels(page, "middle") == first)
    one(page, "#share").send_keys(Keys.END)
    wait_for(lambda: pixels(page, "middle") == last != first)
    wait_for(
        lambda: (
            page.execute_script("const strip = document.getElementById('strip'); return [strip.width, strip.height]")
            == [9 * 28, 28]
        )
    )
    assert not one(page, "#complaint").is_displayed()


def test_images_follow_within_a_tenth_of_a_second(studio: Running, page: Chrome) -> None:
    """Fifty frames after each other, as the browser sees them; the median, because the machine has other work."""
    page.get(f"{studio.address}runs/{studio.key('plane')}/explore")
    painted(page)
    times = page.execute_async_script(
        """
        const done = arguments[arguments.length - 1], times = [];
        (async () => {
          for (let i = 0; i < 50; i += 1) {
            const start = performance.now();
            const answer = await fetch(`/runs/${arguments[0]}/3/frame?values=${i / 25 - 1},0.5`);
            await createImageBitmap(await answer.blob());
            times.push(performance.now() - start);
          }
          done(times);
        })();
        """,
        studio.key("plane"),
    )
    assert sorted(times)[25] < 100


def test_with_a_token_the_printed_address_opens_everything(studio: Running, page: Chrome) -> None:
    with serving(studio.root, "a-token-that-is-long-enough") as guarded:
        page.get(guarded.address)
        assert page.current_url == f"http://127.0.0.1:{guarded.port}/"
        box = wait_for(lambda: page.find_elements("css selector", "tr[data-name='four'] input"))[0]
        box.click()
        wait_for(lambda: guarded.server.studio.watch.watchers == 1)
        page.get(f"http://127.0.0.1:{guarded.port}/runs/{guarded.key('four')}/explore")
        painted(page)
        page.delete_all_cookies()
        assert raw(guarded, "GET", "/", {})[0] == 401
        page.get("about:blank")


@pytest.mark.parametrize("width", [390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "path", ["", "runs/KEY", "runs/KEY/explore", "compare?run=KEY&run=OTHER", "papers/fissionvae/table1"]
)
def test_it_fits_every_screen(studio: Running, page: Chrome, path: str, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    try:
        page.get(studio.address + path.replace("KEY", studio.key("four")).replace("OTHER", studio.key("plane")))
        wait_for(lambda: one(page, "h1").text)
        if path.endswith("explore"):
            painted(page)
        page.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.execute_script(overflow) == 0
        colour = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert colour == {"light": "rgb(253, 252, 249)", "dark": "rgb(18, 22, 29)"}[scheme]
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def raw(studio: Running, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """A request as it stands: no client has tidied up its path."""
    connection = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/static/../../../../etc/passwd",
        "/static/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/static/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        "/runs/../../etc/passwd",
        "/runs/..%2f..%2fetc%2fpasswd",
        "/runs/%252e%252e%252fetc%252fpasswd",
        "/runs//etc/passwd",
        "//etc/passwd",
    ],
)
def test_no_path_leads_out(studio: Running, path: str) -> None:
    status, content = raw(studio, "GET", path, {})
    assert status == 404
    assert b"root:" not in content


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Host": "evil.example"}, b"", 421),
        ({"Origin": "http://evil.example"}, b"", 403),
        ({"Sec-Fetch-Site": "cross-site"}, b"", 403),
        ({"Content-Length": "1000000"}, b"x" * 1000, 413),
        ({"X-Long": "x" * 20_000}, b"", 431),
    ],
    ids=["rebinding", "origin", "cross-site", "body", "headers"],
)
def test_foreign_and_oversized_requests_are_refused(
    studio: Running, headers: dict[str, str], body: bytes, status: int
) -> None:
    assert raw(studio, "GET", "/", headers, body)[0] == status


def test_a_page_of_another_site_gets_nothing(studio: Running, browser: Chrome, tmp_path: Path) -> None:
    """A page of another server tries to read, to embed and to frame the studio."""
    key = studio.key("four")
    (tmp_path / "evil.html").write_text(
        f"<!DOCTYPE html><title>evil</title><img id=i src='{studio.address}runs/{key}/samples/3/0'>"
        f"<script src='{studio.address}static/page.js' onload='window.loaded = 1'></script>"
        f"<iframe id=f src='{studio.address}'></iframe>"
        f"<script>fetch('{studio.address}').then((a) => a.text()).then((t) => {{ window.read = t }},"
        " () => { window.refused = 1 })</script>"
    )
    (tmp_path / "favicon.ico").write_bytes(b"")
    # With threads: a browser may open a connection before it has anything to ask.
    server = ThreadingHTTPServer(("localhost", 0), functools.partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        browser.get(f"http://localhost:{server.server_port}/evil.html")
        wait_for(lambda: browser.execute_script("return window.refused"))
        assert browser.execute_script("return [window.read, window.loaded, i.naturalWidth]") == [None, None, 0]
        browser.switch_to.frame("f")
        assert "Runs" not in browser.page_source
    finally:
        browser.switch_to.default_content()
        browser.get("about:blank")
        browser.get_log("browser")
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """A server that says nothing on stderr."""

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_it_answers_at_the_address_that_it_prints_until_it_is_interrupted(studio: Running) -> None:
    command = [sys.executable, "-m", "fedloom", "studio", str(studio.root), "--port", "0", "--no-open"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A suite that a shell has put into the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        said, _, address = process.stdout.readline().partition(" is at ")
        assert said == f"The studio of {studio.root.resolve()}"
        stream = urllib.request.urlopen(f"{address.strip()}events", timeout=60)
        assert stream.readline() == b"event: run\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        # Not communicate(): it loses what readline has read ahead.
        assert (process.stdout.read(), process.stderr.read()) == ("Ctrl-C ends it.\n", "stopped\n")
    finally:
        process.kill()


def test_a_run_is_handed_on_from_the_page(page: Chrome, tmp_path: Path) -> None:
    """Certificate and data set by clicks; what stands against it has to be accepted first."""
    root = tmp_path / "runs"
    train(tiny_config(), root / HOSTILE)
    with serving(root, works=True) as running:
        page.get(running.address)
        assert [one.text for one in page.find_elements("css selector", "table.runs a")] == [HOSTILE]
        page.get(f"http://127.0.0.1:{running.port}/runs/{running.key(HOSTILE)}")
        one(page, "a[href$='/release']").click()
        one(page, "button[data-deed=certify]").click()
        assert HOSTILE in wait_for(lambda: said(page, "#command"))
        confirm(page)
        wait_for(lambda: said(page, "#certificate").count("certificate.pdf"))
        assert (root / HOSTILE / "certificate" / "certificate.pdf").read_bytes().startswith(b"%PDF")
        one(page, "#dataset input[name=risk]").click()
        one(page, "button[data-deed=synthesize]").click()
        confirm(page)
        wait_for(lambda: str(root / HOSTILE / "dataset") in said(page, "main"))
        assert len(list((root / HOSTILE / "dataset").rglob("*.png"))) == 1000
        assert page.execute_script("return window.alerted") is None


def test_two_people_do_one_thing_once(page: Chrome, tmp_path: Path) -> None:
    """Both look at the same deed; who confirms later is told, and nothing is done twice."""
    root = tmp_path / "runs"
    root.mkdir()
    with serving(root, works=True) as running:
        page.get(running.address)
        mine = page.current_window_handle
        address = f"http://127.0.0.1:{running.port}/work/look?deed=begin&source=demo&name=ours&settings=" + SMALL
        page.get(address)
        page.switch_to.new_window("tab")
        theirs = page.current_window_handle
        page.get(address)
        try:
            confirm(page)
            worker = wait_for(lambda: worker_of(root / "ours"))
            page.switch_to.window(mine)
            confirm(page)
            wait_for(lambda: "there is a run 'ours' already" in said(page, "main"))
            assert worker_of(root / "ours") == worker
            stops = f"http://127.0.0.1:{running.port}/work/look?deed=stop&run={running.key('ours')}"
            for window in (mine, theirs):
                page.switch_to.window(window)
                page.get(stops)
            for window in (mine, theirs):  # the second finds that nobody is at work, and that is what was wanted
                page.switch_to.window(window)
                confirm(page)
                wait_for(lambda: said(page, "h1") == "ours")
            assert worker_of(root / "ours") is None
        finally:
            page.switch_to.window(theirs)
            page.close()
            page.switch_to.window(mine)
            page.get_log("browser")  # a refusal is an error to the console
            if worker := worker_of(root / "ours"):
                os.kill(worker.process, signal.SIGKILL)


def test_a_run_is_begun_and_stopped_from_the_page(page: Chrome, tmp_path: Path) -> None:
    """By clicks alone, with the token that the address brings."""
    root = tmp_path / "runs"
    root.mkdir()
    with serving(root, works=True) as running:
        page.get(running.address)
        one(page, "a[href='/work/begin']").click()
        one(page, "#settings").send_keys(
            "rounds=5000 data.silos=2 data.records_per_silo=40 model.hidden=[16] local.steps=1 evaluation.metrics=[]"
        )
        one(page, "#name").send_keys("clicked")
        one(page, "form button").click()
        assert f"--out {root / 'clicked'}" in wait_for(lambda: said(page, "#command"))
        assert not (root / "clicked").exists()
        confirm(page)
        try:
            wait_for(lambda: worker_of(root / "clicked"))
            page.get(running.address)
            wait_for(lambda: "running" in said(page, "table.runs"))
            page.get(f"http://127.0.0.1:{running.port}/runs/{running.key('clicked')}")
            one(page, "button[data-deed=stop]").click()
            confirm(page)
            wait_for(lambda: worker_of(root / "clicked") is None)
            page.get("about:blank")  # the run's page may still be on its way when the studio ends
        finally:
            if worker := worker_of(root / "clicked"):
                os.kill(worker.process, signal.SIGKILL)
