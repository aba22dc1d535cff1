"""Selection over ranks, first with the rows of a step shared out, then with every context cut in parts, attended too.

Each equals what one rank selects, bit for bit. The functions are to be copied: what they hand to each other is what the
collectives of torch.distributed carry. Two processes start by themselves; torchrun starts any number:

    python examples/sharded_selection.py
    torchrun --nproc-per-node 3 examples/sharded_selection.py
"""

import itertools
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import flashqsa


def gather(tensor):
    """The same tensor of every rank, in their order."""
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor.contiguous())
    return tensors


# Rows shared out: every rank has all block keys, and selects for rows first to end of the step.


def rows_plan(plan, first, end):
    """The plan of some rows of a step. A request ends, for this rank, with the last row that the rank has of it."""
    starts, stops = plan.query_starts[:-1], plan.query_starts[1:]
    behind = (stops - stops.clamp(max=end)).minimum(stops - starts)  # its rows that later ranks have
    rows = slice(first, end)
    return flashqsa.StepPlan.from_tensors(
        query_starts=plan.query_starts.clamp(first, end) - first, seq_lens=(plan.seq_lens - behind).clamp(min=0),
        page_table=plan.page_table, request_ids=plan.request_ids[rows], positions=plan.positions[rows],
        visible_blocks=plan.visible_blocks[rows], slot_ids=torch.full_like(plan.slot_ids[rows], -1),  # writes nothing
        page_tokens=plan.page_tokens, block_tokens=plan.block_tokens, topk_blocks=plan.topk_blocks,
        max_query_len=plan.max_query_len, max_seq_len=plan.max_seq_len, num_pages=plan.num_pages,
    )  # fmt: skip


def join_rows(shares, bounds, plan, layer_id):
    """The selection of the step from each rank's ids: rows bounds[n] to bounds[n + 1], then padding."""
    block_ids = torch.cat([ids[: bounds[n + 1] - bounds[n]] for n, ids in enumerate(shares)])
    visible = plan.visible_blocks.masked_fill(plan.request_ids < 0, 0)
    counts = visible.clamp(max=plan.topk_blocks)
    return flashqsa.Selection(block_ids, counts, None, visible, plan.request_ids, layer_id)


def select_over_rows(index_q, cache, plan, bounds):
    """`select_blocks` of which each rank does the rows between two bounds; the ids are gathered."""
    first, end = bounds[dist.get_rank() : dist.get_rank() + 2]
    own = flashqsa.select_blocks(index_q[first:end], cache, rows_plan(plan, first, end))
    most = max(b - a for a, b in itertools.pairwise(bounds))
    share = torch.nn.functional.pad(own.block_ids, (0, 0, 0, most - (end - first)), value=-1)
    return join_rows(gather(share), bounds, plan, cache.layer_id)


# Contexts cut: every rank has all rows, and in pages of its own blocks cuts[rank, i] to cuts[rank + 1, i] of request i.


def of_rows(plan, numbers):
    """One number a request as one a row."""
    return numbers[plan.request_ids.clamp(min=0).long()]


def shard_sees(plan, first_blocks, end_blocks):
    """How many blocks of a shard each row sees."""
    first, end = of_rows(plan, first_blocks), of_rows(plan, end_blocks)
    seen = (plan.visible_blocks.minimum(end) - first).clamp(min=0)
    return seen.masked_fill(plan.request_ids < 0, 0).to(torch.int32)


