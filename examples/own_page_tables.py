"""QSA on one's own paged tensors: two requests are prefilled in one step, then decode one token each in the next."""

import torch

import flashqsa

Q_HEADS, KV_HEADS, DIM, INDEX_HEADS, INDEX_DIM = 6, 2, 64, 4, 32
PAGE, BLOCK, BUDGET = 16, 4, 64  # tokens of a page, of a block, and that a row may select
PAGES, REQUESTS = 32, 2

torch.manual_seed(0)
ring_tokens = flashqsa.ring_capacity(BLOCK)
cache = flashqsa.LayerCache(
    k_pages=torch.empty(PAGES, PAGE, KV_HEADS, DIM),
    v_pages=torch.empty(PAGES, PAGE, KV_HEADS, DIM),
    block_keys=torch.empty(PAGES, PAGE // BLOCK, INDEX_DIM),  # on the same page table as K and V
    ring=torch.empty(REQUESTS, ring_tokens, INDEX_DIM),
    ring_positions=torch.empty(REQUESTS, ring_tokens, 3, dtype=torch.int64),
)
norms = flashqsa.NormWeights(*(torch.zeros(n) for n in (DIM, DIM, INDEX_DIM, INDEX_DIM)))
rope = flashqsa.RopeTable.build({"rope_theta": 1e7}, rotary_dim=16, num_positions=512)
page_table = torch.randperm(PAGES, dtype=torch.int32).view(REQUESTS, -1)  # whatever the allocator gave


def step(new_tokens: list[int], seq_lens: list[int]) -> tuple[torch.Tensor, flashqsa.Selection]:
    """One step of one layer. `seq_lens` count the step's own tokens too."""
    plan = flashqsa.plan_step(
        torch.tensor([0, *new_tokens]).cumsum(0).to(torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        page_table,
        page_tokens=PAGE,
        block_tokens=BLOCK,
        topk_blocks=BUDGET // BLOCK,
        max_query_len=max(new_tokens),
        max_seq_len=max(seq_lens),
        num_pages=PAGES,
        ring_ids=torch.arange(REQUESTS, dtype=torch.int32),
        ring_tokens=ring_tokens,
    )
    rows = plan.num_rows  # the projections of the model would go here
    q_gate = torch.randn(rows, Q_HEADS, 2 * DIM)
    k, v = torch.randn(2, rows, KV_HEADS, DIM)
    index_qk = torch.randn(rows, INDEX_HEADS + 1, INDEX_DIM)
    ready = flashqsa.prepare(q_gate, k, v, index_qk, plan.positions, rope, norms, cache, plan)
    selection = flashqsa.select_blocks(ready.index_q, cache, plan)
    return flashqsa.attend(ready.q, cache, selection, plan, gate=ready.gate), selection


output, _ = step(new_tokens=[150, 90], seq_lens=[150, 90])
print(f"prefill: output {list(output.shape)}")
output, selection = step(new_tokens=[1, 1], seq_lens=[151, 91])
for row in range(REQUESTS):
    visible, count = int(selection.visible_blocks[row]), int(selection.block_counts[row])
    print(f"decode, request {row}: {count} of {visible} blocks, {selection.block_ids[row, :4].tolist()}...")
