from types import SimpleNamespace

import torch

from vllm.distributed.eplb.policy import EPLB_POLICIES


class EplbState:
    """Moves the toy engine's weights in place, as vLLM does."""

    def __init__(self, engine, interval):
        self._engine = engine
        self._interval = interval
        weights = [torch.from_numpy(tensor) for tensor in engine.weights]
        self.model_states = {
            "toy": SimpleNamespace(
                model=SimpleNamespace(
                    expert_weights=[[tensor[layer] for tensor in weights] for layer in (0, 1)]
                ),
                physical_to_logical_map=torch.from_numpy(engine.placement_LP),
                # The toy engine has one table, in a different format from vLLM's two.
                logical_to_physical_map=torch.from_numpy(engine.table_LP),
                logical_replica_count=torch.zeros(2, 1),
            )
        }

    def step(self):
        engine = self._engine
        engine.steps += 1
        if engine.steps % self._interval:
            return
        old = torch.from_numpy(engine.placement_LP)
        arrays = [*engine.weights, engine.placement_LP, engine.table_LP]
        new = EPLB_POLICIES["default"].rebalance_experts(None, 8, 1, 1, 1, old)
        engine._move(new.numpy())
        moved = [*engine.weights, engine.placement_LP, engine.table_LP]
        for array, values in zip(arrays, moved, strict=True):
            array[:] = values
        *engine.weights, engine.placement_LP, engine.table_LP = arrays
