"""The charter, and a silo's own records brought under it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image

from fedloom.deployment.charter import Charter, load_records
from fedloom.deployment.demo import write_records
from fedloom.errors import ConfigError, DataError
from fedloom.federation.building import federation_from_arrays

CHARTER = Charter(
    name="lungs",
    address="fed.example.org:8443",
    silos={"north": "mri", "south": "ct", "west": "mri"},
    shape=(1, 4, 4),
    classes=("well", "ill"),
)
DECLARED = replace(CHARTER, records={"north": 4, "south": 3, "west": 600})


def silo_file(path: Path, **arrays: object) -> Path:
    x = np.arange(6 * 16, dtype=np.uint8).reshape(6, 4, 4)
    np.savez(path, **{"x_train": x[:4], "y_train": ["ill", "well", "ill", "ill"], "x_test": x[4:], **arrays})  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("charter", [CHARTER, DECLARED])
def test_a_charter_is_the_same_after_a_file(charter: Charter) -> None:
    assert Charter.of(tomllib.loads(tomli_w.dumps(charter.to_mapping()))) == charter


def test_groups_and_address_are_read_from_the_charter() -> None:
    assert CHARTER.groups == ("mri", "ct")  # as the silos name them
    assert (CHARTER.host, CHARTER.port, CHARTER.index("west")) == ("fed.example.org", 8443, 2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"silos": {}}, "silos is empty"),
        ({"silos": {"server": "a"}}, "'server' cannot be the name"),
        ({"silos": {"../x": "a"}}, r"'\.\./x' cannot be the name"),
        ({"address": "fed.example.org"}, "address = 'fed.example.org' must be host:port"),
        ({"address": "fed:99999"}, "must be host:port"),
        ({"shape": [1, 0]}, r"shape = \[1, 0\] must be the size of one record"),
        ({"sillos": {}}, "unknown key 'sillos'"),
        ({"records": {"north": 4, "west": 1}}, "records declares nothing for silo 'south'; declare all silos or none"),
        ({"records": {"north": 4, "east": 1}}, "records: unknown silo 'east'"),
        ({"records": {"north": 0, "south": 1, "west": 1}}, r"records\.north = 0 must be at least 1"),
        ({"records": {"north": "many"}}, r"records\.north = 'many' must be a whole number"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Charter.of(CHARTER.to_mapping() | change)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="a charter needs 'shape'"):
        Charter.of({"name": "lungs", "silos": {"a": "all"}, "address": "h:1"})


def test_a_server_s_address_may_lack_where_others_run_it() -> None:
    terms = {"name": "lungs", "silos": {"a": "all"}, "shape": [3]}
    assert Charter.of({**terms, "wire": "flower"}).address == ""
    with pytest.raises(ConfigError, match="address = '' must be host:port"):
        Charter.of({**terms, "wire": "direct"})


def test_a_silo_sees_its_own_records_and_the_names_of_the_others(tmp_path: Path) -> None:
    federation = CHARTER.at_a_silo("south", load_records(silo_file(tmp_path / "south.npz")))
    assert [len(silo) for silo in federation.silos] == [0, 4, 0]
    assert [silo.groups for silo in federation.silos] == [(0,), (1,), (0,)]
    own = federation.silos[1].train
    assert own.y.tolist() == [1, 0, 1, 1]  # the charter's order of classes, not the file's
    assert own.group.tolist() == [1] * 4
    assert federation.test.y.tolist() == [-1, -1]
    assert not federation.is_remote


def test_the_server_sees_no_record() -> None:
    federation = CHARTER.at_the_server()
    assert federation.is_remote
    assert [len(silo) for silo in federation.silos] == [0, 0, 0]
    assert len(federation.test) == 0
    assert federation.shape == (1, 4, 4)


def test_a_public_set_has_the_groups_of_the_charter(tmp_path: Path) -> None:
    path = silo_file(tmp_path / "public.npz", group_train=["ct"] * 4, group_test=["mri", "ct"], y_test=["ill", "well"])
    federation = CHARTER.at_the_server(load_records(path))
    assert (federation.test.group.tolist(), federation.test.y.tolist()) == ([0, 1], [1, 0])
    foreign = silo_file(tmp_path / "foreign.npz", group_train=["pet"] * 4, group_test=["ct", "ct"])
    with pytest.raises(DataError, match="unknown group 'pet'"):
        CHARTER.at_the_server(load_records(foreign))


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"x_train": np.zeros((4, 5, 5), np.uint8), "x_test": np.zeros((2, 5, 5), np.uint8)}, r"shape \(1, 5, 5\)"),
        ({"y_train": ["ill", "well", "dead", "ill"]}, "has the class 'dead', which the charter does not name"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, object], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        CHARTER.at_a_silo("north", load_records(silo_file(tmp_path / "x.npz", **arrays)))


def test_a_silo_with_more_records_than_were_declared_is_told_before_it_takes_part(tmp_path: Path) -> None:
    own = load_records(silo_file(tmp_path / "own.npz"))
    assert len(DECLARED.at_a_silo("north", own).silos[0]) == 4
    with pytest.raises(DataError, match="holds 4 records, the charter declares at most 3 for silo 'south'"):
        DECLARED.at_a_silo("south", own)


def test_a_folder_of_images_is_a_silo(tmp_path: Path) -> None:
    for label, number in (("ill", 0), ("ill", 1), ("well", 2)):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), number, np.uint8)).save(tmp_path / label / f"{number}.png")
    (tmp_path / "test").mkdir()
    Image.fromarray(np.full((4, 4), 9, np.uint8)).save(tmp_path / "test" / "9.png")
    federation = CHARTER.at_a_silo("west", load_records(tmp_path))
    own = federation.silos[2].train
    assert sorted(zip(own.x[:, 0, 0, 0].tolist(), own.y.tolist(), strict=True)) == [(0, 1), (1, 1), (2, 0)]
    assert federation.test.x[:, 0, 0, 0].tolist() == [9]
    with pytest.raises(DataError, match=r"neither a folder of images nor an \.npz file"):
        load_records(tmp_path / "test" / "9.png")


def test_records_of_a_simulation_come_back_from_their_file(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 255, (12, 4, 4), dtype=np.uint8)
    silos = {"a": (x[:6], ["ill", "well"] * 3), "b": (x[6:], ["well"] * 6)}
    simulated = federation_from_arrays(silos, groups={"a": "ct", "b": "mri"}, test=silos)
    charter = Charter(
        name="x", address="h:1", silos={"a": "ct", "b": "mri"}, shape=simulated.shape, classes=simulated.classes
    )
    for silo in simulated.silos:
        write_records(tmp_path / "silo.npz", simulated, silo.train, simulated.test.of_group(silo.groups[0]))
        own = charter.at_a_silo(silo.name, load_records(tmp_path / "silo.npz")).silos[charter.index(silo.name)]
        assert own.digest == silo.digest
        assert torch.equal(own.train.x, silo.train.x)
