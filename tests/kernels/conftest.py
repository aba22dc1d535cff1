"""Kernels in Triton's interpreter on the CPU, or on a CUDA device: the same cases.

The interpreter takes a process of its own, since TRITON_INTERPRET=1 is read when Triton is imported:

    TRITON_INTERPRET=1 .venv/bin/pytest tests/kernels

Without the variable and without a GPU only cross-compilation and refusals run; everything else is deselected. The
interpreter is wrong for bf16, so bf16 and float8 run on a GPU alone. Where kernels run on a device, all tests of them
are marked `gpu`: `pytest -m gpu` runs them with those that need one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens
from flashqsa.cache import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.testing import (
    Step,
    StepCase,
    assert_selection_form,
    assert_unchanged,
    assert_within_budget,
    guarded,
    oracles,
    poison,
    poison_slots,
    snapshot,
    stream,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUN_NO_KERNEL = ("test_compile", "test_without_kernels")

FP16, BF16, FP32, E4M3 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what this process can run: see above."""
    here = Path(__file__).parent
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    kept, dropped = [], []
    for item in items:
        inside = here in item.path.parents
        compiles = item.path.name.startswith(RUN_NO_KERNEL)
        wanted = not INTERPRETED if compiles else INTERPRETED or on_gpu
        needs_gpu = item.get_closest_marker("gpu") is not None
        if inside and INTERPRETED:  # numpy says so wherever a tile holds NaN or infinity
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
        if inside and on_gpu and not compiles:
            item.add_marker(pytest.mark.gpu)
        (kept if not inside or (wanted and (on_gpu or not needs_gpu)) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def _products_round_once() -> Iterator[None]:
    """Interpreted products are summed in float64 and rounded once.

    numpy hands them to a BLAS whose last bits depend on the column of a tile, which no tensor core's do.
    """
    if not INTERPRETED:
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run in this process."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def _dtypes(*names: str) -> list[Any]:
    """Parameters of these dtypes; bf16 and e4m3 need a GPU."""
    known = {"fp16": FP16, "bf16": BF16, "fp32": FP32, "e4m3": E4M3}
    on_gpu_only = {"bf16", "e4m3"}
    return [pytest.param(known[n], id=n, marks=[pytest.mark.gpu] if n in on_gpu_only else []) for n in names]


@pytest.fixture(params=_dtypes("fp16", "bf16", "fp32"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Model dtypes."""
    found = request.param
    assert isinstance(found, torch.dtype)
    return found


# Selection


def _store(pages: torch.Tensor, slot_ids: torch.Tensor, rows: torch.Tensor) -> None:
    places = (slot_ids // pages.shape[1], slot_ids % pages.shape[1])
    if pages.dtype == E4M3:
        pages.view(torch.uint8)[places] = rows.to(E4M3).view(torch.uint8)
    else:
        pages[places] = rows.to(pages.dtype)


def _with_integers(step: Step, *, seed: int, largest: int = 3) -> Step:
    """The step with index queries and block keys that are integers in [-largest, largest]: scores exact, ties many.

    Values are functions of seed, request seed, position and block alone.
    """
    case, requests, wide = step.case, [], 2 * largest + 1
    for truth in step.requests:
        own = case.request_seed(truth.request_id)
        blocks = truth.block_keys.shape[0]
        keys = torch.randint(wide, (blocks, case.index_head_dim), generator=stream(seed, own, 90)) - largest
        keys = keys.to(truth.block_keys)
        for row, position in truth.rows():
            shape = (case.index_heads, case.index_head_dim)
            query = torch.randint(wide, shape, generator=stream(seed, own, 91, position)) - largest
            step.index_q[row] = query.to(device=step.index_q.device, dtype=FP32).to(step.index_q.dtype)
        _store(step.cache.block_keys, truth.block_slot_ids, keys)
        requests.append(dataclasses.replace(truth, block_keys=keys))
    return dataclasses.replace(step, requests=requests)


@pytest.fixture
def with_integers() -> Callable[..., Step]:
    """`with_integers(step, seed=..., largest=3)`: exact scores with many ties."""
    return _with_integers


@dataclasses.dataclass(frozen=True)
class ScoredRows:
    """Rows whose blocks have given scores, in shuffled pages of NaN.

    Attributes:
        index_q: [T, 1, Di].
        cache: The block keys; K and V hold one number.
        plan: The step.
    """

    index_q: torch.Tensor
    cache: LayerCache
    plan: StepPlan


def _scored_rows(
    scores: Sequence[float] | torch.Tensor,
    device: torch.device,
    *,
    seed: int,
    rows: int = 1,
    requests: int = 1,
    topk_blocks: int = 16,
    page_blocks: int = 16,
    max_blocks: int | None = None,
) -> ScoredRows:
    """Requests whose rows all score its blocks with these numbers, fp32. Scores must not be negative, NaN may be.

    The first row is scored with the numbers, each further one with twice the numbers of the one before. Requests share
    their pages.
    """
    numbers = torch.as_tensor(scores, dtype=FP32)
    blocks, count = len(numbers), len(numbers) // page_blocks + 1
    keys = torch.full((count + 2, page_blocks, 32), torch.nan)
    order = torch.randperm(count + 2, generator=stream(seed, 92))[:count]
    placed = torch.zeros(count * page_blocks, 32)
    placed[:blocks, 0] = numbers
    placed[blocks:] = torch.nan
    keys[order] = placed.view(count, page_blocks, 32)
    queries = torch.zeros(rows, 1, 32)
    queries[:, 0, 0] = 2.0 ** torch.arange(rows)
    tokens = blocks * 4 + rows - 1  # the first row is the one that closes the last block
    assert rows <= 4
    plan = plan_step(
        torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=device),
        torch.full((requests,), tokens, dtype=torch.int32, device=device),
        torch.cat([order, torch.tensor([-1])]).expand(requests, -1).to(device=device, dtype=torch.int32).contiguous(),
        page_tokens=page_blocks * 4, block_tokens=4, topk_blocks=topk_blocks, max_query_len=rows,
        max_seq_len=4 * (max_blocks or blocks) + rows, num_rows=requests * rows,
    )  # fmt: skip
    kv = torch.zeros(1, 1, 1, 1, device=device).expand(len(keys), page_blocks * 4, 1, 1)
    index_q = queries.repeat(requests, 1, 1).to(device)
    return ScoredRows(index_q, LayerCache(kv, kv, keys.to(device), None, None), plan)


@pytest.fixture
def scored_rows(device: torch.device) -> Callable[..., ScoredRows]:
    """`scored_rows(scores, seed=..., rows=1, requests=1, ...)`: rows over blocks of given scores."""
    return lambda scores, **options: _scored_rows(scores, device, **options)


def _select(inputs: Step | ScoredRows, **options: Any) -> Selection:
    """`select_blocks` by kernels, with what every call promises checked: inputs untouched, ids in their form."""
    before = snapshot(inputs.cache, [getattr(inputs.plan, name) for name in PLAN_TENSORS], inputs.index_q)
    selection = select_blocks(inputs.index_q, inputs.cache, inputs.plan, backend="triton", **options)
    assert_unchanged(before)
    assert_selection_form(selection, inputs.plan.topk_blocks)
    if isinstance(inputs, Step):
        inputs.assert_guards_intact()
    return selection


PLAN_TENSORS = (
    "query_starts", "seq_lens", "page_table", "first_slots", "first_block_slots", "request_ids", "positions",
    "visible_blocks",
)  # fmt: skip


@pytest.fixture
def select() -> Callable[..., Selection]:
    """`select(step, **options)`: kernels select, promises are checked."""
    return _select


# Attention


def _choose(
    step: Step, *, seed: int = 0, noise: float = 0.3, topk: int | None = None, counts: Sequence[int] | None = None
) -> Selection:
    """A random selection. What a row selects is a function of seed, request seed and position alone.

    Args:
        step: The step.
        seed: Seed of the choice.
        noise: How much neighbours differ: 0 for the same blocks as far as they see them.
        topk: Blocks of a row at most, those of the plan by default.
        counts: Blocks of each row instead of min(topk, visible).
    """
    plan, topk = step.plan, step.plan.topk_blocks if topk is None else topk
    block_ids = torch.full((plan.num_rows, topk), 2**31 - 1, dtype=torch.int32)
    block_counts = torch.full((plan.num_rows,), 2**31 - 1, dtype=torch.int32)
    visible_blocks = torch.full((plan.num_rows,), 2**31 - 1, dtype=torch.int32)
    for request in step.requests:
        own = step.case.request_seed(request.request_id)
        common = torch.rand(1 << 12, generator=stream(seed, own, 70))
        for row, position in request.rows():
            visible = (position + 1) // plan.block_tokens
            count = min(topk, visible) if counts is None else counts[row]
            scores = common[:visible] + noise * torch.rand(visible, generator=stream(seed, own, 71, position))
            block_ids[row, :count] = scores.topk(count).indices.sort().values.to(torch.int32)
            block_counts[row], visible_blocks[row] = count, visible
    ids, counted, seen = (x.to(step.plan.device) for x in (block_ids, block_counts, visible_blocks))
    return Selection(ids, counted, None, seen, plan.request_ids.clone(), step.cache.layer_id)


@pytest.fixture
def choose() -> Callable[..., Selection]:
    """`choose(step, seed=0, noise=0.3, topk=None, counts=None)`; what padding rows carry is garbage."""
    return _choose


def _attend(
    step: Step, chosen: Selection | torch.Tensor, *, gated: bool = True, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by kernels into a poisoned strided output between canaries, and check that nothing else was written."""
    cache, plan = options.pop("cache", step.cache), options.pop("plan", step.plan)
    dtype = options.get("out_dtype") or step.q.dtype
    target = guarded(tuple(step.q.shape), dtype, padding=(1, 1, 8), device=step.q.device)
    poison(target.view)
    before = snapshot(step.q, step.gate, cache, [getattr(plan, name) for name in PLAN_TENSORS], chosen)
    call = attend if isinstance(chosen, Selection) else attend_tokens
    out, lse = call(
        step.q, cache, chosen, plan, gate=step.gate if gated else None, return_lse=True, out=target.view,
        backend=options.pop("backend", "triton"), **options,
    )  # fmt: skip
    assert out is target.view
    target.assert_intact()
    step.assert_guards_intact()
    assert_unchanged(before)
    return out.clone(), lse


@pytest.fixture
def attend_hostile() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`attend_hostile(step, selection_or_token_ids, gated=True, ...)` -> output, lse; other arguments as `attend`."""
    return _attend


def _row_lists(step: Step, selection: Selection, include_tail: bool = True) -> list[list[int]]:
    """Tokens that each row attends, by the words of the contract; none for padding."""
    r, lists = step.plan.block_tokens, []
    ids, counts, visible = (x.tolist() for x in (selection.block_ids, selection.block_counts, selection.visible_blocks))
    for row, position in enumerate(step.plan.positions.tolist()):
        if position < 0:
            lists.append([])
            continue
        tokens = oracles.selected_tokens(ids[row][: counts[row]], visible[row], position, r)
        lists.append(tokens if include_tail else tokens[: counts[row] * r])
    return lists


@pytest.fixture
def row_lists() -> Callable[..., list[list[int]]]:
    """`row_lists(step, selection, include_tail=True)`: token ids of each row."""
    return _row_lists


def _products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[Hkv, G, N] of [Hkv, G, D] and [Hkv, N, D]; in fp32 on a device summed one by one, as its multipliers of fp32 do.

    A library sums in blocks there, and its error is no measure for kernels that have one accumulator.
    """
    if q.dtype != FP32 or q.device.type == "cpu":
        return q @ k.transpose(1, 2)
    total = torch.zeros(*q.shape[:2], k.shape[1], dtype=FP32, device=q.device)
    for d in range(q.shape[2]):
        total.addcmul_(q[:, :, None, d], k[:, None, :, d])
    return total


def _computed(
    step: Step, lists: Sequence[Sequence[int]], wide: torch.dtype, gated: bool, softmax_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of every row by matrices of a dtype, rounded to the model dtype where attention rounds."""
    out = torch.zeros(step.q.shape, dtype=wide, device=step.q.device)
    lse = torch.full(step.q.shape[:2], -torch.inf, dtype=wide, device=step.q.device)
    scale = step.q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for request in step.requests:
        for row, _ in request.rows():
            if not len(lists[row]):
                continue
            k, v = (x[lists[row]].to(wide).transpose(0, 1) for x in (request.k, request.v))
            q = step.q[row].to(wide).reshape(k.shape[0], -1, k.shape[2])
            scores = _products(q, k) * scale
            lse[row] = scores.logsumexp(dim=-1).flatten()
            attended = (scores.softmax(dim=-1) @ v).reshape(step.q.shape[1:])
            if wide != torch.float64:
                attended = attended.to(step.q.dtype).to(wide)
            out[row] = attended * torch.sigmoid(step.gate[row].to(wide)) if gated else attended
    return out, lse


def _assert_attends(
    step: Step,
    lists: Sequence[Sequence[int]],
    got: tuple[torch.Tensor, torch.Tensor],
    *,
    gated: bool = True,
    softmax_scale: float | None = None,
    label: str = "",
) -> None:
    """Output and lse within twice the error that fp32 has with the same roundings to the model dtype."""
    exact, exact_lse = _computed(step, lists, torch.float64, gated, softmax_scale)
    low, low_lse = _computed(step, lists, FP32, gated, softmax_scale)
    assert_within_budget(got[0], low.to(got[0].dtype), exact, f"{label} output")
    assert_within_budget(got[1], low_lse, exact_lse, f"{label} lse")


@pytest.fixture
def assert_attends() -> Callable[..., None]:
    """`assert_attends(step, token_lists, (out, lse), gated=True, softmax_scale=None)`: against float64."""
    return _assert_attends


def _alone(case: StepCase, request: int, **changes: Any) -> StepCase:
    """The case of one request of another by itself, its content the same."""
    return dataclasses.replace(
        case, name=f"{case.name} alone", requests=(case.requests[request],), padding_rows=0, padding_requests=0,
        request_seeds=(case.request_seed(request),), **changes,
    )  # fmt: skip


def _unseen_poisoned(step: Step, token_lists: Sequence[Sequence[int]], keys: bool = True) -> Step:
    """The step with NaN in K and V of every token that no row of its request attends."""
    k_pages, v_pages = step.cache.k_pages.clone(), step.cache.v_pages.clone()
    for request in step.requests:
        attended = {token for row, _ in request.rows() for token in token_lists[row]}
        spare = [token for token in range(request.seq_len) if token not in attended]
        assert spare or request.seq_len < 30
        poison_slots(v_pages, request.slot_ids[spare])
        if keys:
            poison_slots(k_pages, request.slot_ids[spare])
    return dataclasses.replace(step, cache=dataclasses.replace(step.cache, k_pages=k_pages, v_pages=v_pages))


@pytest.fixture
def unseen_poisoned() -> Callable[..., Step]:
    """`unseen_poisoned(step, token_lists, keys=True)`: NaN in V, and K, where no row of the request attends."""
    return _unseen_poisoned


@pytest.fixture
def alone() -> Callable[..., StepCase]:
    """`alone(case, request, **changes)`: the case of that request by itself."""
    return _alone
