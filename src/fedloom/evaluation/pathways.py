"""The Frechet distance along the other ways to generate."""

from __future__ import annotations

import torch

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.frechet import METRIC as FRECHET
from fedloom.evaluation.frechet import Moments, frechet_distance
from fedloom.evaluation.metric import Metric, Values
from fedloom.evaluation.needs import FEATURES, SAMPLES
from fedloom.runs.metrics import metric_key


def pathway_frechet(evaluation: Evaluation) -> Values:
    """The Frechet distance of samples along every way to generate but the first, which is that of 'frechet'."""
    found, real = {}, evaluation.real
    for pathway in evaluation.generator.pathways[1:]:
        features = [
            real.extractor.features(evaluation.sample(group, pathway)[: len(table)])
            for group, table in real.held_out.items()
        ]
        whole = dict(zip((None, *evaluation.groups), (torch.cat(features), *features), strict=True))
        for group, part in whole.items():
            key = metric_key("frechet", f"{evaluation.backbone}-{pathway}", len(part), group)
            found[key] = frechet_distance(real.moments[group], Moments.of(part))
    return found


METRIC = Metric("pathways", pathway_frechet, FRECHET.readings, needs=(SAMPLES, FEATURES))
