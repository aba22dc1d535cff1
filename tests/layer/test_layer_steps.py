"""However rows are cut into steps, caches and outputs are the same, to the bit where the projections are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.attention.tiles import TILE_ROWS
from flashqsa.testing import assert_bitwise_equal, assert_unchanged, oracles, snapshot, stream

LONG = 1000
CONTEXT = 300


@pytest.fixture
def config(make_config: Any) -> Any:
    return make_config()


@pytest.fixture
def layer(config: Any, make_layer: Any, row_by_row: Any) -> Any:
    return row_by_row(make_layer(config))


@pytest.fixture
def serve(config: Any, layer: Any, make_rope: Any, make_engine: Any, rows: Any) -> Any:
    """Runs one sequence in steps that end at given tokens, maybe beside decode rows of another request."""
    rope = make_rope(config)

    @torch.no_grad()
    def run(sequence: Any, ends: list[int], *, beside: Any = None, **options: Any) -> tuple[torch.Tensor, Any]:
        hidden, positions = sequence
        engine, outputs, start = make_engine(config, speculative_rows=16), [], 0
        if beside is not None:
            engine.step(layer, rope, [rows("other", beside[0][:50], beside[1][:, :50])], **options)
        for number, end in enumerate(ends):
            work = [rows("main", hidden[start:end], positions[:, start:end])]
            if beside is not None:
                row = slice(50 + number, 51 + number)
                work.insert(number % 2, rows("other", beside[0][row], beside[1][:, row]))
            out = engine.step(layer, rope, work, **options)[0]
            outputs.append(out[work.index(next(piece for piece in work if piece.name == "main"))])
            start = end
        return torch.cat(outputs), engine

    return run


def _assert_same_caches(engine: Any, expected: Any) -> None:
    assert_bitwise_equal(engine.block_keys("main"), expected.block_keys("main"), "block keys")
    for mine, theirs, label in zip(engine.ring("main"), expected.ring("main"), ("ring", "positions"), strict=True):
        assert_bitwise_equal(mine, theirs, label)


@pytest.fixture
def one_shot(serve: Any, make_sequence: Any) -> Any:
    return serve(make_sequence(LONG), [LONG], row_exact=True)


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 842, 843])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside decode rows"])
def test_fault_12_a_prefill_cut_anywhere_equals_one_shot(
    serve: Any, make_sequence: Any, one_shot: Any, cut: int, beside: bool
) -> None:
    other = make_sequence(60, 1) if beside else None
    out, engine = serve(make_sequence(LONG), [cut, LONG], beside=other, row_exact=True)
    assert_bitwise_equal(out, one_shot[0], "outputs")
    _assert_same_caches(engine, one_shot[1])


def test_fault_12_all_cuts_at_once(serve: Any, make_sequence: Any, one_shot: Any) -> None:
    ends = [1, 2, 3, 5, 842, 843, LONG]
    out, engine = serve(make_sequence(LONG), ends, beside=make_sequence(60, 1), row_exact=True)
    assert_bitwise_equal(out, one_shot[0], "outputs")
    _assert_same_caches(engine, one_shot[1])


def test_chunks_cut_at_tiles_have_the_bits_of_one_shot(serve: Any, make_sequence: Any) -> None:
    """Without row_exact too: a tile sees the rows that it sees in one shot."""
    expected, whole = serve(make_sequence(LONG), [LONG])
    ends = [3 * TILE_ROWS, 4 * TILE_ROWS, 11 * TILE_ROWS, LONG]
    out, engine = serve(make_sequence(LONG), ends, beside=make_sequence(60, 1))
    assert_bitwise_equal(out, expected, "outputs")
    _assert_same_caches(engine, whole)


@torch.no_grad()
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 13, 16])
def test_fault_36_windows_beyond_the_budget_equal_serial_decode(
    serve: Any, make_sequence: Any, config: Any, window: int, offset: int
) -> None:
    """Row i of a window is token i decoded alone, and sees the blocks that rows before it closed."""
    start = CONTEXT + offset
    assert start > 6 * config.budget_tokens
    sequence = make_sequence(start + window)
    serial, _ = serve(sequence, [start, *range(start + 1, start + window + 1)])
    together, engine = serve(sequence, [start, start + window], row_exact=True)
    assert_bitwise_equal(together[start:], serial[start:], "window")
    assert engine.block_keys("main").isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_fault_10_block_keys_after_windows_and_random_accepts(
    make_engine: Any, make_rope: Any, make_sequence: Any, rows: Any, config: Any, layer: Any, offset: int
) -> None:
    """Windows of 1 to 16 rows; some rows are rejected and other tokens take their place."""
    rope, generator, r = make_rope(config), stream(offset, 3), config.block_tokens
    hidden, positions = make_sequence(400)
    wrong, _ = make_sequence(400, 1)
    engine = make_engine(config, speculative_rows=16)
    accepted = 20 + offset
    engine.step(layer, rope, [rows("main", hidden[:accepted], positions[:, :accepted])])
    for window in [*range(1, 17), *range(16, 0, -1)]:
        good = int(torch.randint(1, window + 1, (), generator=generator))
        new = slice(accepted, accepted + window)
        draft = torch.cat([hidden[accepted : accepted + good], wrong[accepted + good : accepted + window]])
        engine.step(layer, rope, [rows("main", draft, positions[:, new])])
        accepted += good
        engine.rollback("main", accepted)
        raw = layer.indexer(hidden[:accepted])[:, -1]
        exact = oracles.pool_block_keys(
            raw, positions[:, :accepted], layer.indexer.k_layernorm.weight, config.norm_eps, rope.cos_sin,
            rope.mrope_section, r,
        )  # fmt: skip
        keys = engine.block_keys("main")
        assert keys.shape == exact.shape
        assert float((keys - exact).abs().max()) <= 8 * torch.finfo(keys.dtype).eps * float(exact.abs().max())
    fresh = make_engine(config, speculative_rows=16)
    fresh.step(layer, rope, [rows("main", hidden[:accepted], positions[:, :accepted])])
    _assert_same_caches(engine, fresh)


@torch.no_grad()
def test_fault_50_one_plan_serves_all_layers(
    make_engine: Any, make_rope: Any, make_sequence: Any, make_layer: Any, rows: Any, config: Any
) -> None:
    """Layers run one after the other on the plan that the first one got; none of them writes into it."""
    rope, (hidden, positions) = make_rope(config), make_sequence(150)
    layers = [make_layer(config, seed=seed, layer_id=seed) for seed in range(3)]
    together, alone = make_engine(config, layers=3), [make_engine(config) for _ in layers]
    start = 0
    for end in (120, 121, 122, 130, 150):
        work = [rows("main", hidden[start:end], positions[:, start:end])]
        plan = together.plan(work)
        before = snapshot(plan)
        x = work[0].hidden
        for layer_id, layer in enumerate(layers):
            expected = alone[layer_id].step(layer, rope, [rows("main", x, work[0].positions)])[0][0]
            out, _ = layer(x, work[0].positions, rope, together.caches[layer_id], plan)
            assert_bitwise_equal(out, expected, f"layer {layer_id}")
            x = x + out
        assert_unchanged(before)
        start = end
