"""All panels: what the model makes of its own noise, and of records where these may be shown."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedloom.methods.base import SampleInputs
from fedloom.modalities.base import modality_of
from fedloom.reports.figures import Panel, figure_of
from fedloom.reports.panel_parts import (
    MOST_GROUPS,
    ROW,
    Drawn,
    NotShownError,
    PanelKind,
    generator_of,
    imaging,
    streams_of,
)
from fedloom.reports.record_panels import exposed_outliers, latent_space, nearest_neighbours, reconstructions
from fedloom.reports.subject import Subject
from fedloom.reports.table_panels import columns_beside

SMALL = 16  # images in a small grid
MOST_CLASSES, SINGLES = 20, 4  # beside each other, and below each other
AVERAGED = 500  # samples of a class that its average is of
HIDDEN = (
    "it shows records of silos, and these data are not public; "
    "'fedloom report --with-records' shows it, for eyes that may see them"
)


@torch.no_grad()
def panels_of(subject: Subject) -> dict[str, Panel]:
    """Every panel by name; one that fails does not take the others with it."""
    found = {}
    for name, kind in PANELS.items():
        try:
            if kind.shows_records and not subject.shows_records:
                raise NotShownError(HIDDEN)
            figures, numbers = kind.draw(subject)
            found[name] = Panel(kind.title, kind.intro, tuple(figures), numbers)
        except NotShownError as error:
            if error.reason:
                found[name] = Panel(kind.title, kind.intro, missing=error.reason)
        except Exception as error:  # weights from a damaged folder may break anywhere in torch
            why = f"it could not be drawn ({type(error).__name__}: {error})"
            found[name] = Panel(kind.title, kind.intro, missing=why)
    return found


def classes(subject: Subject) -> Drawn:
    """What each class looks like to a generator that is told classes: on average, and in single samples."""
    generator = generator_of(subject)
    ways = list(generator.method.pathways.values())
    if not ways or not ways[0].labelled or not generator.classes:
        raise NotShownError("")
    imaging(subject)
    figures, shown = [], generator.classes[:MOST_CLASSES]
    for group in generator.groups[:MOST_GROUPS]:
        made = [generator.sample(AVERAGED, group=group, label=label, seed=number) for number, label in enumerate(shown)]
        averages = torch.stack([samples.mean(dim=0) for samples in made])
        singles = [torch.stack([samples[number] for samples in made]) for number in range(SINGLES)]
        names = ", ".join(label.rpartition("/")[2] for label in shown)
        rows = torch.cat([averages, *singles])
        figures.append(figure_of(f"{group}: {names}", rows, generator.kind, len(shown)))
    return figures, {}


def sampled_rows(subject: Subject) -> Drawn:
    """Records that have columns and no pictures: there is no grid of them."""
    generator = generator_of(subject)
    if not generator.pathways:
        raise NotShownError("")
    one = generator.sample(1, group=generator.groups[0])
    if not isinstance(modality_of(generator.kind, tuple(one.shape[1:])).shown(one), Mapping):
        raise NotShownError("")
    groups = generator.groups[:MOST_GROUPS]
    return [figure_of(group, generator.sample(SMALL, group=group), generator.kind) for group in groups], {}


def interpolations(subject: Subject) -> Drawn:
    """Between two draws of noise, along the arc that keeps their length."""
    generator, figures = imaging(subject), []
    way = next(iter(generator.method.pathways.values()))
    shares = torch.linspace(0, math.pi / 2, ROW).unsqueeze(1)
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        lines = []
        for line in range(3):
            noise = {}
            for key, shape in way.noise.items():
                ends = streams_of(subject).normal(f"report/{key}", 2, math.prod(shape), silo=index, step=line)
                noise[key] = (shares.cos() * ends[0] + shares.sin() * ends[1]).reshape(ROW, *shape)
            rows = torch.full((ROW,), index)
            lines.append(way.generate(generator.model(group), SampleInputs(noise, rows, rows)))
        figures.append(figure_of(group, torch.cat(lines), generator.kind, ROW))
    return figures, {}


def pathways(subject: Subject) -> Drawn:
    """Every way to generate, where a method has several."""
    generator = generator_of(subject)
    if len(generator.method.pathways) < 2:
        raise NotShownError("")
    imaging(subject)
    return [
        figure_of(
            f"{name}: {way.summary}",
            generator.sample(SMALL, group=group, pathway=name),
            generator.kind,
            row=group,
        )
        for group in generator.groups[:MOST_GROUPS]
        for name, way in generator.method.pathways.items()
    ], {}


def prior_swaps(subject: Subject) -> Drawn:
    """Each group's decoder with each group's prior, where priors differ."""
    generator = generator_of(subject)
    name = next((name for name, way in generator.method.pathways.items() if way.uses_prior), "")
    groups = generator.groups[:4]
    if not name or len(groups) < 2:
        raise NotShownError("")
    made = {
        (group, prior): generator.sample(SMALL, group=group, pathway=name, prior_of=prior)
        for group in groups
        for prior in groups
    }
    if all(torch.equal(images, made[group, group]) for (group, _), images in made.items()):
        raise NotShownError("")  # one prior for all
    imaging(subject)
    return [
        figure_of(
            f"prior of {prior}" + (" (its own)" if group == prior else ""),
            images,
            generator.kind,
            row=f"decoder of {group}",
        )
        for (group, prior), images in made.items()
    ], {}


PANELS = {
    "classes": PanelKind(
        "Classes",
        f"Top row: the average of {AVERAGED} samples of each class. Below: single samples of it.",
        classes,
        shows_records=False,
    ),
    "reconstructions": PanelKind(
        "Reconstructions",
        "Upper rows: held-out images. Lower rows: what the model makes of their latent codes.",
        reconstructions,
    ),
    "samples-as-rows": PanelKind(
        "Samples as rows", "What the generators make, a record in each row.", sampled_rows, shows_records=False
    ),
    "columns": PanelKind(
        "Columns of records and of samples",
        "The share of each level or bin, of training rows and of samples, on one scale; and the distances of pairs.",
        columns_beside,
    ),
    "interpolations": PanelKind(
        "Interpolations",
        "Each row goes from one random sample to another through the latent space.",
        interpolations,
        shows_records=False,
    ),
    "latent-space": PanelKind(
        "Latent space",
        "Where the encoder puts held-out images (means of q(z|x)); crosses: the groups' prior means if they differ.",
        latent_space,
    ),
    "prior-swap": PanelKind(
        "Prior swap",
        "A group's decoder given latents from another group's prior: what comes out without the right prior.",
        prior_swaps,
        shows_records=False,
    ),
    "pathways": PanelKind(
        "Pathways",
        "A hierarchical model can generate in several ways; they should agree.",
        pathways,
        shows_records=False,
    ),
    "nearest-neighbours": PanelKind(
        "Nearest neighbours",
        "Upper rows: the samples that lie nearest to a training record, by pixels. Lower rows: that training record. "
        "Near-identical pairs mean copying. Training records are shown because this run is a simulation.",
        nearest_neighbours,
    ),
    "outliers": PanelKind(
        "Outliers",
        "Upper rows: outliers that were put among the training records. Middle rows: the closest output of the "
        "generator that a search found. Lower rows: the typical training record nearest to that output.",
        exposed_outliers,
    ),
}
