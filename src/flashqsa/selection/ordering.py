"""The order of blocks as one integer: a higher score first, then the lower id.

A key is 64 bits wide: the score's bits, made monotone, above the complement of the block id. Keys of different blocks
always differ, so the largest K of them are one set on every machine and in every algorithm.
"""

from __future__ import annotations

import torch

UNSEEN = torch.iinfo(torch.int64).min
"""Key of a block that a row does not see; below every other key, NaN scores included."""

_ID_MASK = 0xFFFFFFFF
_NAN_RANK = torch.iinfo(torch.int32).min


def order_keys(scores: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Keys of scored blocks, int64 of the broadcast shape.

    Args:
        scores: fp32 scores; NaN ranks below every number, -0.0 equals +0.0.
        block_ids: Integer block ids in [0, 2**32), broadcast against `scores`.
    """
    rank = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is +0.0
    rank = rank.bitwise_xor_((rank >> 31).bitwise_and_(0x7FFFFFFF)).masked_fill_(torch.isnan(scores), _NAN_RANK)
    return rank.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(_ID_MASK - block_ids.to(torch.int64))


def best_keys(keys: torch.Tensor, topk_blocks: int) -> torch.Tensor:
    """The largest `topk_blocks` keys of each row, in no order; all of them where there are fewer."""
    if keys.shape[-1] <= topk_blocks:
        return keys
    return torch.topk(keys, topk_blocks, dim=-1, sorted=False).values


def unpack_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block ids ascending with -1 behind, and their scores with -inf behind.

    Args:
        keys: [N, K] keys in any order, `UNSEEN` where there is no block.

    Returns:
        block_ids [N, K] int32 and scores [N, K] fp32.
    """
    seen = keys != UNSEEN
    ids = torch.where(seen, _ID_MASK - (keys & _ID_MASK), _ID_MASK)
    ids, order = ids.sort(dim=-1)
    keys, seen = keys.gather(-1, order), seen.gather(-1, order)
    rank = (keys >> 32).to(torch.int32)
    bits = torch.where(rank >= 0, rank, rank ^ 0x7FFFFFFF)
    scores = torch.where(rank == _NAN_RANK, torch.nan, bits.view(torch.float32))
    return torch.where(seen, ids, -1).to(torch.int32), torch.where(seen, scores, -torch.inf)
