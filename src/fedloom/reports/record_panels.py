"""Panels that show records, or something that was made of single ones; and records to hold samples against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

from fedloom.evaluation.judgement import ACTIVE
from fedloom.federation.records import concatenate
from fedloom.models.vae import VAE
from fedloom.reports.charts import Series, scatter
from fedloom.reports.figures import Figure, figure_of
from fedloom.reports.panel_parts import (
    MOST_GROUPS,
    ROW,
    Drawn,
    NotShownError,
    encoding,
    federation_of,
    held_out_of,
    imaging,
    streams_of,
)
from fedloom.reports.pictures import picture_of
from fedloom.reports.subject import Subject
from fedloom.runs.images import grid_of

BESIDE = 64  # real images beside a grid of samples
POINTS = 600  # in the latent space, all groups together
SEARCHED = 20_000  # training images of a group that samples are compared with
TRIED = 200  # samples of a group that are compared


def real_records(subject: Subject) -> dict[str, Image.Image]:
    """A grid of held-out records of each group to hold samples against, where they may be shown and can be."""
    federation = subject.federation
    if federation is None or not subject.shows_records:
        return {}
    if federation.modality.tiles(torch.zeros(1, *federation.shape)) is None:
        return {}
    groups = dict(enumerate(federation.groups[:MOST_GROUPS]))
    tables = {group: held_out_of(federation, index, BESIDE, streams_of(subject)) for index, group in groups.items()}
    kind = federation.modality.name
    return {group: grid_of(table.values, kind=kind) for group, table in tables.items() if len(table)}


def reconstructions(subject: Subject) -> Drawn:
    """Held-out images above what the model makes of their codes."""
    federation, generator, figures, errors = federation_of(subject), encoding(subject), [], {}
    imaging(subject)
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        images = held_out_of(federation, index, ROW, streams_of(subject)).values
        if len(images) == 0:
            continue
        model, rows = generator.model(group), torch.full((len(images),), index)
        assert isinstance(model, VAE)
        rebuilt = model.likelihood.mean(model.decode(model.encode(images, rows).mean, rows))
        errors[group] = (rebuilt - images).square().mean().item()
        figures.append(figure_of(group, torch.cat([images, rebuilt]), generator.kind, len(images)))
    return figures, {"mean_squared_error": errors, "images": ROW}


def latent_space(subject: Subject) -> Drawn:
    """Where the encoder puts held-out images: two dimensions as they are, more by their principal components."""
    federation, generator = federation_of(subject), encoding(subject)
    codes, labels = {}, {}
    for index, group in enumerate(generator.groups):
        records = held_out_of(federation, index, max(20, POINTS // len(generator.groups)), streams_of(subject))
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


@dataclass(frozen=True, repr=False)
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
    federation, generator = federation_of(subject), imaging(subject)
    training = concatenate([silo.train for silo in federation.silos])
    figures, numbers = [], {}
    for index, group in enumerate(generator.groups[:MOST_GROUPS]):
        rows = torch.nonzero(training.group == index).flatten()
        held_out = held_out_of(federation, index, TRIED, streams_of(subject)).values
        if len(rows) == 0 or len(held_out) == 0:
            continue
        order = streams_of(subject).permutation("report/training", len(rows), silo=index)[:SEARCHED]
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
