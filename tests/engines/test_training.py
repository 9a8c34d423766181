from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedloom.engines.base import FederationState, Result, initial_state, site_of
from fedloom.engines.reference import ReferenceEngine
from fedloom.engines.training import Trainer
from fedloom.experiment import Experiment
from fedloom.federation.records import Federation
from fedloom.federation.rounds import RoundContext
from fedloom.sharing.plan import BlockKey, Tensors
from support import equal_bits, federation_of, tiny_config

ENCODER, A, B = BlockKey("encoder", "all"), BlockKey("decoder", "group=a"), BlockKey("decoder", "group=b")


def trainer_of(federation: Federation, *overrides: str) -> tuple[Trainer, FederationState]:
    config = tiny_config(*overrides)
    experiment = Experiment.of(config, federation)
    start = initial_state(experiment.method, experiment.federation, config)
    return Trainer(config, experiment.method, experiment.federation), start


def train_one(
    trainer: Trainer, start: FederationState, silo: int, round_number: int, steps: int | None = None
) -> Result:
    (task,) = ReferenceEngine(trainer).tasks(start, RoundContext(round_number, 9, (silo,)))
    return trainer.train(replace(task, step_limit=steps))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("size", [40, 3])  # batches of 16, 16 and 8; a silo smaller than a batch
