"""The choice counter counts the expert choices of a forward pass exactly, with one operator per layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.moe.torch_npu.native import Launched
from worker_agent.adapters.vllm_ascend import choices
from worker_agent.adapters.vllm_ascend.choices import ChoiceCounter

LAYERS = 4
EXPERTS = 6
TOP_K = 2
CPU = torch.device("cpu")

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["next", *range(LAYERS)]),
        st.integers(0, 5),
        st.sampled_from(["all", "same mask", "separate mask"]),
        st.sampled_from(["nothing", "read", "clear"]),
    ),
    max_size=16,
)


@pytest.mark.parametrize("buffered", [choices.MAX_BUFFERED, 4])
@given(calls=CALLS, seed=st.integers(0, 1 << 16))
def test_counts_equal_a_direct_count_of_the_choices(buffered: int, calls: list, seed: int) -> None:
    random = np.random.default_rng(seed)
    before = choices.MAX_BUFFERED
    choices.MAX_BUFFERED = buffered
    try:
        counter = ChoiceCounter(LAYERS, EXPERTS, CPU)
        expected_LE = np.zeros((LAYERS, EXPERTS), dtype=int)
        layer = 0
        shared_T = torch.from_numpy(random.random(8) < 0.5)
        for position, tokens, masked, action in calls:
            layer = (layer + 1) % LAYERS if position == "next" else position
            ids_TK = random.integers(0, EXPERTS, (tokens, TOP_K))
            mask_T = {"all": None, "same mask": shared_T[:tokens]}.get(
                masked, torch.from_numpy(random.random(tokens) < 0.5)
            )
            counter.count(layer, torch.from_numpy(ids_TK).int(), mask_T)
            active_T = np.ones(tokens, dtype=bool) if mask_T is None else mask_T.numpy()
            np.add.at(expected_LE[layer], ids_TK[active_T].ravel(), 1)
            if action == "read":
                assert counter.chosen_LE.tolist() == expected_LE.tolist()
            elif action == "clear":
                counter.clear()
                expected_LE[:] = 0
        assert counter.chosen_LE.tolist() == expected_LE.tolist()
    finally:
        choices.MAX_BUFFERED = before


@pytest.mark.parametrize("masked", [False, True])
def test_a_pass_launches_one_operator_per_layer_plus_three(masked: bool) -> None:
    layers = 58
    counter = ChoiceCounter(layers, EXPERTS, CPU)
    ids_TK = torch.randint(0, EXPERTS, (64, TOP_K), dtype=torch.int32)
    mask_T = torch.arange(64) < 40 if masked else None

    def forward() -> None:
        for layer in range(layers):
            counter.count(layer, ids_TK, None if mask_T is None else mask_T[:64])

    forward()
    counter.clear()
    with Launched() as launched:
        forward()
        chosen_LE = counter.chosen_LE
        counter.clear()
    assert len(launched.names) <= layers + 3
    assert set(launched.names) == {"copy_", "scatter_add_", "zero_"}
    assert chosen_LE.shape == (layers, EXPERTS)


def test_a_larger_batch_keeps_the_memory_of_earlier_graphs() -> None:
    counter = ChoiceCounter(1, EXPERTS, CPU)
    counter.count(0, torch.zeros((2, TOP_K), dtype=torch.int32))
    address = counter._ids_LC.data_ptr()
    counter.count(0, torch.zeros((9, TOP_K), dtype=torch.int32))
    assert counter._ids_LC.data_ptr() != address
    assert address in [tensor.data_ptr() for tensor in counter._outgrown]
    assert int(counter.chosen_LE.sum()) == 11 * TOP_K
