"""A layer compiled into one graph: the bits of the eager one, no recompilation between steps, gradients refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from flashqsa import StepPlan, plan_step
from flashqsa.testing import as_bytes, assert_bitwise_equal

CONTEXT, TABLE_COLUMNS, LONGEST = 150, 40, 400
STEPS = {"prefill": 64, "decode": 1, "verify": 4}
"""Rows that a step adds to each of two requests."""


def _refilled(engine: Any, work: list[Any], held: StepPlan | None) -> StepPlan:
    """The plan of a step at fixed shapes and bounds: new the first time, then refilled in place."""
    fresh = engine.plan(work)
    table = torch.full((len(work), TABLE_COLUMNS), -1, dtype=torch.int32)
    table[:, : fresh.page_table.shape[1]] = fresh.page_table
    return plan_step(
        fresh.query_starts, fresh.seq_lens, table, page_tokens=fresh.page_tokens, block_tokens=fresh.block_tokens,
        topk_blocks=fresh.topk_blocks, max_query_len=fresh.max_query_len, max_seq_len=LONGEST,
        num_pages=fresh.num_pages, ring_ids=fresh.ring_ids, ring_tokens=fresh.ring_tokens, out=held,
    )  # fmt: skip


def _serve(
    engine: Any, layer: Any, called: Any, rope: Any, rows: Any, sequences: Any, rows_a_step: int, steps: int = 3
) -> list[torch.Tensor]:
    """Two prompts eagerly, then some steps of one kind through `called`: all outputs and selected ids, then caches."""
    results: list[torch.Tensor] = []
    at, held = CONTEXT, None
    dtype = engine.caches[0].k_pages.dtype
    pieces = [(hidden.to(dtype), positions) for hidden, positions in sequences]
    prompts = [rows(name, h[:at], p[:, :at]) for name, (h, p) in zip("ab", pieces, strict=True)]
    engine.step(layer, rope, prompts)
    for _ in range(steps):
        end = at + rows_a_step
        work = [rows(name, h[at:end], p[:, at:end]) for name, (h, p) in zip("ab", pieces, strict=True)]
        held = _refilled(engine, work, held)
        hidden, positions = torch.cat([w.hidden for w in work]), torch.cat([w.positions for w in work], dim=-1)
        output, selection = called(hidden, positions, rope, engine.caches[0], held)
        results += [output, selection.block_ids, selection.block_counts, selection.visible_blocks]
        at = end
    cache = engine.caches[0]
    return [*results, cache.k_pages, cache.v_pages, cache.block_keys, cache.ring, cache.ring_positions]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own compiler imports it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layer_equals_the_eager_one_and_compiles_once(
    make_config: Any, make_layer: Any, make_rope: Any, make_engine: Any, make_sequence: Any, rows: Any,
    kind: str, dtype: torch.dtype, backend: str,
) -> None:  # fmt: skip
    config = make_config()
    layer, rope = make_layer(config).to(dtype), make_rope(config)
    sequences = [make_sequence(CONTEXT + 3 * STEPS[kind], seed) for seed in (1, 2)]
    counter = CompileCounterWithBackend(backend)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    expected, got = (
        _serve(make_engine(config, dtype=dtype, speculative_rows=4), layer, called, rope, rows, sequences, STEPS[kind])
        for called in (layer, compiled)
    )
    assert counter.frame_count == 1
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))


@torch.no_grad()
def test_compiled_layer_takes_new_plans_without_compiling_again(
    make_config: Any, make_layer: Any, make_rope: Any, make_engine: Any, make_sequence: Any, rows: Any
) -> None:
    """A fresh plan of the same shapes and bounds is as good as a refilled one: nothing in the graph names a plan."""
    config = make_config()
    layer, rope, engine = make_layer(config), make_rope(config), make_engine(config)
    hidden, positions = make_sequence(CONTEXT + 4)
    counter = CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    engine.step(layer, rope, [rows("a", hidden[:CONTEXT], positions[:, :CONTEXT])])
    for token in range(CONTEXT, CONTEXT + 4):
        piece = slice(token, token + 1)
        plan = _refilled(engine, [rows("a", hidden[piece], positions[:, piece])], None)
        compiled(hidden[piece], positions[:, piece], rope, engine.caches[0], plan)
    assert counter.frame_count == 1


@torch.no_grad()
def test_compiled_layer_reuses_a_selection(
    make_config: Any, make_layer: Any, make_rope: Any, make_engine: Any, make_sequence: Any, rows: Any
) -> None:
    config = make_config()
    layer, rope = make_layer(config), make_rope(config)
    hidden, positions = make_sequence(CONTEXT + 3)
    torch.compiler.reset()
    outputs = []
    for called in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        engine = make_engine(config, speculative_rows=4)
        _, selection = engine.step(layer, rope, [rows("a", hidden[:CONTEXT], positions[:, :CONTEXT])])
        last = selection.take(torch.tensor([CONTEXT - 1]))
        for token in range(CONTEXT, CONTEXT + 3):
            piece = rows("a", hidden[token : token + 1], positions[:, token : token + 1])
            (output,), used = engine.step(called, rope, [piece], selection=last)
            assert_bitwise_equal(used.block_ids, last.block_ids)
            outputs.append(output)
    for expected, got in zip(outputs[:3], outputs[3:], strict=True):
        assert_bitwise_equal(got, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, past a graph break
def test_gradients_are_refused_in_one_graph_and_right_outside_of_it(
    make_config: Any, make_layer: Any, make_rope: Any, make_engine: Any, make_sequence: Any, rows: Any
) -> None:
    """fullgraph=True says why it will not; without it the call breaks the graph and gradients are the eager ones."""
    config = make_config()
    layer, rope = make_layer(config), make_rope(config)
    hidden, positions = make_sequence(60)

    def gradients(called: Any) -> list[torch.Tensor]:
        engine = make_engine(config)
        cache = engine.caches[0]
        zeroed = {name: torch.zeros_like(getattr(cache, name)) for name in ("k_pages", "v_pages", "block_keys")}
        engine.caches[0] = dataclasses.replace(cache, **zeroed)
        layer.zero_grad()
        (output,), _ = engine.step(called, rope, [rows("a", hidden, positions)])
        output.square().sum().backward()
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        return [getattr(layer, name).weight.grad.clone() for name in names]

    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"no gradients in a graph. Call under torch.no_grad\(\)"):
        gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()
    for got, expected in zip(gradients(torch.compile(layer, backend="aot_eager")), gradients(layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert bool(expected.any())


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_layer_copies_no_cache(
    make_config: Any, make_layer: Any, make_rope: Any, make_engine: Any, make_sequence: Any, rows: Any
) -> None:
    """The generated code calls three operators, on the caches themselves, and allocates nothing of a cache's size."""
    config = make_config()
    layer, rope, engine = make_layer(config), make_rope(config), make_engine(config)
    hidden, positions = make_sequence(8)
    plan = engine.plan([rows("a", hidden, positions)])
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True)
    _, (code, *_) = run_and_get_code(compiled, hidden, positions, rope, engine.caches[0], plan)
    calls = [name for name in ("prepare", "select_blocks", "attend") if f"torch.ops.flashqsa.{name}.default(" in code]
    assert calls == ["prepare", "select_blocks", "attend"]
    pages, page_tokens = engine.caches[0].k_pages.shape[:2]
    allocations = [line for line in code.splitlines() if "empty_strided" in line and "= empty" in line]
    assert allocations
    assert not [line for line in allocations if f"({pages}, {page_tokens}" in line or f"({pages}, " in line]