def shard_plan(plan, page_table, first_blocks, end_blocks):
    """The step over a rank's own pages: rows and positions of the whole, fewer visible blocks, nothing written."""
    width = -(-plan.max_seq_len // plan.page_tokens)
    table = page_table.new_zeros(plan.num_requests, width)  # page 0 stands for what other ranks have; it is not read
    table[:, : page_table.shape[1]] = page_table
    return flashqsa.StepPlan.from_tensors(
        query_starts=plan.query_starts, seq_lens=plan.seq_lens, page_table=table, request_ids=plan.request_ids,
        positions=plan.positions, visible_blocks=shard_sees(plan, first_blocks, end_blocks),
        slot_ids=torch.full_like(plan.slot_ids, -1), page_tokens=plan.page_tokens, block_tokens=plan.block_tokens,
        topk_blocks=plan.topk_blocks, max_query_len=plan.max_query_len, max_seq_len=plan.max_seq_len,
    )  # fmt: skip


def shard_message(selection):
    """What a rank tells the others: [2, T, K] int32, ids in its own count and the bits of their scores."""
    return torch.stack([selection.block_ids, selection.scores.view(torch.int32)])


def join_contexts(messages, plan, cuts, layer_id):
    """The selection of the step from the messages of all ranks."""
    shards = [
        flashqsa.Selection(
            ids, (ids >= 0).sum(dim=1, dtype=torch.int32), bits.view(torch.float32),
            shard_sees(plan, cuts[n], cuts[n + 1]), plan.request_ids, layer_id,
        )
        for n, (ids, bits) in enumerate(messages)
    ]  # fmt: skip
    return flashqsa.merge_selections(shards, first_blocks=[of_rows(plan, first) for first in cuts[:-1]])


def select_over_contexts(index_q, cache, own_plan, plan, cuts):
    """`select_blocks` of which each rank scores the blocks that it has; ids and scores are gathered and merged."""
    own = flashqsa.select_blocks(index_q, cache, own_plan, return_scores=True)
    return join_contexts(gather(shard_message(own)), plan, cuts, cache.layer_id)


def shard_tokens(selection, plan, first_blocks, end_blocks):
    """Of the tokens that rows attend, tail included, those that a rank has, in its own count: for `attend_tokens`."""
    tokens = flashqsa.expand_tokens(selection, plan)[:, :-1].long()
    first, end = (of_rows(plan, blocks)[:, None] * plan.block_tokens for blocks in (first_blocks, end_blocks))
    owned = (tokens >= first) & (tokens < end)
    to_front = (~owned).to(torch.int8).argsort(dim=1, stable=True)
    return torch.cat([(tokens - first).gather(1, to_front), owned.sum(dim=1, keepdim=True)], dim=1).to(torch.int32)


def attend_over_contexts(q, gate, cache, own_plan, selection, plan, cuts):
    """Each rank attends the selected tokens that it has; outputs and lses are gathered and merged, the gate once."""
    tokens = shard_tokens(selection, plan, *cuts[dist.get_rank() :][:2])
    out, lse = flashqsa.attend_tokens(q, cache, tokens, own_plan, out_dtype=torch.float32, return_lse=True)
    return flashqsa.merge_partials(gather(out), gather(lse), gate=gate)


# A step to try them on: every rank makes the same one, and of the contexts keeps its part.

PAGE, BLOCK, BUDGET, LAYER = 64, 4, 256, 3
ROWS, LENGTHS = [40, 1, 3, 1], [3000, 5000, 1200, 90]  # a chunk of a prompt, decode, drafts, decode within the budget


def make_step():
    torch.manual_seed(0)
    pages = [-(-length // PAGE) for length in LENGTHS]
    pool = torch.randperm(sum(pages), dtype=torch.int32)
    table = torch.full((len(LENGTHS), max(pages)), -1, dtype=torch.int32)
    for request, own in enumerate(pool.split(pages)):
        table[request, : len(own)] = own
    k, v = torch.randn(2, len(pool), PAGE, 2, 32)
    keys = torch.randint(-2, 3, (len(pool), PAGE // BLOCK, 16)).float()  # whole numbers, so that many scores are equal
    plan = flashqsa.plan_step(
        torch.tensor([0, *ROWS]).cumsum(0).to(torch.int32), torch.tensor(LENGTHS, dtype=torch.int32), table,
        page_tokens=PAGE, block_tokens=BLOCK, topk_blocks=BUDGET // BLOCK, max_query_len=max(ROWS),
        max_seq_len=max(LENGTHS), num_pages=len(pool),
    )  # fmt: skip
    q, gate = torch.randn(2, plan.num_rows, 8, 32)
    index_q = torch.randint(-2, 3, (plan.num_rows, 4, 16)).float()
    return flashqsa.LayerCache(k, v, keys, None, None, layer_id=LAYER), plan, index_q, q, gate


def keep_pages(cache, plan, first_pages, end_pages):
    """The caches and page table of a rank that has some pages of each request, behind one that nobody reads."""
    spans = [plan.page_table[i, a:b] for i, (a, b) in enumerate(zip(first_pages, end_pages, strict=True))]
    kept = torch.cat([torch.zeros(1, dtype=torch.int32), *spans]).long()
    table = torch.zeros(len(spans), max(len(span) for span in spans), dtype=torch.int32)
    first = 1
    for request, span in enumerate(spans):
        table[request, : len(span)] = torch.arange(first, first + len(span))
        first += len(span)
    pages = (cache.k_pages[kept], cache.v_pages[kept], cache.block_keys[kept])
    return flashqsa.LayerCache(*pages, None, None, layer_id=cache.layer_id), table


def run():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cache, plan, index_q, q, gate = make_step()
    alone = flashqsa.select_blocks(index_q, cache, plan)
    output = flashqsa.attend(q, cache, alone, plan, gate=gate)

    bounds = [plan.num_rows * n // ranks for n in range(ranks + 1)]
    over_rows = select_over_rows(index_q, cache, plan, bounds)

    pages = torch.tensor([-(-length // PAGE) for length in LENGTHS])
    page_cuts = torch.stack([pages * n // ranks for n in range(ranks + 1)])
    cuts = page_cuts * (PAGE // BLOCK)
    own_cache, own_table = keep_pages(cache, plan, page_cuts[rank].tolist(), page_cuts[rank + 1].tolist())
    own_plan = shard_plan(plan, own_table, cuts[rank], cuts[rank + 1])
    over_contexts = select_over_contexts(index_q, own_cache, own_plan, plan, cuts)
    merged = attend_over_contexts(q, gate, own_cache, own_plan, over_contexts, plan, cuts)
    for what, selection in (("rows", over_rows), ("contexts", over_contexts)):
        same = all(
            torch.equal(getattr(selection, name), getattr(alone, name))
            for name in ("block_ids", "block_counts", "visible_blocks", "request_ids")
        )
        print(f"rank {rank} of {ranks}, {what}: {'the same selection' if same else 'another selection'}", flush=True)
    print(f"rank {rank} of {ranks}, attention: at most {float((merged - output).abs().max()):.0e} away", flush=True)


def work(rank, ranks, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    run()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("gloo")
        run()
        dist.destroy_process_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (2, os.path.join(folder, "meeting")), nprocs=2)
