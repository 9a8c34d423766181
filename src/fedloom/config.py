"""The typed configuration tree of an experiment, from presets, files and overrides, and back to TOML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedloom.errors import ConfigError, NoMechanismError, unknown
from fedloom.presets import read_settings
from fedloom.settings import (
    above,
    all_positive,
    at_least,
    between,
    layered,
    override,
    parse,
    portion,
    rate,
    share,
    the_rest,
    the_short,
)

# Field metadata: a setting that came later. Where it has its default, an experiment is the one that it was before.
LATER: dict[str, Any] = {"later": True}


@dataclass(frozen=True, kw_only=True)
class ParticipationConfig:
    """Which silos take part in a round: each by a coin of its own, or a fixed share of them."""

    mode: Literal["bernoulli", "fixed"] = "bernoulli"  # a coin for each silo, or so many of them
    rate: float = field(default=1.0, metadata=rate())  # the coin's chance, or the share


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """The method's name; its own options are checked by the method itself."""

    name: str = "fedvae"  # 'fedloom list methods' names them
    options: dict[str, Any] = field(default_factory=dict, metadata=the_rest())  # in a file they stand beside the name


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """How the copies of a block become one; ``server.merge = "median"`` is short for a table with that name."""

    name: str = field(default="mean", metadata=the_short())  # 'fedloom list merges' names them
    options: dict[str, Any] = field(default_factory=dict, metadata=the_rest())  # in a file they stand beside the name


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The networks, their latents and their likelihood."""

    network: str = "mlp"  # 'fedloom list networks' names them; "auto": what is usual for the records' modality
    branches: dict[str, str] = field(default_factory=dict)  # group name -> network of its decoders, where it differs
    silos: dict[str, dict[str, Any]] = field(default_factory=dict)  # silo name -> what differs of its architecture
    hidden: tuple[int, ...] = field(default=(512, 256), metadata=all_positive())  # widths; decoders in reverse
    # Convolutional networks: one halving of the image for each width; a decoder or generator takes them in reverse.
    channels: tuple[int, ...] = field(default=(32, 64, 128, 256), metadata=all_positive())
    latent: int = field(default=40, metadata=at_least(1))  # coordinates of z1
    top_hidden: tuple[int, ...] = field(default=(256, 256), metadata=all_positive())  # between z1 and z2
    top_latent: int = field(default=20, metadata=at_least(1))  # coordinates of z2, where there are two levels
    likelihood: str = "bernoulli"  # of a value: "bernoulli", "gaussian", a modality's own, or "auto" for its usual one
    variance: float = field(default=0.5, metadata=above(0))  # of a Gaussian likelihood
    posterior: Literal["amortised", "closed-form", "from-decoder"] = "amortised"  # where a record's latents come from
    kl_weight: float = field(default=1.0, metadata=at_least(0))  # 1: the evidence bound
    lipschitz: float = field(default=0.0, metadata=at_least(0))  # certified bound on a decoder's steepness; 0: none
    penalty: Literal["none", "jacobian", "align-penalty"] = "none"  # on steep decoders; it is no bound
    penalty_weight: float = field(default=1.0, metadata=at_least(0))  # of that penalty
    penalty_limit: float = field(default=1.0, metadata=above(0))  # the steepness from which "jacobian" punishes

    def changed(self, changes: Mapping[str, Any], path: str, allowed: Sequence[str]) -> ModelConfig:
        """These settings with some others, of those that are allowed to differ under ``path``."""
        for key in changes:
            if key not in allowed:
                raise ConfigError(unknown("key", f"{path}.{key}", (f"{path}.{name}" for name in allowed)))
        return parse(ModelConfig, {**asdict(self), **changes}, path)


@dataclass(frozen=True, kw_only=True)
class OutliersConfig:
    """Records of another source in chosen silos, to see whether training gives them away; no source: none."""

    source: str = ""  # 'fedloom list datasets' names them; "": no outliers
    path: str = ""  # where it lies, if it does not know
    group: str = ""  # of that source; all of them unless told
    share: float = field(default=0.05, metadata=portion())  # of the silo's own records, on top of them; 0: a control
    silos: tuple[str, ...] = ()  # by name


@dataclass(frozen=True, kw_only=True)
class ColumnsConfig:
    """What a table of pictures calls its columns."""

    image: str = ""  # the pictures; found by its name or type unless told
    label: str = ""  # the class; "label" unless told, where there is one
    group: str = ""  # the group; none unless told
    silo: str = ""  # who has the picture; nobody unless told
    subject: str = ""  # whose picture it is; not known unless told


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the records come from and who holds them."""

    source: str = "mixed-mnist-sample"  # 'fedloom list datasets' names them
    path: str = ""  # where it lies, if it does not know; relative to where the command is called
    public: bool = field(default=False, metadata=LATER)  # these records are public, whatever the source says
    layout: Literal["federated", "centralised"] = "federated"  # "centralised": one silo holds all records
    # 'fedloom list partitions' names them; "auto": "natural" where the source knows who holds what, else "groups"
    partition: str = "auto"
    redeal: bool = field(default=False, metadata=LATER)  # divide anew what the source says that silos hold already
    silos: int = field(default=10, metadata=at_least(1))  # of each group with "groups", else in all
    sizes: Literal["equal", "unequal"] = "equal"  # of silos
    alpha: float = field(default=0.3, metadata=above(0))  # of "dirichlet": the smaller, the more silos differ
    classes_per_silo: int = field(default=2, metadata=at_least(1))  # of "classes" and "shards"
    records_per_silo: int = field(default=0, metadata=at_least(0))  # at most; 0: all
    validation: float = field(default=0.0, metadata=share())  # of each silo's records, for its own choices
    condition: str = ""  # an attribute of the records: each of its values makes a class of its own of every class
    records_per_class: int = field(default=0, metadata=at_least(0))  # where silos are divided by class; 0: all
    # By which groups silos go: the source's; "class": each class is one too; "permuted": the source's, dealt among the
    # silos at random, which is a control; "discover": those that are found before the first round, see ``discovery``.
    groups: Literal["source", "class", "permuted", "discover"] = field(default="source", metadata=LATER)
    outliers: OutliersConfig = field(default_factory=OutliersConfig)
    # What is done to each picture in a file of its own, whatever the others are.
    size: int = field(default=0, metadata=at_least(0) | LATER)  # of each side, in pixels; 0: as it is
    crop: Literal["centre", "pad", "stretch"] = field(default="centre", metadata=LATER)  # how it becomes a square
    mode: Literal["auto", "grey", "colour"] = field(default="auto", metadata=LATER)  # "auto": as it is
    window: tuple[float, ...] = field(default=(), metadata=LATER)  # values that become black and white; (): its file's
    subjects: Literal["", "folder", "dicom"] = field(default="", metadata=LATER)  # whose pictures they are
    columns: ColumnsConfig = field(default_factory=ColumnsConfig, metadata=LATER)


