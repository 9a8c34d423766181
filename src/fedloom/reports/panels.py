"""Panels that need the generators, and some the records: what the model makes of images, and of its own noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.federation.records import Federation, Records, concatenate
from fedloom.methods.base import SampleInputs
from fedloom.methods.generator import Generator
from fedloom.modalities.base import modality_of
from fedloom.models.vae import VAE
from fedloom.reports.charts import Series, scatter
from fedloom.reports.facts import Subject
from fedloom.reports.figures import Figure, Panel, figure_of
from fedloom.reports.pictures import picture_of
from fedloom.sharing.plan import Scope
from fedloom.streams import Streams

ROW = 10  # images in a row
SMALL = 16  # images in a small grid
MOST_GROUPS = 6  # that get pictures of their own
POINTS = 600  # in the latent space, all groups together
SEARCHED = 20_000  # training images of a group that samples are compared with
TRIED = 200  # samples of a group that are compared
ACTIVE = 0.01  # variance of a latent mean over images from which a dimension carries something (Burda et al., 2016)


@dataclass(frozen=True)
class NotShownError(Exception):
    """A panel cannot be drawn; an empty reason means that there is nothing to say about it either."""

    reason: str


Drawn = tuple[list[Figure], dict[str, Any]]


@torch.no_grad()
def panels_of(subject: Subject) -> dict[str, Panel]:
    """Every panel by name; one that fails does not take the others with it."""
    found = {}
    for name, (title, intro, draw) in PANELS.items():
        try:
            figures, numbers = draw(subject)
            found[name] = Panel(title, intro, tuple(figures), numbers)
        except NotShownError as error:
            if error.reason:
                found[name] = Panel(title, intro, missing=error.reason)
        except Exception as error:  # weights from a damaged folder may break anywhere in torch
            found[name] = Panel(title, intro, missing=f"it could not be drawn ({type(error).__name__}: {error})")
    return found


def _generator(subject: Subject) -> Generator:
    if subject.generator is None:
        raise NotShownError(f"there is no generator to ask: {subject.no_generator}")
    return subject.generator


def _imaging(subject: Subject) -> Generator:
    """The generator, where what it makes can be shown."""
    generator = _generator(subject)
    one = generator.sample(1, group=generator.groups[0])
    modality, shape = modality_of(generator.kind, tuple(one.shape[1:])), tuple(one.shape[1:])
    if not modality.shows(shape):
        raise NotShownError(f"{modality.plural} of shape {shape} have neither pictures nor columns of a table")
    return generator


def _federation(subject: Subject) -> Federation:
    if subject.federation is None:
        raise NotShownError(subject.no_records)
    return subject.federation


def _encoding(subject: Subject) -> Generator:
    """The generator, where the server has an encoder that was trained."""
    generator = _generator(subject)
    if not isinstance(generator.model(generator.groups[0]), VAE):
        raise NotShownError(f"method '{generator.method.name}' has no encoder")
    if generator.method.plan.blocks["encoder"].scope is Scope.SILO:
        raise NotShownError("the encoders never leave the silos, so the server cannot encode an image")
    return generator


def _held_out(federation: Federation, group: int, count: int, streams: Streams) -> Records:
    """Some held-out records of a group, always the same."""
    records = federation.test.of_group(group)
    return records.take(streams.permutation("report/held-out", len(records), silo=group)[:count])


def _streams(subject: Subject) -> Streams:
    return Streams(subject.run.folder.config.seed)


def reconstructions(subject: Subject) -> Drawn:
    """Held-out images above what the model makes of their codes."""
    federation, generator, figures, errors = _federation(subject), _encoding(subject), [], {}
    _imaging(subject)
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        images = _held_out(federation, index, ROW, _streams(subject)).values
        if len(images) == 0:
            continue
        model, rows = generator.model(group), torch.full((len(images),), index)
        assert isinstance(model, VAE)
        rebuilt = model.likelihood.mean(model.decode(model.encode(images, rows).mean, rows))
        errors[group] = (rebuilt - images).square().mean().item()
        figures.append(figure_of(group, torch.cat([images, rebuilt]), generator.kind, len(images)))
    return figures, {"mean_squared_error": errors, "images": ROW}


def sampled_rows(subject: Subject) -> Drawn:
    """Records that have columns and no pictures: there is no grid of them."""
    generator = _generator(subject)
    if not generator.pathways:
        raise NotShownError("")
    one = generator.sample(1, group=generator.groups[0])
    if not isinstance(modality_of(generator.kind, tuple(one.shape[1:])).shown(one), Mapping):
        raise NotShownError("")
    groups = generator.groups[:MOST_GROUPS]
    return [figure_of(group, generator.sample(SMALL, group=group), generator.kind) for group in groups], {}


def interpolations(subject: Subject) -> Drawn:
    """Between two draws of noise, along the arc that keeps their length."""
    generator, figures = _imaging(subject), []
    way = next(iter(generator.method.pathways.values()))
    shares = torch.linspace(0, math.pi / 2, ROW).unsqueeze(1)
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        lines = []
        for line in range(3):
            noise = {}
            for key, shape in way.noise.items():
                ends = _streams(subject).normal(f"report/{key}", 2, math.prod(shape), silo=index, step=line)
                noise[key] = (shares.cos() * ends[0] + shares.sin() * ends[1]).reshape(ROW, *shape)
            rows = torch.full((ROW,), index)
            lines.append(way.generate(generator.model(group), SampleInputs(noise, rows, rows)))
        figures.append(figure_of(group, torch.cat(lines), generator.kind, ROW))
    return figures, {}


def pathways(subject: Subject) -> Drawn:
    """Every way to generate, where a method has several."""
    generator = _generator(subject)
    if len(generator.method.pathways) < 2:
        raise NotShownError("")
    _imaging(subject)
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
    generator = _generator(subject)
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
    _imaging(subject)
    return [
        figure_of(
            f"prior of {prior}" + (" (its own)" if group == prior else ""),
            images,
            generator.kind,
            row=f"decoder of {group}",
        )
        for (group, prior), images in made.items()
    ], {}


def latent_space(subject: Subject) -> Drawn:
    """Where the encoder puts held-out images: two dimensions as they are, more by their principal components."""
    federation, generator = _federation(subject), _encoding(subject)
    codes, labels = {}, {}
    for index, group in enumerate(generator.groups):
        records = _held_out(federation, index, max(20, POINTS // len(generator.groups)), _streams(subject))
        model = generator.model(group)
        assert isinstance(model, VAE)
        codes[group] = model.encode(records.values, torch.full((len(records),), index)).mean.double()
        labels[group] = [federation.classes[y] if y >= 0 else "unlabelled" for y in records.y.tolist()]
        priors = model.prior_means.double()
    plane = _plane(torch.cat(list(codes.values())))
    places = {group: plane.place(values) for group, values in codes.items()}
    means = plane.place(priors)
    differ = bool((priors != priors[0]).any())
    crosses = {f"prior mean of {group}": means[index] for index, group in enumerate(generator.groups) if differ}
    clouds = [Series(group, points, colour) for colour, (group, points) in enumerate(places.items(), start=1)]
    figures = [Figure("coloured by group", chart=scatter("Latent space by group", clouds, *plane.names, crosses))]
    for group in generator.groups[:MOST_GROUPS] if federation.classes else ():
        labelled = list(zip(places[group], labels[group], strict=True))
        names = sorted(set(labels[group]), key=[*federation.classes, "unlabelled"].index)
        by_class = [
            Series(name, [point for point, label in labelled if label == name], colour)
            for colour, name in enumerate(names)
        ]
        title = f"{group}, coloured by class"
        others = [point for other in generator.groups if other != group for point in places[other]]
        figures.append(Figure(title, chart=scatter(title, by_class, *plane.names, {}, others)))
    active = {group: int((values.var(dim=0, correction=0) > ACTIVE).sum()) for group, values in codes.items()}
    numbers = {
        "dimensions": priors.shape[1],
        "active_dimensions": active,
        "explained_variance": plane.explained,
        "points": places,
    }
    return figures, numbers


@dataclass(frozen=True)
class _Plane:
    """Two directions through the cloud of codes."""

    centre: Tensor
    axes: Tensor  # (k, 2)
    names: tuple[str, str]
    explained: tuple[float, ...]

    def place(self, codes: Tensor) -> list[tuple[float, float]]:
        """Coordinates in the plane, to four digits."""
        return [(round(x, 4), round(y, 4)) for x, y in ((codes - self.centre) @ self.axes).tolist()]


def _plane(codes: Tensor) -> _Plane:
    if codes.shape[1] == 2:
        return _Plane(torch.zeros(2, dtype=codes.dtype), torch.eye(2, dtype=codes.dtype), ("z[0]", "z[1]"), ())
    centre = codes.mean(dim=0)
    if codes.shape[1] == 1:
        line = torch.tensor([[1.0, 0.0]], dtype=codes.dtype)
        return _Plane(torch.zeros(1, dtype=codes.dtype), line, ("z[0]", "nothing: z has one dimension"), ())
    _, values, directions = torch.linalg.svd(codes - centre, full_matrices=False)
    axes = directions[:2].T
    signs = axes[axes.abs().argmax(dim=0), [0, 1]].sign()  # a direction has no sign of its own: fix one
    shares = (values**2 / (values**2).sum().clamp_min(1e-300))[:2].tolist()
    first, second = (f"principal component {i} ({share:.0%} of variance)" for i, share in enumerate(shares, start=1))
    return _Plane(centre, axes * signs, (first, second), tuple(shares))


def nearest_neighbours(subject: Subject) -> Drawn:
    """The samples that lie nearest to a training image, above that image."""
    federation, generator = _federation(subject), _imaging(subject)
    training = concatenate([silo.train for silo in federation.silos])
    figures, numbers = [], {}
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        rows = torch.nonzero(training.group == index).flatten()
        held_out = _held_out(federation, index, TRIED, _streams(subject)).values
        if len(rows) == 0 or len(held_out) == 0:
            continue
        order = _streams(subject).permutation("report/training", len(rows), silo=index)[:SEARCHED]
        known = training.take(rows[order]).values
        samples = generator.sample(TRIED, group=group, seed=subject.run.folder.config.seed)
        distance, nearest = _nearest(samples, known)
        closest = distance.argsort(stable=True)[:ROW]
        usual = _nearest(held_out, known)[0].median().item()
        numbers[group] = {
            "training_images_searched": len(known),
            "training_images": len(rows),
            "median_distance_of_samples": distance.median().item(),
            "median_distance_of_held_out": usual,
            "smallest_distance_of_a_sample": distance.min().item(),
        }
        caption = (
            f"{group}: median distance to the nearest of {len(known):,} training images "
            f"{distance.median().item():.3g} for samples, {usual:.3g} for held-out images"
        )
        pairs = torch.cat([samples[closest], known[nearest[closest]]])
        figures.append(figure_of(caption, pairs, generator.kind, ROW))
    return figures, numbers


def exposed_outliers(subject: Subject) -> Drawn:
    """The pictures that an audit left."""
    files = sorted((subject.run.folder.path / "audit").glob("outliers-*.png"))
    if not files:
        raise NotShownError("")
    return [Figure(file.stem.removeprefix("outliers-"), picture_of(file)) for file in files[:MOST_GROUPS]], {}


def _nearest(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.cdist(x.flatten(1), y.flatten(1)).min(dim=1)
    return found.values, found.indices


PANELS: dict[str, tuple[str, str, Callable[[Subject], Drawn]]] = {
    "reconstructions": (
        "Reconstructions",
        "Upper rows: held-out images. Lower rows: what the model makes of their latent codes.",
        reconstructions,
    ),
    "samples-as-rows": ("Samples as rows", "What the generators make, a record in each row.", sampled_rows),
    "interpolations": (
        "Interpolations",
        "Each row goes from one random sample to another through the latent space.",
        interpolations,
    ),
    "latent-space": (
        "Latent space",
        "Where the encoder puts held-out images (means of q(z|x)); crosses: the groups' prior means if they differ.",
        latent_space,
    ),
    "prior-swap": (
        "Prior swap",
        "A group's decoder given latents from another group's prior: what comes out without the right prior.",
        prior_swaps,
    ),
    "pathways": (
        "Pathways",
        "A hierarchical model can generate in several ways; they should agree.",
        pathways,
    ),
    "nearest-neighbours": (
        "Nearest neighbours",
        "Upper rows: the samples that lie nearest to a training image, by pixels. Lower rows: that training image. "
        "Near-identical pairs mean copying. Training images are shown because this run is a simulation.",
        nearest_neighbours,
    ),
    "outliers": (
        "Outliers",
        "Upper rows: outliers that were put among the training records. Middle rows: the closest output of the "
        "generator that a search found. Lower rows: the typical training record nearest to that output.",
        exposed_outliers,
    ),
}
