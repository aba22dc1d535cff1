"""`RequestAlone`: one request on contiguous caches with nothing but the definitions, the oracle of the soak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flashqsa.attention import attend
from flashqsa.cache.state import LayerCache
from flashqsa.config import QSAConfig
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import NormWeights, prepare
from flashqsa.results import Prepared, Selection
from flashqsa.rope import RopeTable
from flashqsa.selection import select_blocks
from flashqsa.testing.compare import assert_best_selection, error_budget, score_bounds
from flashqsa.testing.oracles import score_blocks

F64 = torch.float64
BUDGETS = 4.0
"""Error budgets of attention that a whole layer may use: preparation rounds too, and one row has few elements."""


@dataclass(frozen=True)
class LayerInputs:
    """What the projections of one layer give for some rows, and what preparation needs besides.

    Attributes:
        q_gate: [T, Hq, 2 D] projected queries and gates.
        k: [T, Hkv, D] projected keys.
        v: [T, Hkv, D] projected values.
        index_qk: [T, Hi + 1, Di] projected index queries, then the index key.
        rope_positions: [3, T] int64 rotary positions.
        rope: The rotary table.
        norms: The layer's norm weights.
    """

    q_gate: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_qk: torch.Tensor
    rope_positions: torch.Tensor
    rope: RopeTable
    norms: NormWeights

    def prepared(self, cache: LayerCache, plan: StepPlan, *, backend: str = "auto") -> Prepared:
        """Preparation of these rows; writes the caches."""
        return prepare(
            self.q_gate, self.k, self.v, self.index_qk, self.rope_positions, self.rope, self.norms, cache, plan,
            backend=backend,
        )  # fmt: skip


class RequestAlone:
    """Caches of one request, contiguous, in which no raw key is ever overwritten by another token.

    Args:
        config: Shapes of the layers.
        layer_ids: The layers.
        max_tokens: Tokens that it may have, a multiple of the block size.
        dtype: Model dtype.
        device: Where it lives.

    Attributes:
        length: Tokens that it has.
    """

    def __init__(
        self, config: QSAConfig, layer_ids: Sequence[int], max_tokens: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.max_tokens, self.length = config, max_tokens, 0
        kv = (1, max_tokens, config.kv_heads, config.head_dim)

        def empty(*shape: int) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)

        self.caches = [
            LayerCache(
                empty(*kv), empty(*kv),
                empty(1, max_tokens // config.block_tokens, config.index_head_dim),
                empty(1, max_tokens, config.index_head_dim),
                torch.full((1, max_tokens, 3), -1, dtype=torch.int64, device=device),
                layer_id=layer_id,
            )
            for layer_id in layer_ids
        ]  # fmt: skip

    def copy(self, length: int) -> RequestAlone:
        """Another request with the first tokens of this one."""
        other = RequestAlone.__new__(RequestAlone)
        other.config, other.max_tokens, other.length = self.config, self.max_tokens, length
        names = ("k_pages", "v_pages", "block_keys", "ring", "ring_positions")
        other.caches = [replace(cache, **{n: getattr(cache, n).clone() for n in names}) for cache in self.caches]
        return other

    def plan(self, rows: int) -> StepPlan:
        """Grow by some rows."""
        self.length += rows
        zero = torch.zeros(1, dtype=torch.int32, device=self.caches[0].device)
        return plan_step(
            torch.cat([zero, zero + rows]), zero + self.length, None, page_tokens=None,
            block_tokens=self.config.block_tokens, topk_blocks=self.config.topk_blocks, max_query_len=rows,
            max_seq_len=self.length, first_slots=zero.to(torch.int64), ring_ids=zero, ring_tokens=self.max_tokens,
            num_rows=rows,
        )  # fmt: skip

    def check_layer(
        self,
        layer: int,
        inputs: LayerInputs,
        plan: StepPlan,
        output: torch.Tensor,
        selection: Selection,
        *,
        reused: bool,
        label: str,
    ) -> None:
        """Run the rows of one layer by the definitions, and compare what the system under test made of them.

        Args:
            layer: Place of the layer.
            inputs: The rows.
            plan: What `plan` gave.
            output: [T, Hq, D] of the system.
            selection: The system's, for these rows.
            reused: Whether it was made in an earlier step: then it is taken, not checked.
            label: First in the message.

        Raises:
            AssertionError: A row selected other blocks than the best ones (up to the bound on scores), or its output
                is further from float64 than `BUDGETS` error budgets of the definition.
        """
        cache = self.caches[layer]
        ready = inputs.prepared(cache, plan, backend="reference")
        if not reused:
            expected = select_blocks(ready.index_q, cache, plan, backend="reference")
            assert torch.equal(selection.block_counts, expected.block_counts), f"{label}: block counts differ"
            for row in (selection.block_ids != expected.block_ids).any(dim=1).nonzero().flatten().tolist():
                self._check_row(row, ready.index_q, cache, selection, f"{label}, row {row}")
        low = attend(ready.q, cache, selection, plan, gate=ready.gate, backend="reference")
        wide = replace(cache, k_pages=cache.k_pages.to(F64), v_pages=cache.v_pages.to(F64))
        exact = attend(ready.q.to(F64), wide, selection, plan, gate=ready.gate.to(F64), backend="reference")
        assert isinstance(low, torch.Tensor)
        assert isinstance(exact, torch.Tensor)
        error = float((output.to(F64) - exact).abs().max())
        budget = BUDGETS * error_budget(low, exact)
        assert error <= budget, f"{label}: error {error:.3e} exceeds {budget:.3e}"  # NaN exceeds everything

    def _check_row(self, row: int, index_q: torch.Tensor, cache: LayerCache, selection: Selection, label: str) -> None:
        """Where ids differ from the definition's, they must be as good."""
        assert cache.block_keys is not None
        keys = cache.block_keys[0, : int(selection.visible_blocks[row])]
        ids = selection.block_ids[row, : int(selection.block_counts[row])].tolist()
        bounds = score_bounds(index_q[row], keys)
        assert_best_selection(ids, score_blocks(index_q[row], keys), bounds, self.config.topk_blocks, label)