def test_local_training_equals_a_plain_loop(optimizer: str, size: int) -> None:
    """Twenty lines of PyTorch that know nothing of phases, plans and mechanisms, fed from the same streams."""
    federation = federation_of([0] * 5, [1] * size)
    overrides = ("local.epochs=2", f"local.optimizer={optimizer}", "model.kl_weight=0.5", "method.prior=symmetrical")
    trainer, start = trainer_of(federation, *overrides)
    result = train_one(trainer, start, silo=1, round_number=3)

    streams, x = trainer.streams, federation.silos[1].train.values
    model = trainer.method.build(site_of(federation, 1))
    encoder, decoder = model.encoder, model.decoder
    assert isinstance(encoder, nn.Module)
    assert isinstance(decoder, nn.Module)
    encoder.load_state_dict(start.server.blocks[ENCODER])
    decoder.load_state_dict(start.server.blocks[B])
    rule = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[optimizer](model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(2):
        for index in streams.permutation("batches", size, silo=1, round=3, step=epoch).split(16):
            noise = streams.normal("noise/vae/z1", len(index), 4, silo=1, round=3, step=len(losses))
            mean, log_variance = encoder(x[index]).chunk(2, dim=1)
            logits = decoder(mean + torch.exp(log_variance / 2) * noise)
            nll = functional.binary_cross_entropy_with_logits(logits, x[index], reduction="sum")
            kl = 0.5 * (torch.exp(log_variance) + (mean - 1) ** 2 - 1 - log_variance).sum()
            loss = (nll + 0.5 * kl) / len(index)
            rule.zero_grad()
            loss.backward()
            rule.step()
            losses.append(loss.item())

    assert result.steps == len(losses) == 2 * -(-size // 16)
    assert result.update.blocks.keys() == {ENCODER, B}
    for key, block in {ENCODER: encoder, B: decoder}.items():
        for name, tensor in block.state_dict().items():
            torch.testing.assert_close(result.update.blocks[key][name], tensor, rtol=1e-5, atol=1e-6)
    assert result.terms["vae/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert result.update.counts == {"all": size, "group=b": size}


def test_initial_weights_depend_on_block_and_owner_alone() -> None:
    _, small = trainer_of(federation_of([0] * 5, [1] * 5))
    _, large = trainer_of(federation_of([1] * 9, [0, 1] * 5, [2] * 7, [0] * 3))
    assert small.server.blocks.keys() == {ENCODER, A, B}
    for key, tensors in small.server.blocks.items():
        assert equal_bits(tensors, large.server.blocks[key])
    assert not torch.equal(small.server.blocks[A]["layers.0.weight"], small.server.blocks[B]["layers.0.weight"])


def round_where_the_only_b_comes_later(trainer: Trainer, position: int, size: int) -> tuple[int, int]:
    """A round in which the record at ``position`` is neither in the first batch nor in the last two, and its batch."""
    for number in range(1, 50):
        order = trainer.streams.permutation("batches", position + 1, silo=0, round=number, step=0)
        batch = int((order == position).nonzero().item()) // size
        if 0 < batch < position // size - 1:
            return number, batch
    raise AssertionError("no such round")


@pytest.mark.parametrize(("optimizer", "coasts"), [("adam", True), ("sgd", False)])
def test_a_branch_does_not_move_before_a_record_of_its_group_comes(optimizer: str, coasts: bool) -> None:
    """One silo of both groups: batches of group a alone give branch b exactly zero gradients.

    Adam divides a zero moment by epsilon and stays exactly where it is; once b's only record has come, Adam coasts
    on its moments through later batches of a, while plain SGD stops again.
    """
    trainer, start = trainer_of(federation_of([0] * 63 + [1]), "local.batch_size=8", f"local.optimizer={optimizer}")
    number, batch = round_where_the_only_b_comes_later(trainer, position=63, size=8)

    def after(steps: int) -> dict[BlockKey, Tensors]:
        return dict(train_one(trainer, start, silo=0, round_number=number, steps=steps).update.blocks)

    before, hit, later = after(batch), after(batch + 1), after(batch + 2)
    assert equal_bits(before[B], start.server.blocks[B])
    assert not equal_bits(before[A], start.server.blocks[A])
    assert not equal_bits(hit[B], before[B])
    assert equal_bits(later[B], hit[B]) is not coasts


def test_the_centralised_layout_holds_a_branch_for_each_group() -> None:
    trainer, start = trainer_of(federation_of([0] * 5, [1] * 7), "data.layout=centralised")
    result = train_one(trainer, start, silo=0, round_number=1)
    assert result.update.counts == {"all": 12, "group=a": 5, "group=b": 7}
    assert result.update.blocks.keys() == start.server.blocks.keys() == {ENCODER, A, B}
    assert all(not equal_bits(result.update.blocks[key], start.server.blocks[key]) for key in (ENCODER, A, B))


def test_a_private_block_goes_on_from_where_the_silo_left_it() -> None:
    trainer, start = trainer_of(federation_of([0] * 20, [1] * 20), "sharing.scopes.encoder=silo")
    assert start.server.blocks.keys() == {A, B}
    first = train_one(trainer, start, silo=1, round_number=1)
    kept = replace(start, silos={1: first.state})
    idle = train_one(trainer, kept, silo=1, round_number=2, steps=0)
    assert equal_bits(idle.state.tensors, first.state.tensors)
    second = train_one(trainer, kept, silo=1, round_number=2)
    assert not equal_bits(second.state.tensors, first.state.tensors)
    # Without anything kept, the first weights come from the streams: the same whenever and wherever they are asked for.
    fresh = [train_one(trainer, start, silo=1, round_number=number, steps=0).state.tensors for number in (1, 7)]
    assert equal_bits(fresh[0], fresh[1])
    other = train_one(trainer, start, silo=0, round_number=1, steps=0).state.tensors
    assert not equal_bits(fresh[0], other)


def test_keeping_the_optimizer_keeps_its_moments_and_counts_its_steps_on() -> None:
    federation = federation_of([0] * 20, [1] * 20)
    trainer, start = trainer_of(federation, "local.keep_optimizer=true")
    first = train_one(trainer, start, silo=0, round_number=1)
    assert first.state.tensors["optimizer/vae/encoder.layers.0.bias/step"].item() == 2
    kept = replace(start, silos={0: first.state})
    second = train_one(trainer, kept, silo=0, round_number=2)
    assert second.state.tensors["optimizer/vae/encoder.layers.0.bias/step"].item() == 4
    forgetful = train_one(trainer, start, silo=0, round_number=2)
    assert not equal_bits(second.update.blocks[ENCODER], forgetful.update.blocks[ENCODER])
    plain, _ = trainer_of(federation)
    assert train_one(plain, start, silo=0, round_number=1).state.tensors == {}
    assert equal_bits(forgetful.update.blocks[A], train_one(plain, start, silo=0, round_number=2).update.blocks[A])


def test_training_changes_neither_the_server_nor_what_was_kept() -> None:
    trainer, start = trainer_of(federation_of([0] * 20), "local.keep_optimizer=true", "sharing.scopes.encoder=silo")
    kept = replace(start, silos={0: train_one(trainer, start, silo=0, round_number=1).state})
    copies = [{n: t.clone() for n, t in part.items()} for part in (kept.server.blocks[A], kept.silos[0].tensors)]
    train_one(trainer, kept, silo=0, round_number=2)
    assert equal_bits(copies[0], kept.server.blocks[A])
    assert equal_bits(copies[1], kept.silos[0].tensors)