@dataclass(frozen=True, kw_only=True)
class DiscoveryConfig:
    """How groups are found that nobody named, where ``data.groups`` is "discover"."""

    groups: int = field(default=0, metadata=at_least(0))  # how many; 0: as many as what silos release speaks for
    most: int = field(default=8, metadata=at_least(2))  # of them
    frequencies: int = field(default=64, metadata=at_least(1))  # each silo releases two numbers for each, once


@dataclass(frozen=True, kw_only=True)
class SharingConfig:
    """How blocks are merged; ``scopes`` overrides the method's own plan, block by block."""

    weights: Literal["size", "equal-groups", "equal"] = "size"  # of silos in a mean
    scopes: dict[str, str] = field(default_factory=dict)  # block -> global, group, silo, upload or server
    # Of how far merged blocks moved: 2 bytes a number or 1. What rounding leaves out is sent with the next move.
    compression: Literal["none", "bfloat16", "int8"] = field(default="none", metadata=LATER)


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The privacy mechanism; any method can take it."""

    mechanism: Literal["none", "dp-sgd"] = "none"  # "none": no DP guarantee
    epsilon: float = field(default=0.0, metadata=at_least(0))  # each silo's budget; 0: none, spending is only counted
    budgets: dict[str, float] = field(default_factory=dict)  # silo name -> its epsilon, where it differs
    delta: float = field(default=0.0, metadata=share())  # 0: a tenth of 1/n or less, n the silo's records or subjects
    noise_multiplier: float = field(default=0.0, metadata=at_least(0))  # 0: what the budget needs for the planned run
    clip: float = field(default=1.0, metadata=above(0))  # the bound on one gradient, or the first of them
    clipping: Literal["fixed", "quantile", "median"] = "fixed"  # how the bound goes on; "median": no DP guarantee
    unit: Literal["record", "subject"] = "record"  # whose data are protected as one, and drawn and clipped as one
    blocks: tuple[str, ...] = ()  # privatise these alone: no DP guarantee unless model.posterior is not "amortised"
    accountant: Literal["pld", "rdp", "filter"] = "pld"  # tight, looser, or for choices made between releases
    trust: Literal["local", "distributed"] = "local"  # who adds the noise: each silo all of it, or all together
    tolerated: int = field(default=0, metadata=at_least(0))  # silos that may collude or drop out, if distributed
    # Of the whole numbers that silos add up, if distributed: with fewer the noise has to be larger.
    bits: int = field(default=32, metadata=between(16, 52) | LATER)
    allocation: Literal["uniform", "late"] = "uniform"  # of the budget over a silo's rounds; "late": more at the end
    shares: dict[str, float] = field(default_factory=dict)  # payload -> its part of the budget, where it differs
    pretraining: int = field(default=0, metadata=at_least(0))  # private steps before a silo's first round
    # Where coins and noise come from: the operating system, or the seed, which anybody can repeat: no DP guarantee.
    noise: Literal["secure", "test"] = "secure"

    def check_mechanism(self) -> None:
        """Refuse settings without a mechanism that follows them: whoever makes them wants privacy, and would get none.

        This is for runs that begin; those that an older version began stay readable, and go on when they are resumed.
        """
        usual = PrivacyConfig()
        asked = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)}
        if self.mechanism == "none" and asked:
            settings = ", ".join(f"privacy.{name} = {value!r}" for name, value in asked.items())
            raise NoMechanismError(
                f"{settings} without privacy.mechanism: the run would have no DP guarantee; add "
                f"privacy.mechanism=dp-sgd, or leave out what else stands under privacy"
            )


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """What a silo does in a round."""

    epochs: int = field(default=5, metadata=at_least(1))  # of a round, over the silo's own records
    steps: int = field(default=0, metadata=at_least(0))  # of a round; 0: as many as the epochs take
    batch_size: int = field(default=32, metadata=at_least(1))  # records of a step; under DP-SGD expected
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"  # of each phase, where the method has none of its own
    learning_rate: float = field(default=1e-3, metadata=above(0))  # of that optimiser
    # Of the rate, round by round: it stays, or falls to nothing by half a cosine; before that it rises for some rounds.
    schedule: Literal["constant", "cosine"] = field(default="constant", metadata=LATER)
    warmup: int = field(default=0, metadata=at_least(0) | LATER)  # rounds in which the rate rises to its full height
    momentum: float = field(default=0.0, metadata=share() | LATER)  # of "sgd"
    weight_decay: float = field(default=0.0, metadata=at_least(0) | LATER)  # of "sgd", and apart from moments "adamw"
    # The norm to which a longer gradient of a step is shortened; 0: none. Under DP-SGD after noise, at no cost.
    clip_norm: float = field(default=0.0, metadata=at_least(0) | LATER)
    keep_optimizer: bool = False  # its moments stay at the silo from round to round
    # Centralised layout only: "paper" trains local.epochs a round; "matched" as often as the federated run would
    # update in expectation, participation.rate * local.epochs epochs a round.
    updates: Literal["paper", "matched"] = "paper"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the server does with the updates; most settings are for distillation."""

    # "mean": average by scope. "adam": the same, as a gradient for an Adam of the server's. "distil": train on samples
    # of the decoders that silos send. "mean+distil": both, on samples of what was averaged too. "auto": "mean", or
    # "distil" where the plan leaves nothing to average. 'fedloom list server-steps' names those of plug-ins too.
    step: str = "auto"
    merge: MergeConfig = field(default_factory=MergeConfig, metadata=LATER)
    trains: Literal["own", "merged"] = "own"  # a model of the server's own, or the average, which then goes down
    teachers: Literal["averages", "silos"] = "averages"  # after averaging: sample the averages, or what each silo sent
    model: dict[str, Any] = field(default_factory=dict)  # what differs of ``model`` in the server's own
    samples: int = field(default=5000, metadata=at_least(1))  # of each decoder in a round
    balance: Literal["equal", "size"] = "equal"  # as many of each silo, or as its number of records
    replay: int = field(default=0, metadata=at_least(0))  # earlier decoders of each silo that are sampled as well
    latents: Literal["prior", "ball", "mixture", "histogram"] = "prior"  # where samples are drawn from
    radius: float = field(default=3.0, metadata=above(0))  # of the ball
    components: int = field(default=10, metadata=at_least(1))  # of a silo's mixture, or places of its histogram
    targets: Literal["means", "samples"] = "means"  # what a decoder gives: its mean image, or a draw around it
    epochs: int = field(default=10, metadata=at_least(1))  # of a round, over the samples
    batch_size: int = field(default=128, metadata=at_least(1))  # samples of a step
    learning_rate: float = field(default=1e-3, metadata=above(0))  # of the server's Adam, in a distillation or "adam"
    keep_optimizer: bool = False  # its moments stay from round to round
    patience: int = field(default=10, metadata=at_least(1))  # rounds of silence after which a silo is warned of
    # Samples are of a running mean of the server's weights over the rounds, whose past counts so much; 0: the newest.
    averaging: float = field(default=0.0, metadata=share() | LATER)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How often and on how many samples the run is measured; 0 rounds means only at the end."""

    every: int = field(default=0, metadata=at_least(0))  # rounds; 0: at the end only
    samples: int = field(default=1000, metadata=at_least(1))  # of each group; as many held-out records, if there are
    metrics: tuple[str, ...] = ("domain", "spread")  # 'fedloom list metrics' names them
    backbone: str = "efficientnet-lite0"  # the features of frechet, kernel, inception-score and manifold
    resolution: int = field(default=0, metadata=at_least(0))  # side of its input; 0: its own
    weights: str = ""  # a file of weights, for a backbone that does not bring its own
    importance_samples: int = field(default=64, metadata=at_least(1))  # k of the importance-weighted bound
    trackers: tuple[str, ...] = ("auto",)  # beside metrics.jsonl; "auto": TensorBoard where it is installed


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Canaries in the training records, for ``fedloom audit``; a run that has some is not for release."""

    canaries: int = field(default=0, metadata=at_least(0))  # in all; each is trained on by a coin of its own
    kind: Literal["noise", "held-out"] = "noise"  # what a canary is: coins for pixels, or a held-out record
    silos: tuple[str, ...] = ()  # by name; all of them unless told


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Where the work runs; none of this changes what is learned beyond floating-point rounding."""

    name: Literal["auto", "reference", "fused"] = "auto"  # silo by silo, or all silos in one program
    device: Literal["auto", "cpu", "cuda"] = "auto"  # "auto": a GPU where there is one
    precision: Literal["float32", "tf32", "bf16"] = "float32"  # of local steps; merging stays float32
    workers: int = field(default=0, metadata=at_least(0))  # silos at once, in processes; 0: by rule, in threads
    threads: int = field(default=0, metadata=at_least(0))  # of each worker; 0: one
    # MB that a flow's network may keep of a silo's batch for its gradients: what needs more is taken in smaller passes.
    pass_memory: float = field(default=2048.0, metadata=above(0))
    state_memory: float = field(default=512.0, metadata=above(0))  # MB of what silos keep; beyond it, it lies on disk
    checkpoint_every: int = field(default=1, metadata=at_least(1))  # rounds
    keep_checkpoints: int = field(default=2, metadata=at_least(1))  # the newest so many


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment, whole: with the package, all that its numbers depend on."""

    name: str = "experiment"  # of the run's folder, unless --out is given; nothing else depends on it
    seed: int = field(default=0, metadata=at_least(0))  # of every random number
    rounds: int = field(default=70, metadata=at_least(1))  # of communication
    participation: ParticipationConfig = field(default_factory=ParticipationConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    discovery: DiscoveryConfig = field(default_factory=DiscoveryConfig, metadata=LATER)
    sharing: SharingConfig = field(default_factory=SharingConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def to_mapping(self) -> dict[str, Any]:
        """The tree as plain values, the method's options beside its name as in TOML."""
        tree: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        tree["method"] |= tree["method"].pop("options")
        tree["server"]["merge"] |= tree["server"]["merge"].pop("options")
        return tree

    def to_toml(self) -> str:
        """The tree as TOML text that :func:`load_config` reads back to an equal value."""
        import tomli_w

        return tomli_w.dumps(self.to_mapping())

    def digest(self) -> str:
        """What identifies the experiment: a hash over what its numbers depend on, but for whence its noise comes."""
        tree = self.to_mapping()
        del tree["engine"], tree["name"], tree["privacy"]["noise"], tree["data"]["public"], tree["data"]["redeal"]
        _leave_out_later_defaults(self, tree)
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()

    def digest_without_seed(self) -> str:
        """The same for all repetitions of an experiment with other seeds."""
        return replace(self, seed=0).digest()


def _leave_out_later_defaults(settings: Any, tree: dict[str, Any]) -> None:
    usual = type(settings)()
    for each in (found for found in fields(settings) if found.name in tree):
        value = getattr(settings, each.name)
        if "later" in each.metadata and value == getattr(usual, each.name):
            del tree[each.name]
        elif is_dataclass(value):
            _leave_out_later_defaults(value, tree[each.name])


def load_config(
    source: str | Path, assignments: Sequence[str] = (), changes: Mapping[str, Any] | None = None
) -> Config:
    """Read a preset by name or a TOML file by path, put ``changes`` on top, then apply ``key.sub=value`` assignments.

    ``changes`` are nested as in TOML and count as those of a file that extends the source.
    """
    return parse(Config, override(layered(read_settings(source), changes or {}), assignments))
