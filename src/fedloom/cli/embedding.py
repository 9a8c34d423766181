"""``fedloom embed``: images to vectors of a frozen public network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedloom.cli.output import Json, say, show_json, terminal


def embed(
    images: Annotated[
        str,
        typer.Argument(metavar="IMAGES-or-DATASET", help="A folder, an .npz file, or a data set.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The .npz file to write.", show_default=False)],
    backbone: Annotated[
        str, typer.Option(help="A backbone, timm/MODEL, or module/PACKAGE.FILE:NAME.")
    ] = "efficientnet-lite0",
    resolution: Annotated[int, typer.Option(min=0, help="Side of the network's input; 0: its own.")] = 0,
    weights: Annotated[str, typer.Option(help="A file of weights, where the backbone takes one.")] = "",
    projection: Annotated[str, typer.Option(help="Public directions: none, head or random.")] = "none",
    dimension: Annotated[int, typer.Option(min=1, help="How many directions.")] = 256,
    scaling: Annotated[str, typer.Option(help="none, or l2: every vector has length 1.")] = "l2",
    storage: Annotated[str, typer.Option(help="float16 or float32.")] = "float32",
    path: Annotated[str, typer.Option(help="Where the data set lies, if it does not know.", show_default=False)] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of random directions.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Extract embeddings once, for all silos and runs; what was stopped goes on where it stopped."""
    with terminal().status("loading"):
        from fedloom import embedding
        from fedloom.backbones.catalogue import load_backbone
        from fedloom.experiment import torch_device
        from fedloom.federation.archives import cache_folder

        preparation = embedding.Preparation(projection, dimension, seed, scaling, storage)
        network = load_backbone(backbone, device=torch_device(device), resolution=resolution, weights=weights)
        dataset = embedding.images_of(images, path)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = terminal()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(network.name, total=None)
        about = embedding.embed(
            dataset,
            network,
            preparation,
            out,
            cache_folder() / "features",
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        show_json({"out": str(out), **about})
    else:
        say(f"{out}: {about['train']:,} + {about['test']:,} vectors of length {about['dimension']}, {network.name}")
