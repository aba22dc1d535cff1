# mypy: ignore-errors
"""Which rows go where on a GPU: requests with many rows by union tiles, all others one by one.

Tiles share the loads of neighbouring rows and fill the tensor cores. On compute capability 9.0 that pays even where
neighbours have nothing in common, and in verification by 8 rows a request or more; there requests of 4 rows or more
whose heads fill one product at most go by spans of their union. Elsewhere a tile whose union is too large a share of
its lists leaves its rows; what is left, and every row of decode, is attended row by row. Who goes where is decided on
the device, by a row's own request and tile.
"""

import torch

from flashqsa.attention.triton_rows import attend_rows_triton
from flashqsa.attention.triton_tiles import TilesKernelConfig, attend_tiles_triton, tile_height
from flashqsa.attention.triton_union import LEAST_ROWS
from flashqsa.attention.triton_verify_lists import FEWEST_ROWS
from flashqsa.launching import launched_where

NARROW_ROWS = 8
"""Rows of a request from which on its verification goes by tiles of compute capability 9.0, if not by spans."""


def tile_rows(query_group):
    """Rows of a tile, at absolute multiples of which a prefill may be cut without changing a bit.

    Args:
        query_group: Query heads that share a KV head.
    """
    return tile_height(query_group, TilesKernelConfig.choose(query_group, wide=False).block_m)


def takes_tiles(q, cache, plan, tokens):
    """Whether some rows of a step can go by tiles: lists of blocks, in dtypes of the tensor cores."""
    if plan.max_query_len < FEWEST_ROWS or tokens.unit_tokens != plan.block_tokens:
        return False
    return torch.float32 not in (q.dtype, cache.k_pages.dtype)


def _gluon_serves(q, cache, plan, tokens, softmax_scale):
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] != 9:
        return False
    from flashqsa.attention.gluon_tiles import gluon_tiles_refusal

    return gluon_tiles_refusal(q, cache, plan, tokens, softmax_scale, parts=1) is None


def _attend_gluon(step, outputs):
    """Tiles of prefills, tiles and spans of verification. Lists of which the last says who was served; None without."""
    from flashqsa.attention.gluon_tiles import attend_tiles_gluon
    from flashqsa.attention.gluon_verify import attend_verify_gluon, gluon_verify_refusal, most_verify_rows

    q, cache, plan = step[:3]
    if plan.num_rows == 0 or plan.num_requests == 0:
        return None
    lists = None
    spans = gluon_verify_refusal(*step) is None
    narrow = max(NARROW_ROWS, most_verify_rows(q.shape[1] // cache.kv_heads) + 1) if spans else NARROW_ROWS
    if plan.max_query_len >= LEAST_ROWS:
        lists = attend_tiles_gluon(*step, **outputs, parts=1)
    if narrow <= plan.max_query_len and narrow < LEAST_ROWS:
        lists = attend_tiles_gluon(*step, **outputs, parts=1, narrow=narrow)
    if spans:
        lists = attend_verify_gluon(*step, **outputs, mark_below=LEAST_ROWS if lists is None else 0)
    return lists


@launched_where(lambda tensor: tensor.device)
def attend_triton(q, cache, plan, tokens, softmax_scale, *, row_exact, gate, out, lse):
    """Fill `out` [T, Hq, D] and `lse` [T, Hq] (or None).

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step; owns the scratch.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores.
        row_exact: Attend every row one by one.
        gate: [T, Hq, D] or None.
        out: Output buffer.
        lse: fp32 buffer, or None.
    """
    step = (q, cache, plan, tokens, softmax_scale)
    outputs = {"gate": gate, "out": out, "lse": lse}
    lists = None
    if not row_exact and takes_tiles(q, cache, plan, tokens):
        if _gluon_serves(*step):
            lists = _attend_gluon(step, outputs)
        elif plan.max_query_len >= LEAST_ROWS:
            lists = attend_tiles_triton(*step, **outputs)
    attend_rows_triton(*step, **outputs, served=None if lists is None else lists.served)
