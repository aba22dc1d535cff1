"""One context of `flashqsa bench`: random tensors at a checkpoint's shapes, what is timed on them, and its work."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from flashqsa import attend, plan_step, prepare, select_blocks
from flashqsa.cache import CacheLayout, LayerCache
from flashqsa.commands.bench_timing import Call
from flashqsa.config import QSAConfig
from flashqsa.layer import QSAAttention
from flashqsa.plan import StepPlan
from flashqsa.rope import RopeTable

KEEP = 0.95
"""What a row's index query keeps of the one before it: neighbouring rows select much alike, as in text."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all contexts have in common.

    Attributes:
        config: The checkpoint's constants.
        requests: Requests in a step.
        rows: Rows of each request: its last tokens.
        page_tokens: Tokens of a page.
        dtype: Of everything.
        device: Where it runs.
    """

    config: QSAConfig
    requests: int
    rows: int
    page_tokens: int
    dtype: torch.dtype
    device: torch.device


class Workload:
    """Requests of one context on shuffled pages, with the caches full.

    Args:
        setting: What all contexts have in common.
        context: Tokens of each request, its rows included.
        dense: Whether to keep K and V contiguous too, for dense attention.
    """

    @torch.no_grad()
    def __init__(self, setting: Setting, context: int, *, dense: bool) -> None:
        self.setting, self.context = setting, context
        self.generator = torch.Generator(setting.device).manual_seed(context)
        config, count = setting.config, setting.requests * setting.rows
        self.layout = CacheLayout.from_config(
            config, page_tokens=setting.page_tokens, speculative_rows=setting.rows, dtype=setting.dtype
        )
        self.cache, self.page_table = self._caches()
        self.plan = self._plan()
        self.layer = QSAAttention(config).to(device=setting.device, dtype=setting.dtype).eval()
        for parameter in self.layer.parameters():
            scale = parameter.shape[1] ** -0.5 if parameter.dim() == 2 else 0.1
            parameter.copy_(scale * self._draw(*parameter.shape))
        self.rope = RopeTable.build(
            config.rope_parameters,
            rotary_dim=config.rotary_dim,
            num_positions=context,
            max_positions=config.max_positions,
            mrope_section=config.mrope_section,
            device=setting.device,
        )
        self.hidden = self._draw(count, config.hidden_size)
        self.projected = (
            self._draw(count, config.q_heads, 2 * config.head_dim),
            self._draw(count, config.kv_heads, config.head_dim),
            self._draw(count, config.kv_heads, config.head_dim),
            self._draw(count, config.index_heads + 1, config.index_head_dim),
        )
        self.q, self.gate = (self._draw(count, config.q_heads, config.head_dim) for _ in range(2))
        self.index_q = self._drifting_queries()
        self.layer(self.hidden, self.plan.positions, self.rope, self.cache, self.plan)  # fills the rings
        self.selection = select_blocks(self.index_q, self.cache, self.plan)
        self.out = torch.empty_like(self.q)
        self.dense_k, self.dense_v = (
            self._contiguous(pages) if dense else None for pages in (self.cache.k_pages, self.cache.v_pages)
        )

    def contenders(self) -> dict[str, Call]:
        """What is timed, by its name in the output."""
        calls: dict[str, Call] = {
            "prepare": self.prepare,
            "select": self.select,
            "attend": self.attend,
            "select + attend": lambda: (self.select(), self.attend()),
            "layer": lambda: self.layer(self.hidden, self.plan.positions, self.rope, self.cache, self.plan),
        }
        if self.dense_k is not None:
            calls["dense"] = self.dense
        return {name: torch.no_grad()(call) for name, call in calls.items()}

    def prepare(self) -> object:
        """Norms, rotation and cache writes."""
        norms = self.layer.norm_weights()
        return prepare(*self.projected, self.plan.positions, self.rope, norms, self.cache, self.plan)

    def select(self) -> object:
        """Scores and selection."""
        return select_blocks(self.index_q, self.cache, self.plan, out=self.selection)

    def attend(self) -> object:
        """Attention over what was selected."""
        return attend(self.q, self.cache, self.selection, self.plan, gate=self.gate, out=self.out)

    def dense(self) -> torch.Tensor:
        """Causal attention over the whole context by torch, [requests, Hq, rows, D], without a gate."""
        setting, k, v = self.setting, self.dense_k, self.dense_v
        assert k is not None
        assert v is not None
        q = self.q.view(setting.requests, setting.rows, *self.q.shape[1:]).transpose(1, 2)
        whole = setting.rows == self.context
        if setting.device.type == "cuda":
            last = None if whole or setting.rows == 1 else causal_lower_right(setting.rows, self.context)
            return scaled_dot_product_attention(q, k, v, attn_mask=last, is_causal=whole, enable_gqa=True)
        # On the CPU torch would copy K and V for each query head of a group; here they are views.
        group = setting.config.q_heads // setting.config.kv_heads
        mask = None
        if not whole and setting.rows > 1:
            mask = torch.ones(setting.rows, self.context, dtype=torch.bool).tril_(self.context - setting.rows)
        outs = []
        for head in range(setting.config.kv_heads):
            queries, keys, values = q[:, head * group :][:, :group], k[:, head, None], v[:, head, None]
            if setting.rows == 1:
                made = scaled_dot_product_attention(queries.transpose(1, 2), keys, values).transpose(1, 2)
            else:
                keys, values = (x.expand(-1, group, -1, -1) for x in (keys, values))
                made = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=whole)
            outs.append(made)
        return torch.cat(outs, dim=1)

    def neighbour_overlap(self) -> float | None:
        """Mean share of a row's blocks that the row before it selected too; None without rows that leave blocks out."""
        ids, requests = self.selection.block_ids, self.selection.request_ids
        beyond = (self.selection.visible_blocks > self.selection.block_counts)[1:] & (requests[1:] == requests[:-1])
        shares = [float(torch.isin(ids[row + 1], ids[row]).float().mean()) for row in beyond.nonzero()[:64, 0].tolist()]
        return round(sum(shares) / len(shares), 3) if shares else None

    def floor(self) -> tuple[int, int]:
        """FLOP and bytes that selection and attention need: everything read and written once.

        K and V count where any row of the request selected them; block keys, where a row leaves blocks out.
        """
        config, setting, plan = self.setting.config, self.setting, self.plan
        visible = plan.visible_blocks.to(torch.int64)
        scored = visible[visible > config.topk_blocks]
        tail = plan.positions + 1 - visible * config.block_tokens
        attended = int((visible.clamp(max=config.topk_blocks) * config.block_tokens + tail).sum())
        flop = 2 * int(scored.sum()) * config.index_heads * config.index_head_dim
        flop += 4 * attended * config.q_heads * config.head_dim
        ids = self.selection.block_ids.to(torch.int64)
        of_request = ids + self.selection.request_ids.to(torch.int64)[:, None] * self.context
        blocks = torch.unique(of_request[ids >= 0]).numel()
        tokens = blocks * config.block_tokens + setting.requests * config.block_tokens
        values = 2 * tokens * config.kv_heads * config.head_dim + 3 * self.q.numel() + self.index_q.numel()
        if len(scored):
            values += setting.requests * int(visible.max()) * config.index_head_dim
        return flop, values * setting.dtype.itemsize

    def _draw(self, *shape: int) -> torch.Tensor:
        where = {"device": self.setting.device, "dtype": self.setting.dtype}
        return torch.randn(shape, generator=self.generator, **where)  # type: ignore[call-overload,no-any-return]

    def _caches(self) -> tuple[LayerCache, torch.Tensor]:
        """Caches full of random numbers, block keys of length sqrt(Di), and a page table in random order."""
        setting, config = self.setting, self.setting.config
        pages = -(-self.context // setting.page_tokens)
        total = setting.requests * pages + 1  # page 0 is nobody's, as in many engines
        order = torch.randperm(total - 1, generator=self.generator, device=setting.device)
        kv_shape = (total, setting.page_tokens, config.kv_heads, config.head_dim)
        cache = LayerCache(
            self._draw(*kv_shape),
            self._draw(*kv_shape),
            _unit(self._draw(total, self.layout.page_blocks, config.index_head_dim)),
            self._draw(setting.requests, self.layout.ring_tokens, config.index_head_dim),
            torch.zeros(setting.requests, self.layout.ring_tokens, 3, dtype=torch.int64, device=setting.device),
        )
        return cache, (order + 1).to(torch.int32).view(setting.requests, pages)

    def _plan(self) -> StepPlan:
        setting, device = self.setting, self.setting.device
        each = torch.arange(setting.requests + 1, dtype=torch.int32, device=device)
        return plan_step(
            each * setting.rows,
            torch.full((setting.requests,), self.context, dtype=torch.int32, device=device),
            self.page_table,
            page_tokens=setting.page_tokens,
            block_tokens=setting.config.block_tokens,
            topk_blocks=setting.config.topk_blocks,
            max_query_len=setting.rows,
            max_seq_len=self.context,
            num_pages=self.cache.k_pages.shape[0],
            ring_ids=each[:-1],
            ring_tokens=self.layout.ring_tokens,
            num_rows=setting.requests * setting.rows,
        )

    def _drifting_queries(self) -> torch.Tensor:
        """Index queries of length sqrt(Di), each row's near the row before it."""
        setting, config = self.setting, self.setting.config
        steps = self._draw(setting.requests, setting.rows, config.index_heads * config.index_head_dim).float()
        for row in range(1, setting.rows):
            steps[:, row] = KEEP * steps[:, row - 1] + math.sqrt(1 - KEEP**2) * steps[:, row]
        return _unit(steps.view(-1, config.index_heads, config.index_head_dim)).to(setting.dtype)

    def _contiguous(self, pages: torch.Tensor) -> torch.Tensor:
        """K or V as [requests, Hkv, context, D]."""
        regions = pages[self.page_table.to(torch.int64)].flatten(1, 2)[:, : self.context]
        return regions.transpose(1, 2).contiguous()


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Rows of root mean square 1."""
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))).to(x.dtype)
