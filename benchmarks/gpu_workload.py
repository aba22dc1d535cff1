"""Random tensors at the released checkpoint's shapes, where their generator lives: shuffled pages, drifting rows."""

from __future__ import annotations

import torch

Q_HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, BLOCK, BUDGET, PAGE = 24, 2, 256, 4, 128, 4, 2048, 64
TOPK = BUDGET // BLOCK
ROTARY, MROPE = 64, (11, 11, 10)


def randn(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Gaussian bf16 numbers."""
    return torch.randn(*size, device=generator.device, generator=generator, dtype=torch.bfloat16)


def normed(x: torch.Tensor) -> torch.Tensor:
    """Rows of root mean square 1, in bf16."""
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))).to(torch.bfloat16)


def shuffled_pages(requests: int, context: int, generator: torch.Generator) -> tuple[torch.Tensor, int]:
    """[requests, pages] int32 page table in random order, and the number of pages of the pool; page 0 is nobody's."""
    pages = -(-context // PAGE)
    total = requests * pages + 1
    order = torch.randperm(total - 1, device=generator.device, generator=generator).to(torch.int32) + 1
    return order.view(requests, pages).contiguous(), total


def packed_pool(pages: int, kv_heads: int, generator: torch.Generator) -> torch.Tensor:
    """[pages, tokens, heads, 2 * D] K beside V, a view of [pages, heads, tokens, 2 * D] as vLLM lays it out."""
    pool = torch.empty(pages, kv_heads, PAGE, 2 * HEAD_DIM, device=generator.device, dtype=torch.bfloat16)
    return pool.normal_(generator=generator).transpose(1, 2)


def keys_and_values(pages: int, kv_heads: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views of one packed pool."""
    k, v = packed_pool(pages, kv_heads, generator).split(HEAD_DIM, dim=-1)
    return k, v


def drifting_rows(rows: int, width: int, keep: float, generator: torch.Generator) -> torch.Tensor:
    """[rows, width] fp32 Gaussian rows, each `keep` of the one before it and the rest new."""
    steps = torch.randn(rows, width, device=generator.device, generator=generator)
    fresh = (1 - keep**2) ** 0.5
    for row in range(1, rows if keep else 0):
        steps[row] = keep * steps[row - 1] + fresh * steps[row]
    return steps


def drifting(rows: int, keep: float, generator: torch.Generator) -> torch.Tensor:
    """[rows, Hi, Di] normed index queries, each `keep` of the one before it and the rest new."""
    return normed(drifting_rows(rows, INDEX_HEADS * INDEX_DIM, keep, generator).view(rows, INDEX_HEADS, INDEX_DIM))


def sliding(rows: int, blocks: int, churn: float, generator: torch.Generator) -> torch.Tensor:
    """[rows, K] int32 distinct blocks in no order; each row has `churn` of its blocks new against the row before it."""
    step = round(churn * TOPK)
    order = torch.randperm(blocks, device=generator.device, generator=generator)
    places = torch.arange(rows, device=generator.device)[:, None] * step + torch.arange(TOPK, device=generator.device)
    return order[places % blocks].to(torch.int32)
