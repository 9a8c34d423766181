from __future__ import annotations

import pytest
import torch

from fedloom.errors import ConfigError
from fedloom.federation.rounds import Site
from fedloom.methods.base import METHODS, Method, OptimizerRule, Setting, make_method
from fedloom.models.networks import Routed
from fedloom.models.vae import VAE
from fedloom.objectives.elbo import Elbo
from fedloom.sharing.aggregation import Aggregator, Mean
from fedloom.sharing.plan import GLOBAL, GROUP, SILO
from support import tiny_config

GROUPS = ("a", "b", "c")


def made(*overrides: str) -> Method:
    return make_method(Setting(tiny_config(*overrides), (6,), GROUPS, ()))


def built(method: Method, *groups: int) -> VAE:
    model = method.build(Site("here", groups))
    assert isinstance(model, VAE)
    return model


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_recipe_says_what_it_is(name: str) -> None:
    assert METHODS[name].name == name
    assert METHODS[name].summary


@pytest.mark.parametrize(
    ("overrides", "decoder", "means"),
    [
        (("method.name=fedvae",), GLOBAL, [0, 0, 0]),
        (("method.name=fissionvae", "method.decoder=global"), GLOBAL, [0, 0, 0]),
        (("method.name=fissionvae",), GROUP, [0, 0, 0]),
        (("method.name=fissionvae", "method.prior=symmetrical", "method.decoder=global"), GLOBAL, [-1, 0, 1]),
        (("method.name=fissionvae", "method.prior=symmetrical"), GROUP, [-1, 0, 1]),
    ],
    ids=["FedVAE", "FedVAE by options", "+D", "+L", "+L+D"],
)
def test_variants_differ_by_prior_and_scope_of_the_decoder_alone(
    overrides: tuple[str, ...], decoder: object, means: list[int]
) -> None:
    method = made(*overrides, "model.kl_weight=0.5", "local.optimizer=sgd", "local.keep_optimizer=true")
    assert method.plan.blocks == {"encoder": GLOBAL, "decoder": decoder}
    assert built(method, 0).prior_means.tolist() == [[mean] * 4 for mean in means]
    (phase,) = method.phases
    assert phase.trains == ("encoder", "decoder")
    assert phase.objective == Elbo(latent=4, kl_weight=0.5)
    assert phase.optimizer == OptimizerRule("sgd", 1e-3, keep=True)
    assert phase.touches_records


def test_a_site_has_branches_only_where_it_meets_several_groups_of_a_group_block() -> None:
    method = made("method.name=fissionvae")
    assert not isinstance(built(method, 1).decoder, Routed)
    routed = built(method, 0, 2).decoder
    assert isinstance(routed, Routed)
    assert list(routed.branches) == ["0", "2"]
    assert not isinstance(built(method, 0, 2).encoder, Routed)
    assert not isinstance(built(made("method.name=fedvae"), 0, 2).decoder, Routed)


def test_scopes_of_the_configuration_go_before_those_of_the_method() -> None:
    method = made("method.name=fissionvae", "sharing.scopes.encoder=silo", "sharing.weights=equal-groups")
    assert method.plan.blocks == {"encoder": SILO, "decoder": GROUP}
    assert method.aggregator == Aggregator(Mean(), "equal-groups")


def test_means_drawn_at_random_are_the_same_for_every_site() -> None:
    method = made("method.name=fissionvae", "method.prior=random")
    assert torch.equal(built(method, 0).prior_means, built(method, 1, 2).prior_means)


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("method.name=fisionvae", r"method.name: unknown method 'fisionvae'; did you mean 'fissionvae'\?"),
        ("method.prio=wave", r"unknown key 'method.prio'; did you mean 'method.prior'\?"),
        ("method.prior=wavy", r"method.prior: unknown prior 'wavy'; did you mean 'wave'\?"),
        ("method.prior=3", r"method.prior = 3 must be text"),
        ("method.decoder=silo", r"method.decoder: unknown value 'silo'"),
        ("model.network=mpl", r"model.network: unknown network 'mpl'"),
        ("sharing.scopes.decodr=silo", r"sharing.scopes: unknown block 'decodr'"),
    ],
)
def test_mistakes_are_named(assignment: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        made("method.name=fissionvae", assignment)


def test_fedvae_has_no_prior_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'method.prior'"):
        made("method.name=fedvae", "method.prior=wave")
