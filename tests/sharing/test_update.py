from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedloom.errors import EgressError, FedloomError
from fedloom.federation.rounds import Site
from fedloom.sharing.plan import GLOBAL, GROUP, SILO, BlockKey, Payload, SharingPlan, Tensors
from fedloom.sharing.update import DivergedError, Update, check_update, pass_egress

HISTOGRAM = Payload("histogram", "the labels of the silo, in clear", {"counts": (10,)})
PLAN = SharingPlan({"encoder": SILO, "decoder": GROUP, "trunk": GLOBAL}, ("a", "b"))
SITE = Site("north", (0,))
TRUNK, DECODER = BlockKey("trunk", "all"), BlockKey("decoder", "group=a")
SHAPES: dict[BlockKey, Tensors] = {
    TRUNK: {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)},
    DECODER: {"weight": torch.zeros(4, dtype=torch.float64)},
    BlockKey("encoder", "silo=north"): {"weight": torch.zeros(5)},
}
DECLARED = Update("north", 3, {TRUNK: SHAPES[TRUNK], DECODER: SHAPES[DECODER]}, {"all": 9.0, "group=a": 9.0})


def test_what_is_declared_passes_and_is_logged_to_the_byte() -> None:
    """Weights: two counts of 8 bytes; trunk: 6 + 3 float32; decoder: 4 float64: 16 + 36 + 32 = 84."""
    record = pass_egress(DECLARED, PLAN, SITE, SHAPES)
    assert record.to_mapping() == {
        "round": 3,
        "silo": "north",
        "bytes": 84,
        "blocks": {"trunk@all": {"weight": [2, 3], "bias": [3]}, "decoder@group=a": {"weight": [4]}},
        "payloads": {"records": {}},
        "sha256": "",
    }


def test_declared_payloads_pass_and_count() -> None:
    plan = replace(PLAN, payloads=(*PLAN.payloads, HISTOGRAM))
    update = replace(DECLARED, payloads={"histogram": {"counts": torch.zeros(10)}})
    record = pass_egress(update, plan, SITE, SHAPES)
    assert record.bytes == 84 + 40
    assert record.payloads == {"records": {}, "histogram": {"counts": (10,)}}


@pytest.mark.parametrize(("name", "shape"), [("counts", (11,)), ("names", (10,))])
def test_a_payload_has_the_tensors_that_were_declared(name: str, shape: tuple[int, ...]) -> None:
    plan = replace(PLAN, payloads=(*PLAN.payloads, HISTOGRAM))
    update = replace(DECLARED, payloads={"histogram": {name: torch.zeros(shape)}})
    complaint = rf"tensor '{name}' of shape \({shape[0]},\) in payload 'histogram', which its sharing plan does not"
    with pytest.raises(EgressError, match=complaint):
        pass_egress(update, plan, SITE, SHAPES)


def test_the_server_refuses_payloads_that_are_not_finite() -> None:
    update = replace(DECLARED, payloads={"histogram": {"counts": torch.tensor([1.0, math.nan])}})
    with pytest.raises(DivergedError, match="not finite in payload 'histogram/counts' in round 3"):
        check_update(update, SHAPES)


@pytest.mark.parametrize(
    ("update", "complaint"),
    [
        (
            replace(DECLARED, blocks={BlockKey("encoder", "silo=north"): SHAPES[BlockKey("encoder", "silo=north")]}),
            "block 'encoder@silo=north'",
        ),
        (replace(DECLARED, blocks={BlockKey("decoder", "group=b"): SHAPES[DECODER]}), "block 'decoder@group=b'"),
        (replace(DECLARED, blocks={BlockKey("extra", "all"): {}}), "block 'extra@all'"),
        (replace(DECLARED, blocks={TRUNK: {"records": torch.zeros(2, 3)}}), r"tensor 'records' of shape \(2, 3\)"),
        (replace(DECLARED, blocks={TRUNK: {"weight": torch.zeros(3, 2)}}), r"tensor 'weight' of shape \(3, 2\)"),
        (replace(DECLARED, payloads={"histogram": {"counts": torch.zeros(10)}}), "payload 'histogram'"),
        (replace(DECLARED, counts={"all": 9.0, "label=3": 4.0}), "payload 'records of label=3'"),
        (replace(DECLARED, counts={"all": 9.0, "group=b": 4.0}), "payload 'records of group=b'"),
    ],
)
def test_nothing_undeclared_leaves(update: Update, complaint: str) -> None:
    with pytest.raises(EgressError, match=f"^silo 'north' tried to send {complaint}.*sharing plan does not"):
        pass_egress(update, PLAN, SITE, SHAPES)


def test_the_number_of_records_is_a_payload_like_any_other() -> None:
    with pytest.raises(EgressError, match="payload 'records'"):
        pass_egress(DECLARED, replace(PLAN, payloads=()), SITE, SHAPES)
    assert pass_egress(replace(DECLARED, counts={}), replace(PLAN, payloads=()), SITE, SHAPES).payloads == {}


def test_the_server_accepts_what_it_knows_and_blocks_it_does_not_hold() -> None:
    check_update(DECLARED, SHAPES)
    check_update(DECLARED, {})


@pytest.mark.parametrize(
    ("blocks", "complaint"),
    [
        ({TRUNK: {**SHAPES[TRUNK], "weight": torch.zeros(3, 2)}}, r"'trunk@all/weight' with shape \(3, 2\)"),
        ({TRUNK: {**SHAPES[TRUNK], "other": torch.zeros(3)}}, r"'trunk@all/other' with shape \(3,\)"),
        ({TRUNK: {"weight": torch.zeros(2, 3)}}, "'trunk@all' without 'bias'"),
    ],
)
def test_the_server_refuses_names_and_shapes_it_does_not_know(blocks: dict[BlockKey, Tensors], complaint: str) -> None:
    with pytest.raises(FedloomError, match=f"silo 'north' sent {complaint}: refused"):
        check_update(replace(DECLARED, blocks=blocks), SHAPES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_server_refuses_values_that_are_not_finite(value: float) -> None:
    bias = torch.tensor([0.0, value, 0.0])
    with pytest.raises(
        DivergedError, match="silo 'north' sent values that are not finite in 'trunk@all/bias' in round 3"
    ):
        check_update(replace(DECLARED, blocks={TRUNK: {**SHAPES[TRUNK], "bias": bias}}), SHAPES)
