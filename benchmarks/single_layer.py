"""One QSA layer of transformers at given shapes: module, inputs, both engines' calls, and the work that is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import Qwen4ExpTextConfig
from transformers.masking_utils import causal_mask_function
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextAttention, Qwen4ExpTextRotaryEmbedding

from benchmarks.timing import Call
from flashqsa.cache import LayerCache
from flashqsa.integrations import hf
from flashqsa.integrations.hf.angles import WholeTables
from flashqsa.integrations.hf.masks import HFStep, step_mask
from flashqsa.integrations.hf.pooled import pool_new_blocks
from flashqsa.preparation.plain import rotate
from flashqsa.results import Selection
from flashqsa.selection import select_blocks

STEP_CORRELATION = {"independent": 0.0, "drifting": 0.99}
"""Workloads: how much a token's hidden state keeps of the one before it, and so how far neighbours select alike."""


@dataclass(frozen=True)
class LayerShape:
    """Constants of one layer; the letters are those of the documentation.

    Attributes:
        hidden: Width of hidden states.
        q_heads: `Hq`.
        kv_heads: `Hkv`.
        head_dim: `D`.
        index_heads: `Hi`.
        index_head_dim: `Di`.
        budget_tokens: Tokens that a row selects at most.
        block_tokens: `r`.
        mrope_section: Frequencies of the three position axes.
    """

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_head_dim: int
    budget_tokens: int
    block_tokens: int
    mrope_section: tuple[int, int, int]

    @property
    def topk_blocks(self) -> int:
        """`K`."""
        return self.budget_tokens // self.block_tokens

    def config(self) -> Qwen4ExpTextConfig:
        """The configuration that transformers builds the layer from."""
        config = Qwen4ExpTextConfig(
            hidden_size=self.hidden,
            num_hidden_layers=4,
            num_attention_heads=self.q_heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            indexer_n_heads=self.index_heads,
            indexer_kv_heads=1,
            indexer_head_dim=self.index_head_dim,
            indexer_budget=self.budget_tokens,
            indexer_compress_ratio=self.block_tokens,
            eos_token_id=1,
            max_position_embeddings=262_144,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": list(self.mrope_section),
                "mrope_interleaved": True,
            },
        )
        config._attn_implementation = "sdpa"
        return config


SHAPES = {
    "released": LayerShape(2560, 24, 2, 256, 4, 128, 2048, 4, (11, 11, 10)),
    "tiny": LayerShape(64, 6, 2, 32, 4, 32, 64, 4, (2, 1, 1)),
}


@dataclass(frozen=True)
class Work:
    """What one call needs by the definition, whoever does it: operations, and bytes read and written once.

    Attributes:
        flop: Multiplications and additions.
        moved_bytes: Inputs, weights and outputs in fp32, each once.
    """

    flop: int
    moved_bytes: int


