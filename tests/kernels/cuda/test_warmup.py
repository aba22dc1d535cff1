"""After `warmup` serving compiles nothing, as Triton itself tells."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from triton import knobs

from flashqsa import PagedPool, QSAAttention, QSAConfig, RopeTable, WarmupReport, warmup

pytestmark = pytest.mark.gpu

CONFIG = QSAConfig(
    hidden_size=256, q_heads=8, kv_heads=2, head_dim=64, index_heads=4, index_head_dim=32, budget_tokens=512,
    block_tokens=4, rotary_dim=16, mrope_section=(4, 2, 2), max_positions=16_384, qsa_layer_ids=(3,),
)  # fmt: skip
MOST_REQUESTS, MOST_ROWS, LONGEST = 48, 512, 6000


@contextmanager
def _asked_of_the_compiler() -> Iterator[list[str]]:
    """Kernels that Triton compiles or loads from disk inside the block."""
    names: list[str] = []
    before = knobs.compilation.listener

    def listen(*, src: object, **_: object) -> None:
        names.append(src.name)  # type: ignore[attr-defined]

    knobs.compilation.listener = listen
    try:
        yield names
    finally:
        knobs.compilation.listener = before


class Serving:
    """Random requests on a pool: prompts in chunks, decode, verification with rollback, requests that come and go."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = PagedPool.from_config(
            CONFIG, page_tokens=64, num_pages=1500, num_rings=MOST_REQUESTS, speculative_rows=4, device="cuda"
        )
        torch.manual_seed(seed)
        self.layer = QSAAttention(CONFIG, 3).to(device="cuda", dtype=torch.bfloat16)
        self.rope = RopeTable.build(
            CONFIG.rope_parameters, rotary_dim=CONFIG.rotary_dim, num_positions=LONGEST,
            mrope_section=CONFIG.mrope_section, device="cuda",
        )  # fmt: skip
        self.opened = 0

    def warmup(self) -> WarmupReport:
        """Compile for the bounds of this engine."""
        return warmup(
            CONFIG, cache=self.pool.cache(3), rope=self.rope, max_requests=MOST_REQUESTS, max_rows=MOST_ROWS,
            max_seq_len=LONGEST,
        )  # fmt: skip

    def step(self) -> None:
        """One step of some of the requests."""
        rng, pool = self.rng, self.pool
        while pool.requests and (len(pool.requests) == MOST_REQUESTS or rng.random() < 0.1):
            pool.close(rng.choice(pool.requests))
        for _ in range(rng.choice([0, 1, 1, 12])):
            if len(pool.requests) < MOST_REQUESTS:
                self.opened += 1
                pool.open(self.opened)
        widths = rng.choice([[1], [4], [1, 5], [1, 2, 7, 8, 16], [1, 1, 1, MOST_ROWS], [30, 100, 333]])
        rows: dict[int, int] = {}
        for request in rng.sample(pool.requests, k=rng.randint(0, len(pool.requests))):
            count = min(rng.choice(widths), MOST_ROWS - sum(rows.values()), LONGEST - pool.length(request))
            if count > 0 and pool.pages_needed({**rows, request: count}) <= pool.free_pages:
                rows[request] = count
        if not rows:
            return
        total = sum(rows.values())
        bounds = rng.choice(
            [{}, {"max_seq_len": LONGEST}, {"num_rows": min(MOST_ROWS, total + 3)}, {"table_pages": 100}]
        )
        plan = pool.plan_step(rows, **bounds)
        hidden = torch.randn(plan.num_rows, CONFIG.hidden_size, device="cuda", dtype=torch.bfloat16)
        output, _ = self.layer(hidden, plan.positions.clamp(min=0), self.rope, pool.cache(3), plan)
        assert bool(torch.isfinite(output[:total]).all())
        for request, count in rows.items():
            if 1 < count <= 5 and rng.random() < 0.5:
                pool.rollback(request, rows=rng.randint(1, count - 1))


@torch.no_grad()
def test_serving_after_warmup_compiles_nothing() -> None:
    serving = Serving(seed=5)
    before = [x.clone() for x in (serving.pool.cache(3).k_pages, serving.pool.cache(3).ring_positions)]
    with _asked_of_the_compiler() as asked:
        report = serving.warmup()
    after = (serving.pool.cache(3).k_pages, serving.pool.cache(3).ring_positions)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "warmup wrote into the caches"
    assert report.refusals == {}
    assert report.compiled + report.loaded == len(asked) > 10
    with _asked_of_the_compiler() as asked:
        again = serving.warmup()
        for _ in range(300):
            serving.step()
        torch.cuda.synchronize()
    assert asked == []
    assert again.compiled == again.loaded == 0
    assert serving.opened > 50


@torch.no_grad()
def test_what_was_not_warmed_is_seen() -> None:
    """The count is one of compilations: a layer of another head dim still compiles."""
    config = QSAConfig(64, 2, 1, 32, 2, 32, 64, 4, 8, qsa_layer_ids=(0,))
    with _asked_of_the_compiler() as asked:
        report = warmup(config, max_requests=1, max_rows=1, max_seq_len=128)
    assert asked != []
    assert report.compiled + report.loaded == len(asked)
