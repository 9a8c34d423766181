"""How long the gradients of single records are: what a clip bound should be set beside."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedloom.evaluation.evidence import Evaluation
from fedloom.evaluation.metric import Metric, Reading, Values
from fedloom.evaluation.needs import SILO_RECORDS
from fedloom.federation.records import Silo, batch_of
from fedloom.federation.rounds import RoundContext
from fedloom.methods.base import Phase
from fedloom.objectives.base import Step
from fedloom.objectives.lending import Lending
from fedloom.privacy.gradient_forms import Whole, joint_norms
from fedloom.runs.metrics import metric_key

RECORDS = 64  # of each silo


def gradient_norms(evaluation: Evaluation) -> Values:
    """The median length of a record's gradient over all blocks of a phase; more than the clip bound: most are cut."""
    found: Values = {}
    for phase in (each for each in evaluation.generator.method.phases if each.touches_records):
        known = [(silo, evaluation.silo_model(silo)) for silo in evaluation.participants]
        norms = [_norms(evaluation, phase, silo, model) for silo, model in known if model is not None]
        if norms:
            together = torch.cat(norms)
            key = metric_key("gradient-norm", f"{phase.name}-median", len(together))
            found[key] = together.median().item()
    return found or evaluation.skip("gradients", "no silo's whole model is known")


def _norms(evaluation: Evaluation, phase: Phase, silo: Silo, model: nn.Module) -> Tensor:
    count = min(RECORDS, len(silo))
    rows = evaluation.streams.permutation("gradients", len(silo))[:count]
    batch = batch_of(silo.train.take(rows).to(evaluation.real.device), torch.arange(count))
    noise = {
        name: evaluation.streams.normal(f"gradients/{name}", count, math.prod(shape))
        .reshape(count, *shape)
        .to(evaluation.real.device)
        for name, shape in phase.objective.noise.items()
    }
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.partition(".")[0] in phase.trains
    }
    rounds = max(1, len(evaluation.rounds))
    step = Step(batch, noise, parameters, RoundContext(rounds, rounds, (0,)))
    found = Lending(model, phase.objective).gradients(parameters, {}, step)
    return joint_norms({name: Whole(each) for name, each in found.items()}).cpu()


METRIC = Metric(
    "gradients",
    gradient_norms,
    (Reading("gradient-norm/*-median", "Median length of a record's gradient", counts="records"),),
    needs=(SILO_RECORDS,),
)
