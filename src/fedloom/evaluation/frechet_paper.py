"""The Frechet distance as ALIGN-FL (Gulati et al., 2025) measures it, for comparison with its tables only."""

from __future__ import annotations

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.frechet import Moments, frechet_distance
from fedloom.evaluation.metric import FEW, Metric, Reading, Values
from fedloom.evaluation.needs import FEATURES, ONE_GROUP, SAMPLES
from fedloom.evaluation.probe import paper_fifth
from fedloom.runs.metrics import metric_key


def paper_frechet(evaluation: Evaluation) -> Values:
    """The Frechet distance by ALIGN-FL's protocol: a fifth of the held-out records, and only as many samples."""
    real, (group,) = evaluation.real, evaluation.groups
    table = real.federation.test.of_group(0)
    fifth = paper_fifth(len(table), evaluation.streams)
    images = evaluation.generator.sample(len(fifth), group=group, seed=evaluation.streams.seed, device=real.device)
    extract = real.extractor.features
    distance = frechet_distance(Moments.of(extract(table.x[fifth])), Moments.of(extract(images)))
    return {metric_key("frechet", f"paper-{evaluation.backbone}", len(fifth)): distance}


METRIC = Metric(
    "frechet-paper",
    paper_frechet,
    (Reading("frechet/paper-*", "Frechet distance by ALIGN-FL's protocol", better="lower", fewest=FEW),),
    needs=(SAMPLES, FEATURES, ONE_GROUP),
)
