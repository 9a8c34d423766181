"""What metrics need, each said once: a metric that cannot be computed is left out with one of these reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.evaluation.metric import Need

if TYPE_CHECKING:
    from fedloom.evaluation.evidence import Real


def _classify(real: Real) -> None:
    real.extractor.backbone.classify(real.trial)


SAMPLES = Need(
    lambda evaluation: evaluation.generates,
    "what it takes to generate images of every group never reached the server",
)
FEATURES = Need(lambda _: True, "", check=lambda real: real.trial)
CLASS_SCORES = Need(lambda _: True, "", check=_classify)
SEVERAL_GROUPS = Need(
    lambda evaluation: len(evaluation.groups) > 1,
    "there is one group only, so there are no others to tell it from",
)
ONE_GROUP = Need(lambda evaluation: len(evaluation.groups) == 1, "it is a protocol for a single group")
CLASSES = Need(
    lambda evaluation: bool((evaluation.real.federation.test.y >= 0).any()),
    "no held-out record has a class",
)
EVERY_LABEL = Need(
    lambda evaluation: not (evaluation.real.federation.test.y < 0).any(),
    "some held-out records have no label",
)
TOLD_CLASSES = Need(
    lambda evaluation: next(iter(evaluation.generator.method.pathways.values())).labelled,
    "the method's first pathway is not told which class to generate",
)
AUTOENCODER = Need(
    lambda evaluation: bool(evaluation.autoencoders),
    "it needs an encoder and a decoder, and neither the server nor a silo of this run holds both",
)
SILO_RECORDS = Need(
    lambda evaluation: not evaluation.real.federation.is_remote,
    "the records of silos stay with them",
)
