"""Selection over ranks, by the functions of examples/sharded_selection.py: equal to one rank's, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens, merge_partials
from flashqsa.cache import LayerCache
from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan
from flashqsa.results import Selection
from flashqsa.selection import merge_selections, select_blocks
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, assert_selection_form, make_step, stream

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sharded_selection.py"
spec = importlib.util.spec_from_file_location("sharded_selection", EXAMPLE)
example: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)

RAGGED = ((0, 37), (200, 9), (50, 1), (0, 0), (0, 2), (331, 3))
CASES = {
    "ties": StepCase("ties", RAGGED, padding_rows=2, padding_requests=1),
    "zeros": StepCase("zeros", RAGGED, padding_rows=1),
    "nan": StepCase("nan", RAGGED, topk_blocks=40),
    "budget": StepCase("budget", RAGGED, topk_blocks=200, padding_rows=1),
    "floats": StepCase("floats", ((10_400, 3), (9_000, 1), (40, 5)), topk_blocks=300, page_tokens=64),
}
"""Steps by what their scores are like; in "budget" K exceeds what any row sees, hence every shard too."""


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(integer_step: Any) -> Any:
    """`make(name)`: a step of the case of that name."""

    def making(name: str) -> Step:
        if name == "floats":
            return make_step(CASES[name], seed=70)
        step = integer_step(CASES[name], seed=70, largest=0 if name == "zeros" else 2)
        if name == "nan":
            for truth in step.requests:
                blocks = torch.rand(len(truth.block_slot_ids), generator=stream(71, truth.request_id)) < 0.6
                slots = truth.block_slot_ids[blocks]
                keys = step.cache.block_keys
                keys[slots // keys.shape[1], slots % keys.shape[1]] = torch.nan
        return step

    return making


def cut(step: Step, name: str, ranks: int) -> torch.Tensor:
    """[ranks + 1, R] blocks where shards begin: anywhere, with empty shards and shards of nothing but the tail.

    Sums of floats are promised to equal those of the whole where a shard begins at whole tiles of 1,024 blocks.
    """
    blocks = step.plan.seq_lens.long() // step.case.block_tokens
    unit = 1024 if name == "floats" else 1
    cuts = [torch.randint(0, int(m) // unit + 1, (ranks + 1,), generator=stream(72, ranks, int(m))) for m in blocks]
    cuts = (torch.stack(cuts) * unit).sort(dim=1).values.t()
    cuts[0], cuts[-1] = 0, blocks + 1  # the last shard has the block that is still open
    if ranks > 1:
        cuts[1, 1] = 0  # the first one has nothing of request 1
        cuts[ranks - 1, 2] = blocks[2] // unit * unit  # the last one little of request 2
    return cuts


def keep(step: Step, owned: Sequence[torch.Tensor], *, seed: int) -> tuple[LayerCache, torch.Tensor]:
    """Caches and page table of a rank that has some blocks of each request, one after the other, in pages of its own.

    Everything else in its pool is NaN, page 0 too.
    """
    r, page_tokens = step.case.block_tokens, step.case.page_tokens
    page_blocks = page_tokens // r
    pages = [-(-len(blocks) // page_blocks) for blocks in owned]
    free = (torch.randperm(sum(pages) + 2, generator=stream(seed, 73)) + 1).tolist()
    cache, like = step.cache, (len(free) + 1,)
    k, v, keys = (
        torch.full(like + pool.shape[1:], torch.nan, dtype=pool.dtype)
        for pool in (cache.k_pages, cache.v_pages, cache.block_keys)
    )
    table = torch.zeros(len(owned), max(pages), dtype=torch.int32)
    for request, blocks in enumerate(owned):
        own_pages = [free.pop() for _ in range(pages[request])]
        table[request, : pages[request]] = torch.tensor(own_pages, dtype=torch.int32)
        length = int(step.plan.seq_lens[request])
        for place, block in enumerate(blocks.tolist()):
            page, at = own_pages[place // page_blocks], place % page_blocks
            if (block + 1) * r <= length:
                slot = int(step.plan.block_slots(request, torch.tensor(block)))
                keys[page, at] = cache.block_keys[slot // page_blocks, slot % page_blocks]
            tokens = torch.arange(block * r, min((block + 1) * r, length))
            slots = step.plan.token_slots(request, tokens)
            for mine, whole in ((k, cache.k_pages), (v, cache.v_pages)):
                mine[page, at * r : at * r + len(tokens)] = whole[slots // page_tokens, slots % page_tokens]
    return LayerCache(k, v, keys, None, None, layer_id=cache.layer_id), table


def shard(step: Step, cuts: torch.Tensor, rank: int) -> tuple[LayerCache, StepPlan]:
    """What a rank has of a step whose contexts are cut."""
    ends = cuts[rank + 1].minimum(-(-step.plan.seq_lens.long() // step.case.block_tokens))
    spans = [torch.arange(int(a), int(b)) for a, b in zip(cuts[rank], ends, strict=True)]
    cache, table = keep(step, spans, seed=rank)
    return cache, example.shard_plan(step.plan, table, cuts[rank], cuts[rank + 1])


def assert_same(joined: Selection, whole: Selection, *, scores: bool = True) -> None:
    for tensor in ("block_ids", "block_counts", "visible_blocks", "request_ids", *(["scores"] if scores else [])):
        assert_bitwise_equal(getattr(joined, tensor), getattr(whole, tensor), tensor)
    assert joined.layer_id == whole.layer_id


def messages_of(step: Step, cuts: torch.Tensor, backend: str = "auto") -> list[torch.Tensor]:
    """What each rank would send."""
    messages = []
    for rank in range(len(cuts) - 1):
        cache, plan = shard(step, cuts, rank)
        own = select_blocks(step.index_q, cache, plan, return_scores=True, backend=backend)
        assert_selection_form(own, plan.topk_blocks)
        messages.append(example.shard_message(own))
    return messages


def select_whole(step: Step, backend: str = "auto") -> Selection:
    """One rank's selection, with the NaN of scores as merging writes it."""
    whole = select_blocks(step.index_q, step.cache, step.plan, return_scores=True, backend=backend)
    assert whole.scores is not None
    return dataclasses.replace(whole, scores=whole.scores.masked_fill(whole.scores.isnan(), torch.nan))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_contexts_over_ranks_equal_one_rank(make: Any, name: str, backend: str, ranks: int) -> None:
    if name == "floats" and backend == "reference":
        pytest.skip("loops over 10,000 tokens; the other steps say the same")
    step = make(name)
    cuts = cut(step, name, ranks)
    joined = example.join_contexts(messages_of(step, cuts, backend), step.plan, cuts, step.cache.layer_id)
    whole = select_whole(step, backend)
    assert_same(joined, whole)
    if name == "nan":
        assert bool(whole.scores.isnan().any())
    if name == "zeros":
        assert joined.block_ids[36].tolist() == list(range(8)), "the lowest ids of all ranks"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rows_over_ranks_equal_one_rank(make: Any, name: str, backend: str, ranks: int) -> None:
    """Cut inside requests and anywhere, one rank without a row."""
    step = make(name)
    rows = step.num_rows
    bounds = [0, *sorted(torch.randint(0, rows + 1, (ranks - 1,), generator=stream(74, ranks)).tolist()), rows]
    if ranks > 2:
        bounds[2] = bounds[1]
    most = max(b - a for a, b in itertools.pairwise(bounds))
    shares = []
    for first, end in itertools.pairwise(bounds):
        plan = example.rows_plan(step.plan, first, end)
        own = select_blocks(step.index_q[first:end], step.cache, plan, backend=backend)
        shares.append(torch.nn.functional.pad(own.block_ids, (0, 0, 0, most - (end - first)), value=7))
    joined = example.join_rows(shares, bounds, step.plan, step.cache.layer_id)
    assert_same(joined, select_whole(step, backend), scores=False)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_attention_over_ranks_merges_into_one_ranks(make: Any, name: str, ranks: int) -> None:
    """Each rank attends its own tokens of the joined selection; each row's tail lies on whichever rank has it."""
    step = make(name)
    cuts = cut(step, name, ranks)
    joined = example.join_contexts(messages_of(step, cuts), step.plan, cuts, step.cache.layer_id)
    outs, lses, attended = [], [], torch.zeros(step.num_rows, dtype=torch.int32)
    for rank in range(ranks):
        cache, plan = shard(step, cuts, rank)
        tokens = example.shard_tokens(joined, step.plan, cuts[rank], cuts[rank + 1])
        attended += tokens[:, -1]
        out, lse = attend_tokens(step.q, cache, tokens, plan, out_dtype=torch.float32, return_lse=True)
        outs.append(out)
        lses.append(lse)
    tails = (step.plan.positions + 1) % step.case.block_tokens
    assert torch.equal(attended, joined.block_counts * step.case.block_tokens + tails), "each token on one rank"
    whole = attend(step.q, step.cache, joined, step.plan, gate=step.gate)
    merged = merge_partials(outs, lses, gate=step.gate)
    live = step.live_rows
    assert float((merged - whole)[live].abs().max()) <= 1e-5
    assert not bool(merged[~live].any())


