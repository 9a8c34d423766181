"""The sharing plan: for each block its scope, whether it goes up, and what comes down; and every other payload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import Tensor

from fedloom.errors import ConfigError, unknown
from fedloom.federation.rounds import Site
from fedloom.sharing.compression import UNCOMPRESSED, Compressed, Compression

Tensors = dict[str, Tensor]


class Scope(StrEnum):
    """Over whom a block is one and the same."""

    GLOBAL = "global"  # everybody: averaged over all participants
    GROUP = "group"  # the silo's group: averaged inside it
    SILO = "silo"  # the silo alone
    SERVER = "server"  # lives on the server


class Down(StrEnum):
    """What a silo receives for a block at the start of a round."""

    NOTHING = "nothing"
    MERGED = "merged"
    SERVER = "server"  # the server's own model overwrites the silo's block


class Seen(StrEnum):
    """What the server sees of something that silos send."""

    EACH = "each"  # what every silo sent
    SUM = "sum"  # the sum over the silos of a round alone


@dataclass(frozen=True)
class BlockRule:
    """How one block is shared."""

    scope: Scope
    up: bool
    down: Down
    seen: Seen = Seen.EACH


GLOBAL = BlockRule(Scope.GLOBAL, up=True, down=Down.MERGED)
GROUP = BlockRule(Scope.GROUP, up=True, down=Down.MERGED)
SILO = BlockRule(Scope.SILO, up=False, down=Down.NOTHING)
UPLOAD = BlockRule(Scope.SILO, up=True, down=Down.NOTHING)  # sent every round, never averaged, nothing comes back
SERVER = BlockRule(Scope.SERVER, up=False, down=Down.NOTHING)


@dataclass(frozen=True)
class Payload:
    """Something other than a block that leaves a silo, and what that costs in privacy."""

    name: str
    cost: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of its tensors, by name
    seen: Seen = Seen.EACH


RECORD_COUNT = Payload(
    "records",
    "declared public: the silo's number of records (of subjects where privacy.unit = 'subject'), in all and in each of "
    "its groups, used as its weights in the merge",
)


def payload_of_sums(name: str, what: str, shapes: Mapping[str, tuple[int, ...]]) -> Payload:
    """Sums over records, to which only a privacy mechanism adds noise."""
    return Payload(name, f"{what}; noisy, at a share of the budget, under a privacy mechanism, else exact", shapes)


@dataclass(frozen=True, order=True)
class BlockKey:
    """A block and who owns this copy of it."""

    block: str
    owner: str

    def __str__(self) -> str:
        return f"{self.block}@{self.owner}"

    @classmethod
    def of(cls, text: str) -> BlockKey:
        """Read back what ``str`` gave."""
        block, _, owner = text.partition("@")
        return cls(block, owner)


@dataclass(frozen=True)
class SharingPlan:
    """Everything that may cross a silo's door, by name."""

    blocks: Mapping[str, BlockRule]
    groups: tuple[str, ...]
    payloads: tuple[Payload, ...] = (RECORD_COUNT,)
    compression: Compression = "none"

    def with_scopes(self, scopes: Mapping[str, str]) -> SharingPlan:
        """The plan with other scopes for some blocks, as ``sharing.scopes`` asks for."""
        choices = {"global": GLOBAL, "group": GROUP, "silo": SILO, "upload": UPLOAD}
        changed = dict(self.blocks)
        for block, scope in scopes.items():
            if block not in self.blocks:
                raise ConfigError("sharing.scopes: " + unknown("block", block, self.blocks))
            if scope not in choices:
                raise ConfigError(f"sharing.scopes.{block}: " + unknown("scope", scope, choices))
            changed[block] = choices[scope]
        return replace(self, blocks=changed)

    @property
    def merged(self) -> tuple[str, ...]:
        """The blocks of whose copies the server makes one."""
        shared = (Scope.GLOBAL, Scope.GROUP)
        return tuple(block for block, rule in self.blocks.items() if rule.up and rule.scope in shared)

    @property
    def compressed(self) -> Compressed:
        """The blocks of which silos send how far they moved from what came down, in fewer bytes."""
        if self.compression == "none":
            return UNCOMPRESSED
        moving = (block for block in self.merged if self.blocks[block].down is not Down.NOTHING)
        return Compressed(self.compression, tuple(moving))

    def summed(self) -> SharingPlan:
        """The plan where the server sees nothing but sums."""
        blocks = {block: replace(rule, seen=Seen.SUM) for block, rule in self.blocks.items()}
        payloads = tuple(replace(payload, seen=Seen.SUM) for payload in self.payloads)
        return replace(self, blocks=blocks, payloads=payloads)

    def prefixes(self, block: str, site: Site) -> dict[str, BlockKey]:
        """Where a site's model keeps a block: parameter name prefix -> whose copy it is.

        A GROUP block has one copy per group; a site that meets several groups holds them as branches of the block.
        """
        scope = self.blocks[block].scope
        if scope is Scope.GROUP and len(site.groups) > 1:
            return {f"{block}.branches.{g}.": BlockKey(block, f"group={self.groups[g]}") for g in site.groups}
        owners = {
            Scope.GLOBAL: "all",
            Scope.GROUP: f"group={self.groups[site.groups[0]]}",
            Scope.SILO: f"silo={site.name}",
            Scope.SERVER: "server",
        }
        return {f"{block}.": BlockKey(block, owners[scope])}

    def split(self, state: Mapping[str, Tensor], site: Site) -> dict[BlockKey, Tensors]:
        """Divide a model's flat state into blocks by owner."""
        parts: dict[BlockKey, Tensors] = {}
        for block in self.blocks:
            for prefix, key in self.prefixes(block, site).items():
                parts[key] = {n[len(prefix) :]: t for n, t in state.items() if n.startswith(prefix)}
        return parts

    def join(self, parts: Mapping[BlockKey, Mapping[str, Tensor]], site: Site) -> Tensors:
        """The inverse of :meth:`split`, for those blocks that ``parts`` holds."""
        state: Tensors = {}
        for block in self.blocks:
            for prefix, key in self.prefixes(block, site).items():
                state.update({prefix + name: tensor for name, tensor in parts.get(key, {}).items()})
        return state
