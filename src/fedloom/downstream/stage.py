"""The post stage of a run: heads, mixtures and what they are worth, against the epsilon that was spent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from fedloom.config import EvaluationConfig
from fedloom.downstream import SYNTHETIC_RECORDS
from fedloom.downstream.heads import SYNTHETIC, Heads, label_shares
from fedloom.downstream.mixture import CHOICES, LEAVES, Answers
from fedloom.downstream.retrieval import NEAREST, precision
from fedloom.errors import ConfigError, FedloomWarning, unknown
from fedloom.evaluation.classification import Head, Scores, confusion, recalls, score
from fedloom.experiment import Run
from fedloom.federation.conditions import BETWEEN, attribute_names, columns_of, plain_classes, values_of
from fedloom.federation.records import Federation, Records, Silo
from fedloom.methods.generator import Generator
from fedloom.privacy.summary import NONE
from fedloom.runs.guarantee import guarantee_of
from fedloom.streams import Streams

SCHEMA = 2
LOCAL, MIXTURE, CENTRALISED, AT_HOME = "silo-only", "mixture", "centralised", "+prior"
GLOBAL_TEST = "all held-out records"
SILO_TEST = "held-out records, weighed as each silo's classes are"
HOME_TEST = "the records that each silo itself held out"
NO_VALIDATION = (
    "no mixture: data.validation = 0 leaves the silos no records to choose lambda by; train with, say, "
    "data.validation=0.2"
)


def downstream(
    run: Run,
    *,
    choice: str = "silo",
    synthetic: int = SYNTHETIC_RECORDS,
    pathway: str = "",
    attribute: str = "",
    round_number: int | None = None,
    federation: Federation | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Train and score the heads of a checkpoint, and write what is found to downstream.json.

    ``choice`` is whose lambda it is: the silo's (by accuracy, or balanced), shared by all, or of each class of a silo.
    ``attribute`` is what else tells groups of records apart, data.condition unless told. ``federation`` is needed where
    the run was given one in memory.
    """
    if choice not in CHOICES:
        raise ConfigError("--lambda: " + unknown("choice", choice, CHOICES))
    if synthetic < 1:
        raise ConfigError(f"--synthetic = {synthetic} must be at least 1")
    settings = EvaluationConfig(metrics=())
    _, found = run.evaluation(settings=settings, round_number=round_number, federation=federation)
    data, generator, config = found.real.federation, found.generator, run.config
    data.require_labels(config.method.name)
    if len(data.test) == 0 or bool((data.test.y < 0).any()):
        raise ConfigError(f"'{data.name}' has no held-out records with labels to score classifiers on")
    _require_labelled(generator, pathway)
    attribute = attribute or config.data.condition
    if attribute and attribute not in attribute_names(data.attributes):
        raise ConfigError("--attribute: " + unknown("attribute", attribute, attribute_names(data.attributes)))
    local = config.method.options.get("labels") == "local"
    heads = Heads(data, generator, synthetic, pathway, config.seed, local)
    privacy = guarantee_of(run.folder)
    scores = Stage(heads, choice, bool(config.data.condition), attribute, found.streams).report(progress)
    unguarded = "; ".join(scores["payloads"].values())
    report = {
        "schema": SCHEMA,
        "round": run.folder.rounds_done if round_number is None else round_number,
        "method": config.method.name,
        "guarantee": f"{NONE}: {unguarded}" if unguarded else privacy.guarantee,
        "epsilon": None if unguarded else privacy.epsilon,
        "delta": None if unguarded else privacy.delta,
        **scores,
    }
    run.folder.record_downstream(report)
    return report


def _require_labelled(generator: Generator, pathway: str) -> None:
    """Complain about a pathway that is told no class; a method without any classifies itself."""
    ways = generator.method.pathways
    way = pathway or next(iter(ways), "")
    if ways and way not in ways:
        raise ConfigError("--pathway: " + unknown("pathway", way, ways))
    if ways and not ways[way].labelled:
        raise ConfigError(
            f"method '{generator.method.name}' generates records without labels, so no classifier can learn from them"
        )