class SingleLayer:
    """A layer with random weights and one prompt.

    Args:
        shape: Its constants.
        tokens: Length of the prompt.
        workload: A name of `STEP_CORRELATION`.
        seed: Of weights and prompt.
    """

    def __init__(self, shape: LayerShape, tokens: int, workload: str = "independent", seed: int = 0) -> None:
        self.shape, self.tokens = shape, tokens
        generator = torch.Generator().manual_seed(seed)
        config = shape.config()
        self.attention = Qwen4ExpTextAttention(config, 3).eval().requires_grad_(False)
        for name, parameter in self.attention.named_parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            assert parameter.dtype == torch.float32, name
        keep = STEP_CORRELATION[workload]
        hidden = torch.randn(tokens, shape.hidden, generator=generator)
        for token in range(1, tokens if keep else 0):
            hidden[token].mul_((1 - keep**2) ** 0.5).add_(hidden[token - 1], alpha=keep)
        self.hidden = hidden[None]
        positions = torch.arange(tokens)[None].expand(3, 1, -1)
        self.position_embeddings = Qwen4ExpTextRotaryEmbedding(config)(self.hidden, positions)

    def to(self, device: str, dtype: torch.dtype) -> SingleLayer:
        """The same layer elsewhere, in place."""
        self.attention.to(device, dtype)
        self.hidden = self.hidden.to(device, dtype)
        self.position_embeddings = tuple(table.to(device, dtype) for table in self.position_embeddings)
        return self

    def mask(self) -> torch.Tensor:
        """The causal mask that transformers hands to its layers, [1, 1, tokens, tokens] bool."""
        return torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=self.hidden.device).tril_()[None, None]

    def step(self) -> HFStep:
        """What FlashQSA makes instead of the mask, once a forward for all layers."""
        return step_mask(
            1, self.tokens, self.tokens, mask_function=causal_mask_function, config=self.attention.config,
            device=self.hidden.device,
        )  # fmt: skip

    @contextmanager
    def index_projection_given(self) -> Iterator[torch.Tensor]:
        """The indexer without its projection: `index_qk_proj` returns what it would compute, [1, tokens, width]."""
        indexer = self.attention.indexer
        projection = indexer.index_qk_proj
        index_qk = projection(self.hidden)
        indexer.index_qk_proj = _Given(index_qk)
        try:
            yield index_qk
        finally:
            indexer.index_qk_proj = projection

    @contextmanager
    def transformers_layer(self) -> Iterator[Call]:
        """The layer as transformers has it."""
        mask = self.mask()
        yield lambda: self.attention(self.hidden, self.position_embeddings, mask, None)[0]

    @contextmanager
    def flashqsa_layer(self) -> Iterator[Call]:
        """The same module with FlashQSA enabled; the step is new, so what layers share is paid for by this one."""
        with hf.enabled(self.attention):
            step = self.step()
            yield lambda: self.attention(self.hidden, self.position_embeddings, step, None)[0]

    @contextmanager
    def transformers_indexer(self) -> Iterator[Call]:
        """Preparation and selection of transformers' indexer, its projection given."""
        mask = self.mask()
        with self.index_projection_given():
            yield lambda: self.attention.indexer(self.hidden, self.position_embeddings, mask, None)

    @contextmanager
    def flashqsa_indexer(self) -> Iterator[Call]:
        """The pieces that the drop-in runs in place of it."""
        step = self.step()
        with self.index_projection_given() as index_qk:
            yield lambda: self.select(index_qk, step)

    def select(self, index_qk: torch.Tensor, step: HFStep) -> Selection:
        """Index queries normed and rotated, block keys pooled, blocks selected, as the drop-in does it."""
        indexer, dim = self.attention.indexer, self.shape.index_head_dim
        index_qk = index_qk.view(1, self.tokens, -1, dim)
        angles = WholeTables(*self.position_embeddings)
        index_q = indexer.q_layernorm(index_qk[:, :, :-1].flatten(0, 1))
        index_q = rotate(index_q, *angles.of_rows(self.tokens)).to(index_qk.dtype)
        keys = pool_new_blocks(None, index_qk[:, :, -1], angles, indexer.k_layernorm, step).keys
        unread = index_qk.new_zeros(1, self.tokens, 1, 1)
        return select_blocks(index_q, LayerCache(unread, unread, keys, None, None), step.plan)

    def visible_blocks(self) -> torch.Tensor:
        """Complete blocks that each row sees, [tokens]."""
        return (torch.arange(self.tokens) + 1) // self.shape.block_tokens

    def layer_work(self) -> Work:
        """Projections, scores of rows beyond the budget, attention over what is selected."""
        s, t = self.shape, self.tokens
        widths = 2 * s.q_heads * s.head_dim + 2 * s.kv_heads * s.head_dim + (s.index_heads + 1) * s.index_head_dim
        weights = s.hidden * (widths + s.q_heads * s.head_dim)
        visible = self.visible_blocks()
        tail = torch.arange(t) + 1 - visible * s.block_tokens
        attended = int((visible.clamp(max=s.topk_blocks) * s.block_tokens + tail).sum())
        flop = 2 * t * weights + 4 * attended * s.q_heads * s.head_dim + self.indexer_work().flop
        return Work(flop, 4 * (weights + 2 * t * s.hidden))

    def indexer_work(self) -> Work:
        """Scores of rows beyond the budget; queries and keys read, block ids written."""
        s, t = self.shape, self.tokens
        visible = self.visible_blocks()
        pairs = int(visible[visible > s.topk_blocks].sum())
        flop = 2 * pairs * s.index_heads * s.index_head_dim
        return Work(flop, 4 * t * ((s.index_heads + 1) * s.index_head_dim + s.topk_blocks))


class _Given(nn.Module):
    """Stands for a module whose output is known."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.output


def neighbour_overlap(selection: Selection) -> float | None:
    """Mean share of a row's blocks that the row before it selected too, over rows beyond the budget; None without."""
    beyond = (selection.visible_blocks > selection.block_counts).nonzero()[:, 0]
    shares = []
    for row in beyond[beyond > 0].tolist():
        count = int(selection.block_counts[row])
        ids, before = selection.block_ids[row, :count], selection.block_ids[row - 1]
        shares.append(float(torch.isin(ids, before).sum()) / count)
    return round(sum(shares) / len(shares), 3) if shares else None
