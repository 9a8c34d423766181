from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedloom.engines.base import initial_state
from fedloom.errors import ConfigError
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.methods import generator as generating
from fedloom.methods.base import METHODS
from fedloom.methods.generator import Generator
from fedloom.models.networks import Flat
from fedloom.sharing.plan import BlockKey
from fedloom.streams import Streams
from support import NARROW, federation_of, tiny_config


@pytest.fixture(scope="module")
def generator() -> Generator:
    """Two groups with priors -1 and +1 and a decoder each, fresh from the start of a run."""
    federation, config = federation_of([0] * 5, [1] * 5), tiny_config("method.prior=symmetrical")
    method = Experiment.of(config, federation).method
    return Generator(method, initial_state(method, federation, config).server, federation.groups)


def decoded(generator: Generator, group: str, prior: float, noise: torch.Tensor) -> torch.Tensor:
    decoder = Flat((4,), (16,), (6,))
    decoder.load_state_dict(generator.server.blocks[BlockKey("decoder", f"group={group}")])
    return torch.sigmoid(decoder(prior + noise)).detach()


@pytest.mark.parametrize(("group", "index", "prior"), [("a", 0, -1.0), ("b", 1, 1.0)])
def test_images_come_from_the_groups_prior_and_decoder(
    generator: Generator, group: str, index: int, prior: float
) -> None:
    noise = Streams(9).normal("sample/z1", 7, 4, silo=index)
    torch.testing.assert_close(generator.sample(7, group=group, seed=9), decoded(generator, group, prior, noise))


def test_another_groups_prior_can_be_put_in_place(generator: Generator) -> None:
    noise = Streams(0).normal("sample/z1", 7, 4, silo=0)
    torch.testing.assert_close(generator.sample(7, group="a", prior_of="b"), decoded(generator, "a", 1.0, noise))


def test_the_seed_decides_and_the_global_generator_does_not(generator: Generator) -> None:
    first = generator.sample(7, group="a", seed=1)
    torch.manual_seed(123)
    assert torch.equal(generator.sample(7, group="a", seed=1), first)
    assert not torch.equal(generator.sample(7, group="a", seed=2), first)
    assert not torch.equal(generator.sample(7, group="b", seed=1), first)


@pytest.mark.parametrize("at_once", [1, 2, 16])
def test_a_sample_does_not_depend_on_how_many_are_asked_for_or_made_at_once(
    at_once: int, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "CHUNK", 4)
    plain = generator.sample(11, group="a")
    monkeypatch.setattr(generating, "AT_ONCE", {"cpu": at_once})
    many = generator.sample(11, group="a")
    assert many.shape == (11, 6)
    assert many.unique(dim=0).shape == (11, 6)
    torch.testing.assert_close(many, plain)
    for few in (1, 4, 5, 8):
        torch.testing.assert_close(generator.sample(few, group="a"), many[:few])


NOT_IMAGES = (("vector",), ("table",))


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, NARROW.get(name, ())) for name in sorted(METHODS) if METHODS[name].modalities not in NOT_IMAGES),
        ("fissionvae", ("method.hierarchy=true",)),
    ],
)
def test_nothing_is_made_on_another_device_than_asked_for(
    name: str, overrides: tuple[str, ...], tiny_federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device "meta" computes shapes only, and refuses to meet tensors of the CPU."""
    monkeypatch.setattr(generating, "CHUNK", 4)
    config = tiny_config(f"method.name={name}", *overrides)
    method = Experiment.of(config, tiny_federation).method
    server = initial_state(method, tiny_federation, config).server
    generator = Generator(method, server, tiny_federation.groups, tiny_federation.classes)
    assert generator.pathways
    for pathway in generator.pathways:
        images = generator.sample(11, group="mnist", pathway=pathway, device="meta")
        assert images.device.type == "meta"
        assert images.shape == (11, 1, 28, 28)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"group": "x"}, r"unknown group 'x' \(allowed: a, b\)"),
        ({"group": "a", "prior_of": "c"}, r"unknown group 'c'"),
        ({"group": "a", "pathway": "z9"}, r"unknown pathway 'z9'"),
    ],
)
def test_mistakes_are_named(generator: Generator, asked: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        generator.sample(1, **asked)


@pytest.mark.parametrize("count", [0, -3])
def test_at_least_one_sample_must_be_asked_for(generator: Generator, count: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot generate {count} samples: ask for at least 1"):
        generator.sample(count, group="a")


def test_what_never_reached_the_server_is_not_made_up() -> None:
    """Group "b" has a name but no silo in one case; in the other every decoder stays at home."""
    for overrides, silos in (((), [[0] * 5]), (("sharing.scopes.decoder=silo",), [[0] * 5, [1] * 5])):
        federation, config = federation_of(*silos), tiny_config(*overrides)
        federation = replace(federation, groups=("a", "b"))
        method = Experiment.of(config, federation).method
        generator = Generator(method, initial_state(method, federation, config).server, federation.groups)
        with pytest.raises(ConfigError, match=r"nothing can be generated for group 'b': 'decoder@.*' never reached"):
            generator.sample(3, group="b")