@dataclass(frozen=True, eq=False)
class Stage:
    """Answers of all classifiers on all records that they are asked about."""

    heads: Heads
    choice: str
    conditioned: bool  # classes tell an attribute as well, which is not asked for here
    attribute: str  # what tells groups of records of a class apart, if anything
    streams: Streams
    sentences: list[str] = field(default_factory=list)

    @property
    def federation(self) -> Federation:
        """The silos whose records the heads are scored on."""
        return self.heads.federation

    @cached_property
    def class_of(self) -> Tensor:
        """The plain class of each class."""
        names = self.federation.classes
        return torch.tensor(plain_classes(names)[1]) if self.conditioned else torch.arange(len(names))

    @cached_property
    def values(self) -> list[int]:
        """The columns of the records' attributes that tell groups of a class apart."""
        return columns_of(self.federation.attributes, self.attribute)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The groups that scores are also known for: classes, under each value of the attribute if there is one."""
        plain = plain_classes(self.federation.classes)[0] if self.conditioned else self.federation.classes
        named = [f"{name}{BETWEEN}{self.federation.attributes[value]}" for name in plain for value in self.values]
        return tuple(named) or plain

    @cached_property
    def class_of_kind(self) -> Tensor:
        """The plain class of each kind."""
        return torch.arange(len(self.kinds)) // (len(self.values) or 1)

    def kind_of(self, records: Records) -> Tensor:
        """The kind of each record by its number."""
        plain = self.class_of[records.y]
        if not self.values:
            return plain
        return plain * len(self.values) + values_of(records, self.values, f"--attribute = '{self.attribute}'")

    @cached_property
    def home(self) -> Tensor | None:
        """The number of the silo that held out each record, where every silo held out some."""
        home = self.federation.test.home
        if home is None:
            return None
        lacking = [silo.name for number, silo in enumerate(self.federation.silos) if not (home == number).any()]
        if lacking:
            self.say(f"silo '{lacking[0]}' held out no records of its own, so everybody's are weighed for each silo")
        return None if lacking else home

    def plain(self, probabilities: Tensor) -> Tensor:
        """The probability of each class, whatever the group of the record."""
        found = probabilities.new_zeros(len(probabilities), int(self.class_of.max()) + 1)
        return found.index_add_(1, self.class_of, probabilities)

    def report(self, progress: Callable[[str], None]) -> dict[str, Any]:
        """Everything that is written down."""
        for records in (self.federation.test, *(table for silo in self.federation.silos for table in _tables(silo))):
            self.kind_of(records)  # records that do not tell their group are refused before anything is trained
        self.unlearnable()
        answers, lambdas = self.answered(progress)
        scores = {row: self.scored(each) for row, each in answers.items()}
        progress("retrieving")
        return {
            "lambda": self.choice,
            "payloads": {payload.name: payload.cost for payload in LEAVES.get(self.choice, ()) if lambdas},
            "synthetic": self.heads.synthetic if self.heads.kind == SYNTHETIC else 0,
            "tests": {"global": GLOBAL_TEST, "silo": SILO_TEST if self.home is None else HOME_TEST},
            "rows": {row: _summary(each) for row, each in scores.items()},
            "gain": _gain(scores) if MIXTURE in scores else {},
            "attribute": self.attribute,
            "groups": {row: self.by_group(each) for row, each in answers.items()},
            "retrieval": self.retrieval(),
            "silos": [
                {
                    "name": silo.name,
                    "records": len(silo),
                    "lambda": {row: weights[number].tolist() for row, weights in lambdas.items()},
                    "rows": {
                        row: {test: asdict(s) for test, s in each[number].items()} for row, each in scores.items()
                    },
                }
                for number, silo in enumerate(self.federation.silos)
            ],
            "sentences": self.sentences,
        }

    def answered(self, progress: Callable[[str], None]) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
        """What each kind of head answers for each silo on all held-out records, and the lambdas of mixtures."""
        progress("training each silo's own head")
        answers: dict[str, list[Tensor]] = {LOCAL: [self.of(head, self.federation.test) for head in self.heads.local]}
        progress("training the common head")
        common = self.heads.kind
        corrections = ("", AT_HOME) if common == SYNTHETIC else ("",)
        for suffix in corrections:
            answers[common + suffix] = self.common(self.federation.test, suffix)
        lambdas: dict[str, list[Tensor]] = {}
        if all(silo.validation is not None and len(silo.validation) for silo in self.federation.silos):
            for suffix in corrections:
                lambdas[MIXTURE + suffix] = self.chosen(suffix)
                answers[MIXTURE + suffix] = [
                    Answers(own, other, self.federation.test.y).mixed(weights)
                    for own, other, weights in zip(
                        answers[LOCAL], answers[common + suffix], lambdas[MIXTURE + suffix], strict=True
                    )
                ]
        else:
            self.sentences.append(NO_VALIDATION)
            warnings.warn(NO_VALIDATION, FedloomWarning, stacklevel=4)
        if len(self.federation) > 1:
            progress("training the centralised head")
            answers[CENTRALISED] = [self.of(self.heads.centralised, self.federation.test)] * len(self.federation)
        return answers, lambdas

    def unlearnable(self) -> None:
        """Say which classes nobody can have learned."""
        federation = self.federation
        seen = torch.unique(torch.cat([silo.train.y for silo in federation.silos])).tolist()
        tested = torch.unique(federation.test.y).tolist()
        if missing := [federation.classes[label] for label in tested if label not in seen]:
            count = int((~torch.isin(federation.test.y, torch.tensor(seen))).sum())
            self.say(f"{count} held-out records are of classes that no silo trains on: {', '.join(missing)}")

    def of(self, head: Head, records: Records) -> Tensor:
        """A head's probabilities of the plain classes."""
        return self.plain(head.probabilities(records.values.flatten(1)))

    def common(self, records: Records | None, suffix: str) -> list[Tensor]:
        """Each silo's view of its common head on some records, or on its own validation records."""
        found, known = [], {}
        for silo, common in zip(self.federation.silos, self.heads.common, strict=True):
            table = records or silo.validation
            assert table is not None
            if suffix:  # add one to each count, so that a class that the silo has not met stays possible
                prior = label_shares(silo.train.y, len(self.federation.classes), smoothing=1.0)
                found.append(self.plain(common.at(prior, table.values.flatten(1))))
                continue
            key = (id(common), id(table))
            if key not in known:
                known[key] = self.of(common.head, table)
            found.append(known[key])
        return found

    def chosen(self, suffix: str) -> list[Tensor]:
        """Each silo's lambda, from its validation records."""
        silos = [
            Answers(self.of(head, silo.validation), common, self.class_of[silo.validation.y])
            for silo, head, common in zip(
                self.federation.silos, self.heads.local, self.common(None, suffix), strict=True
            )
            if silo.validation is not None
        ]
        return CHOICES[self.choice](silos)

    def say(self, sentence: str) -> None:
        """Add a sentence, unless it has been said already."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def scored(self, answers: Sequence[Tensor]) -> list[dict[str, Scores]]:
        """For each silo: on all held-out records, and on its own, or on all weighed as its own classes are."""
        found, known, everybody = [], {}, torch.ones(len(self.federation.test), dtype=torch.bool)
        for number, (silo, probabilities) in enumerate(zip(self.federation.silos, answers, strict=True)):
            if id(probabilities) not in known:
                known[id(probabilities)] = self.confused(probabilities, everybody)
            counts = known[id(probabilities)]
            if self.home is not None:
                own = score(self.confused(probabilities, self.home == number), self.class_of_kind)
            else:
                held = [self.kind_of(table) for table in _tables(silo)]
                own = score(counts, self.class_of_kind, label_shares(torch.cat(held), len(self.kinds)))
            found.append({"global": score(counts, self.class_of_kind), "silo": own})
        return found

    def confused(self, probabilities: Tensor, rows: Tensor) -> Tensor:
        """The confusion matrix of some held-out records, by kind and answer."""
        kinds, predicted = self.kind_of(self.federation.test)[rows], probabilities.argmax(dim=1)[rows]
        return confusion(kinds, predicted, len(self.kinds), probabilities.shape[1])

    def by_group(self, answers: Sequence[Tensor]) -> dict[str, float]:
        """Of all held-out records of each kind, the share that is taken for the right class; mean over silos."""
        everybody = torch.ones(len(self.federation.test), dtype=torch.bool)
        found = torch.stack([recalls(self.confused(each, everybody), self.class_of_kind) for each in answers])
        values = zip(self.kinds, found.mean(dim=0).tolist(), strict=True)
        return {kind: value for kind, value in values if not math.isnan(value)}

    def retrieval(self) -> dict[str, Any]:
        """How many of the nearest records of a gallery are of a query's class."""
        test = self.federation.test
        order = self.streams.permutation("downstream/queries", len(test))
        queries, wanted = test.values[order].flatten(1), self.class_of[test.y[order]]
        own = [
            precision(queries, wanted, silo.train.values.flatten(1), self.class_of[silo.train.y])
            for silo in self.federation.silos
        ]
        found: dict[str, Any] = {"nearest": NEAREST, LOCAL: mean(own)}
        common = self.heads.common[0]
        if common.x is not None and common.y is not None:
            found[SYNTHETIC] = precision(queries, wanted, common.x.flatten(1), self.class_of[common.y])
        return found


def _tables(silo: Silo) -> list[Records]:
    """All that a silo holds."""
    return [table for table in (silo.train, silo.validation) if table is not None]


def _summary(silos: Sequence[Mapping[str, Scores]]) -> dict[str, dict[str, float]]:
    """Means over silos, and how much they differ."""
    found = {}
    for test in ("global", "silo"):
        values = {name: [asdict(silo[test])[name] for silo in silos] for name in asdict(silos[0][test])}
        spreads = {f"{name}_deviation": stdev(each) if len(each) > 1 else 0.0 for name, each in values.items()}
        found[test] = {name: mean(each) for name, each in values.items()} | spreads
    return found


def _gain(scores: Mapping[str, Sequence[Mapping[str, Scores]]]) -> dict[str, dict[str, float]]:
    """The mixture's means minus those of silos alone."""
    mixed, alone = _summary(scores[MIXTURE]), _summary(scores[LOCAL])
    names = asdict(scores[LOCAL][0]["global"])
    return {test: {name: mixed[test][name] - alone[test][name] for name in names} for test in mixed}
