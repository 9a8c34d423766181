"""``fedloom init``: five questions, and a run.toml to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.cli.output import say, say_facts, terminal
from fedloom.config import DataConfig, load_config
from fedloom.errors import ConfigError, DataError, unknown
from fedloom.presets import about_preset, preset_names

Lines = Mapping[str, tuple[Any, str]]  # setting -> its value and what it is about
TABLES = (".csv", ".parquet")
SCHEMA = "schema.toml"


class Place(StrEnum):
    """Where a run is carried out."""

    HERE = "here"
    MACHINES = "machines"


class FoundKind(StrEnum):
    """What records are, as far as the choice of a preset goes."""

    IMAGES = "images"
    VECTORS = "embeddings"
    ROWS = "tables"


@dataclass(frozen=True)
class FoundData:
    """What was found where people said that their data are."""

    kind: FoundKind
    settings: Lines
    remarks: tuple[str, ...] = ()
    colour: bool = False
    labelled: bool = False


@dataclass(frozen=True)
class FiveAnswers:
    """The five answers."""

    data: FoundData
    groups: bool
    labels: bool
    epsilon: float
    place: Place


def init(
    data: Annotated[
        str | None, typer.Option(help="A folder, an .npz file, a table, or a data set's name.", show_default=False)
    ] = None,
    groups: Annotated[
        bool | None, typer.Option("--groups/--no-groups", help="Silos fall into groups.", show_default=False)
    ] = None,
    labels: Annotated[
        bool | None, typer.Option("--labels/--no-labels", help="Samples are to have labels.", show_default=False)
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0.0, help="Of each silo; 0: no privacy mechanism.", show_default=False)
    ] = None,
    where: Annotated[Place | None, typer.Option(help="On this machine, or across several.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="The new file.")] = Path("run.toml"),
    usual: Annotated[bool, typer.Option("--yes", help="Ask nothing: the usual answer where no option says.")] = False,
) -> None:
    """Ask five questions, and write a run.toml with comments."""
    if out.exists():
        raise ConfigError(f"--out {out} exists already; nothing was written")

    def asked(given: Any, question: str, default: Any) -> Any:
        if given is not None or usual:
            return default if given is None else given
        if isinstance(default, bool):
            return typer.confirm(question, default=default)
        return typer.prompt(question, default=default, type=type(default))

    named = asked(data, "1. Where are your data (a folder, a file, or a data set's name)?", "mixed-mnist-sample")
    with terminal().status("looking"):
        found = look_at(named)
    for remark in found.remarks:
        say(remark)
    usual_epsilon = 1.0 if found.kind is FoundKind.ROWS else 0.0  # as their presets have it
    answers = FiveAnswers(
        data=found,
        groups=asked(groups, "2. Do silos fall into groups, such as CT and MRI?", False),
        labels=asked(labels, "3. Are samples to have labels?", found.labelled and found.kind is FoundKind.VECTORS),
        epsilon=asked(epsilon, "4. What may it cost each silo's privacy (epsilon; 0: no mechanism)?", usual_epsilon),
        place=Place(asked(where, "5. Where does it run (here, machines)?", Place.HERE.value)),
    )
    text = written(answers, out.stem)
    _write(out, text)
    say(f"{out} is written; it has a line about each setting")
    if answers.place is Place.MACHINES:
        say_facts({"next": f"fedloom run {out} --federation DIR"})
    else:
        say_facts({"next": f"fedloom run {out} --dry-run", "or": f"fedloom run {out}"})


def look_at(named: str) -> FoundData:
    """What lies at a path, or what a source of this name has."""
    path = Path(named).expanduser()
    if not path.exists():
        return _known(named)
    if path.suffix == ".npz":
        return _arrays(path)
    folder = path if path.is_dir() else path.parent
    if (folder / SCHEMA).is_file() or path.suffix == ".csv" or (any(folder.glob("*.csv")) and path.is_dir()):
        return _rows(path, folder)
    if path.suffix == ".parquet" or any(path.rglob("*.parquet")) or any(path.rglob("*.arrow")):
        return _loaded("hugging-face", path)
    return _pictures(path)


def _known(named: str) -> FoundData:
    from fedloom.federation.sources import SOURCES

    if named not in SOURCES:
        raise ConfigError(f"there is no file or folder '{named}', and " + unknown("data set", named, SOURCES))
    return _loaded(named, None)


def _loaded(source: str, path: Path | None) -> FoundData:
    from fedloom.federation.sources import SOURCES

    place = {"path": (str(path), "relative to where the command is called")} if path else {}
    dataset = SOURCES[source].open(DataConfig(source=source, path=str(path or "")))
    kinds = {"image": FoundKind.IMAGES, "vector": FoundKind.VECTORS, "frequencies": FoundKind.VECTORS}
    kind = kinds.get(dataset.train.modality.name, FoundKind.ROWS)
    return FoundData(
        kind,
        {"source": (source, SOURCES[source].description), **place},
        colour=len(dataset.train.shape) == 3 and dataset.train.shape[0] > 1,
        labelled=bool(dataset.classes),
    )


def _arrays(path: Path) -> FoundData:
    found = _loaded("npz", path)
    if found.kind is not FoundKind.VECTORS or not found.labelled:
        return found
    settings = dict(found.settings) | {"source": ("embeddings", "labelled vectors")}
    return FoundData(found.kind, settings, labelled=True)


def _rows(path: Path, folder: Path) -> FoundData:
    if not (folder / SCHEMA).is_file():
        files = " ".join(str(file) for file in sorted(folder.iterdir()) if file.suffix in TABLES)
        raise DataError(
            f"{folder} has no {SCHEMA}, which a table needs; 'fedloom data schema {files} --out {folder / SCHEMA}' "
            "proposes one"
        )
    place = {"source": ("table", "one file a silo, with schema.toml beside"), "path": (str(path), "")}
    return FoundData(FoundKind.ROWS, place)


def _pictures(path: Path) -> FoundData:
    from fedloom.federation.picture_check import check_pictures
    from fedloom.federation.picture_folders import Layout

    report = check_pictures(path, Layout())
    if not report.is_usable:
        raise DataError(f"some files of {path} cannot be learned from; 'fedloom data check {path}' names them")
    about = {"size": "of each side, in pixels", "mode": "grey or colour", "window": "what is black, and what is white"}
    settings = {name: (value, about[name]) for name, value in report.settings.items()}
    remark = f"{report.pictures:,} pictures at {report.silos} silos, {len(report.findings)} findings"
    more = f": fedloom data check {path}" if report.findings else ""
    return FoundData(
        FoundKind.IMAGES,
        {"source": ("image-folders", "one folder a silo"), "path": (str(path), ""), **settings},
        (remark + more,),
        colour=report.settings.get("mode") == "colour" or set(report.kinds) == {"colour"},
    )


def base_of(answers: FiveAnswers) -> str:
    """The preset that fits best, of those that there are."""
    kind, wanted = answers.data.kind, []
    if answers.place is Place.MACHINES:
        wanted.append(f"federation/{kind}")
    if answers.epsilon:
        wanted.append(f"{kind}/private")
    if kind is FoundKind.ROWS:
        wanted.append("tables/own")
    elif kind is FoundKind.VECTORS:
        wanted += ["embeddings/labelled"] * answers.data.labelled
    else:
        wanted += ["images/labelled"] * answers.labels + ["images/colour-32" if answers.data.colour else "images/small"]
    return next((name for name in wanted if name in preset_names()), "demo")


def written(answers: FiveAnswers, name: str) -> str:
    """The file's text."""
    base = base_of(answers)
    own = load_config(base)
    sections: dict[str, Lines] = {"": {"extends": (base, ""), "name": (name, "of the run's folder")}}
    data = dict(answers.data.settings)
    if answers.data.settings["source"][0] == "image-folders" or answers.groups:
        data["partition"] = ("auto", "the silos that the data name, where they do")
    sections["data"] = data
    if base == "demo":
        method, why = ("fissionvae", "a decoder for each group") if answers.groups else ("fedvae", "one VAE for all")
        sections["method"] = {"name": (method, f"{why}; 'fedloom list methods' has others")}
    if answers.epsilon:
        sections["privacy"] = {
            "mechanism": ("dp-sgd", ""),
            "epsilon": (answers.epsilon, "of each silo, for the whole run"),
            "unit": ("record", '"subject" protects all of a person\'s records'),
        }
    elif own.privacy.mechanism != "none":
        sections["privacy"] = {"mechanism": ("none", "no DP guarantee")}
    remarks = ["# Written by 'fedloom init'. 'fedloom list settings' has all other settings."]
    if answers.groups:
        remarks.append("# Groups: name a silo's folder GROUP__SILO, or give an array group_train.")
    if answers.labels and not _gives_labels(base):
        remarks.append("# Samples have no labels here: 'fedloom embed' makes vectors, whose samples have some.")
    return "\n".join([*remarks, "", f"# {about_preset(base)}", *_lines(sections)]) + "\n"


def _gives_labels(base: str) -> bool:
    return base.startswith(("embeddings/", "federation/embeddings")) or base.endswith("/labelled")


def _lines(sections: Mapping[str, Lines]) -> list[str]:
    import tomli_w

    lines = []
    for section, settings in sections.items():
        if section:
            lines += ["", f"[{section}]"]
        for name, (value, remark) in settings.items():
            line = tomli_w.dumps({name: value}, multiline_strings=False).strip().replace("\n", "")
            lines.append(f"{line}  # {remark}" if remark else line)
    return lines


def _write(out: Path, text: str) -> None:
    from fedloom.runs.files import write_atomically

    write_atomically(out, text.encode())
    load_config(out)
