"""Cards by name, their numbers changed, and what cannot be used told in one sentence."""

from __future__ import annotations

import json

import pytest

from engine.errors import UserError
from engine.planning.hardware import CARDS, find_hardware


def test_numbers_are_changed_by_name_and_by_file(tmp_path):
    assert find_hardware("a100-80g", ["efficiency=0.2", "inter_bandwidth=12.5e9"]).efficiency == 0.2
    assert find_hardware("a100-80g", ["inter_bandwidth=12.5e9"]).inter_bandwidth == 12.5e9
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"base": "h100-80g", "memory": 94e9}))
    mine = find_hardware(str(path))
    assert (mine.name, mine.memory, mine.float32) == ("mine", 94e9, CARDS["h100-80g"].float32)


@pytest.mark.parametrize(
    "name, changes, told",
    [
        ("a100", [], 'there is no card "a100" (did you mean "a100-80g"?): give one of a100-80g, a100-40g'),
        ("a100-80g", ["efficency=0.3"], 'did you mean "efficiency"?'),
        ("a100-80g", ["efficiency=fast"], "efficiency must be a positive number, got 'fast'"),
        ("a100-80g", ["memory=-1"], "memory must be a positive number, got '-1'"),
        ("a100-80g", ["memory=nan"], "memory must be a positive number"),
        ("a100-80g", ["gpus_per_node=0.5"], "gpus_per_node must be a whole number >= 1, got '0.5'"),
        ("a100-80g", ["memory"], "memory must be a positive number, got ''"),
    ],
)
def test_what_is_no_card_is_told(name, changes, told):
    with pytest.raises(UserError) as error:
        find_hardware(name, changes)
    assert told in str(error.value)


def test_a_ring_over_nodes_shares_the_network_cards_of_a_node():
    card = CARDS["v100-32g"]
    assert card.bus(8) == card.intra_bandwidth
    assert card.bus(16) == 8 * card.inter_bandwidth
