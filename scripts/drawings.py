"""Draw the pictures of the documentation anew: the SVGs of docs/images, and the samples at the head of the README.

    python scripts/drawings.py

A drawing is a list of boxes, arrows and words on a grid of its own; colours follow the reader's light or dark theme.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
LINE = 18  # between lines of words
STYLE = """
text { font: 14px sans-serif; fill: #1f2933; text-anchor: middle }
.small { font-size: 12px; fill: #52606d }
.left { text-anchor: start }
rect { fill: #f5f7fa; stroke: #7b8794; rx: 8 }
.open { fill: #e0f2f1; stroke: #00897b }
.home { fill: #fff3e0; stroke: #ef6c00 }
.bare { fill: none; stroke-dasharray: 5 4 }
path { fill: none; stroke: #52606d; stroke-width: 1.5; marker-end: url(#tip) }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e7eb } .small { fill: #b8c2cc } rect { fill: #27303a } path { stroke: #b8c2cc }
  .open { fill: #10403c } .home { fill: #4a2c0a } .bare { fill: none }
}"""


def _text(words: str, x: float, y: float, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


@dataclass(frozen=True)
class Box:
    """A rectangle with words in its middle: the first line in plain letters, the others small."""

    x: int
    y: int
    width: int
    height: int
    words: str
    kind: str = ""  # open: seen by the server; home: stays at the silo; bare: a frame around others

    def svg(self) -> str:
        rectangle = f'<rect class="{self.kind}" x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"/>'
        lines = self.words.split("\n")
        top = self.y + 20 if self.kind == "bare" else self.y + self.height / 2 - (len(lines) - 1) * LINE / 2 + 5
        middle = self.x + self.width / 2
        return rectangle + "".join(
            _text(line, middle, top + place * LINE, "small" if place else "") for place, line in enumerate(lines)
        )


@dataclass(frozen=True)
class Arrow:
    """A straight way from one point to another, with words beside its middle."""

    x: int
    y: int
    to_x: int
    to_y: int
    words: str = ""

    def svg(self) -> str:
        way = f'<path d="M{self.x} {self.y} L{self.to_x} {self.to_y}"/>'
        x, y = (self.x + self.to_x) / 2, (self.y + self.to_y) / 2 - 7
        return way + _text(self.words, x, y, "small")


@dataclass(frozen=True)
class Note:
    """Small words that begin at a point."""

    x: int
    y: int
    words: str

    def svg(self) -> str:
        return _text(self.words, self.x, self.y, "small left")


Drawing = tuple[str, int, int, list[Box | Arrow | Note]]  # what it shows, width, height, and its parts


def idea() -> Drawing:
    """A method is a choice of four parts, and privacy stands around any of them."""
    parts = ("model blocks\nencoder, decoder,\ngenerator ...", "local step\nwhat trains on what,\nby which loss")
    more = ("sharing plan\nwho has the same copy\nof each block", "server step\nmean, or learn\nfrom samples")
    boxes = [Box(30 + 180 * place, 60, 150, 90, words, "open") for place, words in enumerate((*parts, *more))]
    crosses = [Box(187 + 180 * place, 95, 16, 20, "x", "none") for place in range(3)]
    frame = Box(10, 10, 740, 160, "a method, inside a privacy mechanism if there is one", "bare")
    return "The one idea: a method is four parts", 760, 180, [frame, *boxes, *crosses]


def one_round() -> Drawing:
    """What a server and a silo do in turn."""
    server = Box(20, 40, 220, 250, "server", "bare")
    silo = Box(520, 40, 220, 250, "silo: records stay here", "bare")
    return (
        "One round of a federation",
        760,
        310,
        [
            *(server, silo),
            Box(40, 75, 180, 44, "1 draw participants", "open"),
            Box(540, 75, 180, 44, "3 pay the ledger, train", "home"),
            Box(540, 150, 180, 60, "4 update\ndeclared blocks, payloads", "open"),
            Box(40, 160, 180, 50, "5 check, merge by scope", "open"),
            Box(40, 230, 180, 44, "6 server step, measure", "open"),
            Arrow(222, 97, 536, 97, "2 blocks that the sharing plan sends down"),
            Arrow(630, 120, 630, 148),
            Arrow(536, 182, 224, 186, "egress guard: nothing undeclared passes"),
            Arrow(130, 212, 130, 228),
        ],
    )


def engines() -> Drawing:
    """The same round in three places."""
    names = (
        ("reference\nthe plain loop", "one silo after the other\nthe truth for the others"),
        ("fused\none batched program", "all silos of a round at once\nequal up to rounding"),
        ("federation\nmachines of their own", "the same round over a wire\nrecords stay where they are"),
    )
    parts: list[Box | Arrow | Note] = [Box(280, 15, 200, 50, "one experiment file\nrun.toml", "open")]
    for place, (name, about) in enumerate(names):
        left = 20 + 250 * place
        parts += [
            Arrow(380, 67, left + 110, 108),
            Box(left, 110, 220, 56, name),
            Box(left, 176, 220, 56, about, "none"),
        ]
    return "Three engines, one result", 760, 250, parts


def leaves() -> Drawing:
    """What a silo keeps, and what may go through its door."""
    return (
        "What leaves a silo",
        760,
        270,
        [
            Box(20, 20, 330, 230, "silo", "bare"),
            Box(40, 55, 290, 40, "records, labels, subjects", "home"),
            Box(40, 105, 290, 40, "blocks of scope SILO", "home"),
            Box(40, 155, 290, 40, "losses, metrics against records", "home"),
            Box(40, 203, 290, 36, "ledger, keys, coins and noise", "home"),
            Box(400, 100, 110, 70, "egress guard\nthe one door"),
            Arrow(352, 135, 398, 135),
            Box(560, 40, 180, 50, "blocks that go up\nGLOBAL, GROUP, UPLOAD", "open"),
            Box(560, 110, 180, 50, "payloads\ndeclared, and paid for", "open"),
            Box(560, 180, 180, 50, "statement\nwhat it cost, signed", "open"),
            *(Arrow(512, 135, 556, y) for y in (66, 135, 204)),
        ],
    )


def sums() -> Drawing:
    """The five turns of a sum of which nobody sees the parts."""
    turns = (
        ("1 keys\ntwo fresh ones, signed", "keys", "pass keys on\nof at least k silos", "all keys"),
        ("2 shares\nof b and of its mask key", "letters", "pass letters on\nwithout a key to them", "its letters"),
        (
            "3 masked numbers\nx + own mask + mask of each pair",
            "masked x",
            "add up\neach looks like chance",
            "whose came",
        ),
        (
            "4 consent\nto whose numbers came",
            "signature",
            "collect k signatures\nunder one and the same list",
            "k signatures",
        ),
        (
            "5 reveal, one share of each silo\nof b, or of a missing one's mask key",
            "shares",
            "unmask\nthe sum alone",
            "",
        ),
    )
    parts: list[Box | Arrow | Note] = [
        Box(10, 10, 320, 440, "silo u", "bare"),
        Box(430, 10, 320, 440, "server", "bare"),
        Box(30, 42, 280, 50, "x, its numbers with noise\nb, a secret, and two keys", "home"),
        Note(30, 474, "The mask of a pair is added by one silo and taken away by the other: in the sum they cancel."),
    ]
    for place, (silo, up, server, down) in enumerate(turns):
        top = 108 + 68 * place
        last = place == len(turns) - 1
        parts += [Box(30, top, 280, 54, silo), Box(450, top, 280, 54, server, "open" if last else "")]
        parts.append(Arrow(313, top + 20, 446, top + 20, up))
        if down:
            parts.append(Arrow(446, top + 46, 313, top + 46, down))
    return "Secure sums: five turns of one round", 760, 490, parts


def decoders() -> Drawing:
    """ALIGN-FL: what goes up is a decoder, and nothing comes down."""
    about = "encoder stays, a copy of the decoder leaves"
    silos = [Box(20, 20 + 75 * place, 300, 60, f"silo {name}\n{about}", "home") for place, name in enumerate("abc")]
    ways = [Arrow(322, 50 + 75 * place, 396, 115 + 10 * place) for place in range(3)]
    server = [
        Box(400, 90, 140, 70, "newest decoders\none of each silo", "open"),
        Box(590, 90, 160, 70, "the server's own VAE\nlearns from samples", "open"),
        Arrow(542, 125, 586, 125),
        Note(400, 200, "Nothing comes down, and nothing is averaged."),
    ]
    return "ALIGN-FL: decoders travel, nothing comes down", 760, 250, [*silos, *ways, *server]


def embeddings() -> Drawing:
    """Labelled embeddings: one generator for all, classifiers at home."""
    return (
        "Labelled embeddings: a generator is shared, classifiers are made at home",
        760,
        230,
        [
            Box(10, 10, 740, 200, "each silo", "bare"),
            Box(30, 50, 130, 60, "images\nlabels", "home"),
            Box(215, 50, 150, 60, "vectors\nfrozen public network", "home"),
            Box(420, 50, 150, 60, "private generator\nthe only part to leave", "open"),
            Box(420, 135, 150, 60, "synthetic vectors\nof all classes", "open"),
            Box(605, 90, 130, 60, "classifier\nreal and synthetic", "home"),
            Arrow(162, 80, 211, 80),
            Arrow(367, 80, 416, 80),
            Arrow(495, 112, 495, 133),
            Arrow(572, 165, 603, 135),
            Note(30, 170, "real vectors teach the classifier too, at home"),
        ],
    )


def flow() -> Drawing:
    """The blocks of fission_flow's network, and whose they are."""
    parts = (
        ("embedding\nGLOBAL: time, group", 145, ""),
        ("down\nGLOBAL", 100, ""),
        ("middle\nGLOBAL", 100, ""),
        ("up\nGROUP: a branch each", 155, "open"),
    )
    left, boxes = 110, list[Box | Arrow | Note]()
    for words, width, kind in parts:
        boxes += [Box(left, 40, width, 60, words, kind), Arrow(left - 22, 70, left - 2, 70)]
        left += width + 24
    ends = [Box(5, 40, 82, 60, "image, time", "none"), Arrow(left - 22, 70, left - 2, 70)]
    return (
        "fission_flow: what tells domains apart is the group's",
        760,
        130,
        [*ends, *boxes, Note(left, 75, "velocity")],
    )


def wire() -> Drawing:
    """The processes of a deployment."""
    return (
        "A federation of machines: silos call, nobody calls a silo",
        760,
        270,
        [
            Box(10, 10, 310, 245, "coordinator's machine", "bare"),
            Box(440, 10, 310, 245, "each silo's machine", "bare"),
            Box(30, 42, 270, 46, "fedloom run --federation DIR"),
            Box(30, 112, 270, 52, "executor\nrounds, torch"),
            Box(30, 188, 270, 52, "hub, the one port\norders, answers, parts on disk", "open"),
            Box(460, 42, 270, 46, "fedloom federation join"),
            Box(460, 112, 270, 52, "worker, inside bubblewrap\ntorch, records, ledger", "home"),
            Box(460, 188, 270, 52, "node\nkey, orders, answers on disk", "open"),
            Arrow(165, 90, 165, 110),
            Arrow(165, 166, 165, 186),
            Arrow(595, 90, 595, 110),
            Arrow(595, 186, 595, 166),
            Arrow(458, 214, 302, 214, "gRPC over TLS 1.3"),
        ],
    )


def house() -> Drawing:
    """The rooms; imports run downwards only."""
    floors = (
        "cli, studio\nwhat people call and see",
        "workflow, reproduction, sweep, audit, downstream, deployment, certificate\nwhat commands do with runs",
        "experiment, reports, release\none experiment, and what is handed on",
        "engines, evaluation, operations, cluster\nwhere it runs, how good it is",
        "methods, runs\nthe recipes, and what remains of a run",
        "discovery\ngroups that nobody named",
        "models, objectives, sharing, privacy\nwhat is learned, given to whom, at what cost",
        "federation, backbones, secure\nwho holds what, and sums of which nobody sees the parts",
        "modalities, config, streams, registry\nwhat a record is, and what was asked for",
    )
    boxes = [Box(60, 15 + 54 * place, 680, 46, words) for place, words in enumerate(floors)]
    return "The house: imports run downwards", 760, 514, [*boxes, Arrow(30, 20, 30, 479), Note(8, 502, "imports")]


def svg(drawing: Drawing) -> str:
    """A drawing as a file of its own."""
    title, width, height, parts = drawing
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}\n.none {{ fill: none; stroke: none }}</style>"
        f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" style="fill:#7b8794;stroke:none"/></marker></defs>'
        + "\n".join(part.svg() for part in parts)
        + "</svg>\n"
    )


DRAWINGS = {
    "idea": idea,
    "round": one_round,
    "engines": engines,
    "leaves": leaves,
    "sums": sums,
    "decoders": decoders,
    "embeddings": embeddings,
    "flow": flow,
    "wire": wire,
    "house": house,
}
SHEETS = ROOT / "papers" / "fissionvae" / "figures"
# Panels of the sheets: the corner of their first image.
PANELS = (
    ("table1-mixed-mnist-federated.png", (494, 14)),  # FedVAE
    ("table1-mixed-mnist-federated.png", (0, 280)),  # FissionVAE+D
    ("best.png", (0, 280)),  # ours
)
SIDE, ROWS, GAP = 30, 4, 14  # of an image with its edge, images on top of each other, between panels


def samples() -> Image.Image:
    """Four rows of three clothes and as many digits of each panel, twice as large so that a phone shows them too."""
    width = 6 * SIDE
    sheet = Image.new("L", (len(PANELS) * (width + GAP) - GAP, ROWS * SIDE), 255)
    for place, (name, (left, top)) in enumerate(PANELS):
        with Image.open(SHEETS / name) as picture:
            for half, start in enumerate((left, left + 242)):
                part = picture.convert("L").crop((start, top, start + width // 2, top + ROWS * SIDE))
                sheet.paste(part, (place * (width + GAP) + half * width // 2, 0))
    return sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.LANCZOS)


def main() -> None:
    """Write all of them."""
    for name, drawn in DRAWINGS.items():
        (IMAGES / f"{name}.svg").write_text(svg(drawn()), encoding="utf-8")
    samples().save(IMAGES / "samples.png", optimize=True)


if __name__ == "__main__":
    main()
