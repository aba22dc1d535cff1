"""The whole path of one layer: projections, preparation, selection, attention, output projection."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.config import QSAConfig
from flashqsa.plan import StepPlan
from flashqsa.plan.selected import check_selection
from flashqsa.preparation import NormWeights, prepare
from flashqsa.results import Selection
from flashqsa.rope import RopeTable
from flashqsa.selection import select_blocks


class NormWeight(nn.Module):
    """The weight of a Gemma-form RMS norm, under its checkpoint name; preparation applies it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))


class QSAIndexer(nn.Module):
    """The indexer's parameters, and its projection.

    Args:
        config: The checkpoint's constants.
    """

    def __init__(self, config: QSAConfig) -> None:
        super().__init__()
        self.index_head_dim = config.index_head_dim
        self.index_qk_proj = nn.Linear(config.hidden_size, (config.index_heads + 1) * config.index_head_dim, bias=False)
        self.q_layernorm = NormWeight(config.index_head_dim)
        self.k_layernorm = NormWeight(config.index_head_dim)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden] to index queries and, last, the raw index key: [T, Hi + 1, Di]."""
        return _heads(self.index_qk_proj(hidden_states), self.index_head_dim)


def _heads(projected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[T, heads * head_dim] to [T, heads, head_dim]."""
    return projected.reshape(projected.shape[0], -1, head_dim)


class QSAAttention(nn.Module):
    """One QSA layer, under the checkpoint's parameter names.

    Args:
        config: The checkpoint's constants.
        layer_id: Index of the layer in the model, for callers that keep caches by layer.
    """

    def __init__(self, config: QSAConfig, layer_id: int | None = None) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.head_dim, self.norm_eps = config.head_dim, config.norm_eps
        q_width, kv_width = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, 2 * q_width, bias=bias)  # per head [q | gate]
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=bias)
        self.o_proj = nn.Linear(q_width, config.hidden_size, bias=bias)
        self.q_norm = NormWeight(config.head_dim)
        self.k_norm = NormWeight(config.head_dim)
        self.indexer = QSAIndexer(config)

    def norm_weights(self) -> NormWeights:
        """The layer's four norms, as preparation takes them."""
        return NormWeights(
            q=self.q_norm.weight,
            k=self.k_norm.weight,
            index_q=self.indexer.q_layernorm.weight,
            index_k=self.indexer.k_layernorm.weight,
            eps=self.norm_eps,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        rope_positions: torch.Tensor,
        rope: RopeTable,
        cache: LayerCache,
        plan: StepPlan,
        *,
        selection: Selection | None = None,
        row_exact: bool = False,
        backend: str = "auto",
    ) -> tuple[torch.Tensor, Selection]:
        """Run the layer over the rows of one step.

        Compiles into one graph (``torch.compile(layer, fullgraph=True)``) without gradients. There the values of a
        reused selection are checked by attention, when the caches have been written.

        Args:
            hidden_states: [T, hidden] in the model dtype, row for row of the plan.
            rope_positions: [T] or [3, T] int64 rotary positions.
            rope: The rotary table.
            cache: This layer's caches, written in place.
            plan: The step, shared by all layers.
            selection: Reuse an earlier step's selection of these requests (draft steps): the caches are still kept up
                to date, nothing is scored, and every token since the end of the blocks that the reused row could see
                is attended as tail.
            row_exact: Every row equals its decode form bit for bit.
            backend: Backend of all three stages.

        Returns:
            Output [T, hidden], and the selection that was used.

        Raises:
            FlashQSAError: As `prepare`, `select_blocks` and `attend`.
        """
        if selection is not None:  # before the caches are written
            check_selection("QSAAttention", selection, plan, layer_id=cache.layer_id)
        q_gate = _heads(self.q_proj(hidden_states), 2 * self.head_dim)
        k = _heads(self.k_proj(hidden_states), self.head_dim)
        v = _heads(self.v_proj(hidden_states), self.head_dim)
        index_qk = self.indexer(hidden_states)
        prepared = prepare(
            q_gate, k, v, index_qk, rope_positions, rope, self.norm_weights(), cache, plan, backend=backend
        )
        if selection is None:
            selection = select_blocks(prepared.index_q, cache, plan, backend=backend)
        attended = cast(
            torch.Tensor,
            attend(prepared.q, cache, selection, plan, gate=prepared.gate, row_exact=row_exact, backend=backend),
        )
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output, selection
