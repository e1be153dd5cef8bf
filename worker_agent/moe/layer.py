"""The expert-parallel MoE layer: this rank's experts, and the forward pass that all ranks make together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eplb_service.wire.heat import StepPhase
from worker_agent.moe.composition import LayerPath
from worker_agent.moe.dispatch import DispatchRequest
from worker_agent.moe.kernel import KernelResult, WorkBeside, run_two
from worker_agent.moe.placed_layer import PlacedLayer
from worker_agent.moe.prepare import Prepared, Tokens
from worker_agent.moe.shape import MicroBatch, masked_outputs, real_ids


class ExpertParallelMoE(PlacedLayer):
    """One MoE layer on one of R ranks, in the shape that inference engines give it; a ``LiveLayer``.

    The placement lives in the tensors ``w13_weight``, ``w2_weight``, ``log2phy`` and ``expert_map`` alone,
    which are read at each call: whoever writes another placement into them in place, on all ranks
    between the same two steps, changes no output. Where tokens are split by step, ``install_placement`` must
    follow. (Dispatch goes by physical id; ``expert_map`` is kept for kernels that want it.)

    Parameters are ``PlacedLayer``'s.
    """

    @torch.no_grad()
    def forward(
        self,
        hidden_TH: torch.Tensor,
        topk_ids_TK: torch.Tensor,
        topk_weights_TK: torch.Tensor,
        *,
        active: torch.Tensor | None = None,
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
        workspace_set: int = 0,
    ) -> torch.Tensor:
        """This rank's tokens through their experts on all ranks; each rank has its own T >= 0.

        All ranks of the group call this at every step, with the same ``dispatcher``, ``length`` and kind of phase.

        Parameters
        ----------
        hidden_TH
            ``[T, H]`` of the layer's dtype.
        topk_ids_TK, topk_weights_TK
            ``[T, K]``, int32 or int64 by logical expert, and any float dtype.
        active
            bool ``[T]`` or ``[T, K]``: the real tokens or choices. Others are padding: routed nowhere and counted
            nowhere. A padding token's output is zeros; one whose choices alone are masked keeps its shared experts.
        phase
            What kind of step it is; in a dummy one nothing is real. Needed where ``heat_stage`` is not all.
        dispatcher
            One of the layer's, for this step; by default its first.
        length
            The tokens that MC2, all-gather and MoGE pad every rank's to, where the host knows it; otherwise the ranks
            exchange their numbers and wait for them. With it nothing of a step is read on the host (all-to-all
            always waits for its counts). All-to-all pads nothing; a split by step goes by it there, too.
        profile
            Whether the step measures the machine and serves nobody: its heat is a row of zeros.
        workspace_set
            Which of the layer's workspaces is used: steps that overlap need one each.

        Returns
        -------
        torch.Tensor
            ``[T, H]``: the weighted sum of each token's experts, and its shared experts' output.

        Raises
        ------
        ValueError
            Names layer and tensor on wrong shapes, dtypes, devices or ids, before any collective is entered;
            ``worker_agent.moe.shape`` says how that ends on the other ranks.
        """
        batch = MicroBatch(hidden_TH, topk_ids_TK, topk_weights_TK, active)
        path = self._path(dispatcher)
        (own_TK,) = self._checked(path, (batch,), phase)
        beside = self._beside(batch)
        prepared, request = self._prepared(path, batch, own_TK, length)
        result = path.kernel.run(
            request, self._weights(), self._dtype, beside=beside, workspace_set=workspace_set
        )
        self._record(result.heat_S, own_TK[prepared.source].reshape(-1), self._counts(phase, profile))
        return self._finished(path, batch, prepared, result, phase)

    @torch.no_grad()
    def forward_two(
        self,
        first: MicroBatch,
        second: MicroBatch,
        *,
        phase: StepPhase | None = None,
        dispatcher: str | None = None,
        length: int | None = None,
        profile: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two micro-batches as one step: the tokens of one travel while the experts work on the other's.

        Their heat is one row of the rings. Outputs and errors are ``forward``'s, of each micro-batch.

        Parameters
        ----------
        first, second
            The micro-batches.
        phase, dispatcher, length, profile
            As for ``forward``.
        """
        path = self._path(dispatcher)
        batches = (first, second)
        own = self._checked(path, batches, phase)
        beside = self._beside(first), self._beside(second)
        ready = [
            self._prepared(path, batch, own_TK, length) for batch, own_TK in zip(batches, own, strict=True)
        ]
        results = run_two(
            path.kernel,
            (ready[0][1], ready[1][1].after(ready[0][1])),
            self._weights(),
            self._dtype,
            beside=beside,
        )
        sources = [
            own_TK[prepared.source].reshape(-1) for own_TK, (prepared, _) in zip(own, ready, strict=True)
        ]
        received_S = results[0].heat_S + results[1].heat_S
        self._record(received_S, torch.cat(sources), self._counts(phase, profile))
        outputs = [
            self._finished(path, batch, prepared, result, phase)
            for batch, (prepared, _), result in zip(batches, ready, results, strict=True)
        ]
        return outputs[0], outputs[1]

    def _path(self, dispatcher: str | None) -> LayerPath:
        if dispatcher is None:
            return next(iter(self._paths.values()))
        if dispatcher not in self._paths:
            raise ValueError(
                f"layer {self.shape.layer}: dispatcher must be one that the layer was built with, "
                f"{' or '.join(self._paths)}; got {dispatcher!r}"
            )
        return self._paths[dispatcher]

    def _checked(
        self, path: LayerPath, batches: Sequence[MicroBatch], phase: StepPhase | None
    ) -> list[torch.Tensor]:
        """Each batch's ids ``[T, K]``, -1 where a choice is not real; raises as ``forward`` does."""
        shape, device, tokens = self.shape, self.w13_weight.device, 0
        found = []
        for batch in batches:
            shape.check_tokens(
                batch.hidden_TH,
                batch.topk_ids_TK,
                batch.topk_weights_TK,
                self._dtype,
                device,
                self._check_ids,
            )
            self._check_phase(phase)
            ids_TK = real_ids(shape, batch.topk_ids_TK, batch.active, phase)
            self._options.check_choices(shape.layer, ids_TK)
            if self._check_ids:
                path.check_distinct(shape.layer, ids_TK)
            tokens += ids_TK.shape[0]
            if self._routed_experts is not None:
                self._routed_experts.check(shape.layer, tokens, ids_TK.shape[1])
            found.append(ids_TK)
        if self._routed_experts is not None:
            self._routed_experts.record(shape.layer, torch.cat(found))
        return found

    def _prepared(
        self, path: LayerPath, batch: MicroBatch, own_TK: torch.Tensor, length: int | None
    ) -> tuple[Prepared[Any], DispatchRequest]:
        tokens = Tokens(batch.hidden_TH, (own_TK, batch.topk_weights_TK))
        prepared = path.preparation.prepare(tokens, length)
        path.check_room(self.shape.layer, prepared.hidden_TH.shape[0])
        ids_TK, weights_TK = prepared.routing
        masked = own_TK is not batch.topk_ids_TK
        if prepared.active_T is not None:
            masked = True
            ids_TK = ids_TK.masked_fill(~prepared.active_T.unsqueeze(1), -1)
        request = DispatchRequest(
            prepared.hidden_TH,
            ids_TK,
            weights_TK,
            self.log2phy,
            masked=masked,
            physical_TK=self._physical(path, ids_TK, prepared.common_tokens),
            scale_T=prepared.scale_T,
            check_values=self._check_ids,
        )
        return prepared, request.weighed_on_input() if self._options.weigh_on_input else request

    def _physical(
        self, path: LayerPath, ids_TK: torch.Tensor, common_tokens: int | None
    ) -> torch.Tensor | None:
        """The physical expert of each choice, where they are split by step."""
        if self._split is None:
            return None
        return self._split.split(ids_TK, None if path.shares_tokens else self._group, common_tokens)

    def _beside(self, batch: MicroBatch) -> WorkBeside | None:
        if self._shared_experts is None:
            return None
        work = self._shared_experts.beside(batch.hidden_TH)
        return work if self._side_stream is None else self._side_stream.beside(work, batch.hidden_TH)

    def _finished(
        self,
        path: LayerPath,
        batch: MicroBatch,
        prepared: Prepared[Any],
        result: KernelResult,
        phase: StepPhase | None,
    ) -> torch.Tensor:
        """A batch's own outputs, with those of its shared experts; zeros for padding."""
        out_TH: torch.Tensor = path.preparation.finalize(result.out_TH, prepared.metadata)
        if result.beside_TH is None:
            return out_TH
        return masked_outputs(out_TH + result.beside_TH, batch.active, phase)