def test_pages_dealt_out_in_turn_join_by_ids_of_the_whole(make: Any) -> None:
    """Rank n has every third page: its ids rise with those of the whole, but not by one number; it maps them itself."""
    ranks, step = 3, make("ties")
    plan, page_blocks = step.plan, step.case.page_tokens // step.case.block_tokens
    shards = []
    for rank in range(ranks):
        owned = []
        for length in plan.seq_lens.tolist():
            blocks = torch.arange(-(-length // step.case.block_tokens))
            owned.append(blocks[blocks // page_blocks % ranks == rank])
        cache, table = keep(step, owned, seed=75)
        nothing = torch.zeros(plan.num_requests, dtype=torch.int64)
        seen = [
            int((owned[request] < visible).sum()) if request >= 0 else 0
            for request, visible in zip(plan.request_ids.tolist(), plan.visible_blocks.tolist(), strict=True)
        ]
        own_plan = dataclasses.replace(
            example.shard_plan(plan, table, nothing, nothing), visible_blocks=torch.tensor(seen, dtype=torch.int32)
        )
        own = select_blocks(step.index_q, cache, own_plan, return_scores=True)
        ids = own.block_ids
        of_whole = (ids // page_blocks * ranks + rank) * page_blocks + ids % page_blocks
        shards.append(dataclasses.replace(own, block_ids=torch.where(ids < 0, -1, of_whole)))
    assert_same(merge_selections(shards), select_whole(step))


@pytest.mark.parametrize("name", ["ties", "zeros", "budget"])
def test_wrong_offsets_are_refused_or_seen(make: Any, name: str) -> None:
    """What a mistaken start of a shard does: shared blocks raise on the CPU, a gap gives other ids."""
    step = make(name)
    cuts = cut(step, name, 2)
    messages, whole = messages_of(step, cuts), select_whole(step)
    assert_same(example.join_contexts(messages, step.plan, cuts, step.cache.layer_id), whole)
    plan = step.plan
    shards = [
        Selection(ids, (ids >= 0).sum(1, dtype=torch.int32), bits.view(torch.float32),
                  example.shard_sees(plan, *cuts[n : n + 2]), plan.request_ids, step.cache.layer_id)
        for n, (ids, bits) in enumerate(messages)
    ]  # fmt: skip
    starts = example.of_rows(plan, cuts[1])
    for wrong in ([0, starts + 1], [1, starts + 1], [starts, 0]):
        refused = False
        with contextlib.suppress(ArgumentError):
            other = merge_selections(shards, first_blocks=wrong)
            refused = True
            assert not torch.equal(other.block_ids, whole.block_ids)
        assert refused or name != "zeros" or wrong[0] is starts
    with pytest.raises(ArgumentError, match="must not share blocks"):
        merge_selections(shards, first_blocks=[0, (starts - 1).clamp(min=0)])
    with pytest.raises(ArgumentError, match="must not share blocks"):
        merge_selections(shards)


def test_two_processes_that_have_their_shares_alone(make: Any, tmp_path: Path) -> None:
    """Two gloo processes do every case; what one is not meant to have, it is not given."""
    ranks, steps = 2, {name: make(name) for name in CASES}
    for rank in range(ranks):
        cases = {}
        for name, step in steps.items():
            cuts = cut(step, name, ranks)
            own_cache, own_plan = shard(step, cuts, rank)
            without_values = LayerCache(torch.full_like(step.cache.k_pages, torch.nan),
                                        torch.full_like(step.cache.v_pages, torch.nan), step.cache.block_keys,
                                        None, None, layer_id=step.cache.layer_id)  # fmt: skip
            cases[name] = {
                "plan": step.plan, "index_q": step.index_q, "q": step.q, "gate": step.gate, "cache": without_values,
                "bounds": [0, step.num_rows // 3, step.num_rows], "cuts": cuts, "own_cache": own_cache,
                "own_plan": own_plan,
            }  # fmt: skip
        torch.save({"example": str(EXAMPLE), "cases": cases}, tmp_path / f"inputs{rank}.pt")
    script = Path(__file__).parent / "one_rank.py"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(ranks), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, said
    for rank in range(ranks):
        results = torch.load(tmp_path / f"results{rank}.pt", weights_only=False)
        for name, step in steps.items():
            whole = select_whole(step)
            assert_same(results[name]["rows"], whole, scores=False)
            assert_same(results[name]["contexts"], whole)
            output = attend(step.q, step.cache, whole, step.plan, gate=step.gate)
            away = (results[name]["attended"] - output)[step.live_rows].abs().max()
            assert float(away) <= 1e-5, f"{name} on rank {rank}"
