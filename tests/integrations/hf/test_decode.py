"""However a sequence is cut into forwards, it is the same sequence: decode, chunks and one shot agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget

PADS = (0, 1, 3, 5)

on_both_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
pytestmark = pytest.mark.filterwarnings("ignore:.*backend 'torch' serves")  # said on a GPU for shapes this small


def _in_pieces(model: Any, tokens: torch.Tensor, ends: list[int], mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of all tokens, from one forward a piece over one cache."""
    cache, start, logits = None, 0, []
    for end in ends:
        piece = model(
            tokens[:, start:end],
            attention_mask=None if mask is None else mask[:, :end],
            cache=cache,
            use_cache=True,
        )
        cache, start = piece.cache, end
        logits.append(piece.logits)
    assert start == tokens.shape[1]
    return torch.cat(logits, dim=1)


@pytest.fixture
def assert_pieces_agree(make_model: Any, watch: Any, join: Any, assert_same_sets: Any, exactly: Any) -> Any:
    @torch.no_grad()
    def check(model: Any, tokens: torch.Tensor, ends: list[int], mask: torch.Tensor | None = None) -> None:
        with hf.enabled(model):
            with watch() as whole:
                expected = model(tokens, attention_mask=mask, use_cache=False).logits
            with watch() as pieces:
                logits = _in_pieces(model, tokens, ends, mask)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        left_out = assert_same_sets(join(pieces), join(whole), real)
        assert left_out <= sum(s.close.numel() for s in whole) // 200
        with exactly(model) as exact:
            exact_logits = exact(tokens, attention_mask=mask, use_cache=False).logits
        assert_within_budget(logits[real], expected[real], exact_logits[real])

    return check


def test_600_tokens_one_by_one_equal_one_forward(
    make_model: Any, qsa_case: Any, make_tokens: Any, assert_pieces_agree: Any
) -> None:
    model = make_model(qsa_case, indexer_budget=64)
    assert_pieces_agree(model, make_tokens(1, 600), list(range(1, 601)))


@on_both_devices
@pytest.mark.slow
def test_fault_7_2500_tokens_one_by_one_equal_one_forward(
    make_model: Any, qsa_case: Any, make_tokens: Any, assert_pieces_agree: Any, device: str
) -> None:
    """Also across the sizes at which the pooled keys move to a larger buffer."""
    model = make_model(qsa_case, num_hidden_layers=1, layer_types=["full_attention"], indexer_budget=128)
    assert_pieces_agree(model.to(device), make_tokens(1, 2500).to(device), list(range(1, 2501)))


def test_decode_equals_one_forward_beside_recurrent_layers(
    make_model: Any, small_case: Any, make_tokens: Any, assert_pieces_agree: Any
) -> None:
    assert_pieces_agree(make_model(small_case), make_tokens(2, 150), [101, *range(102, 151)])


@pytest.mark.parametrize("ends", [[97, 100, 101, 260], [1, 2, 5, 255, 260], [63, 127, 191, 260], [259, 260]], ids=str)
def test_chunks_at_odd_cuts_equal_one_shot(
    make_model: Any, qsa_case: Any, make_tokens: Any, assert_pieces_agree: Any, ends: list[int]
) -> None:
    assert_pieces_agree(make_model(qsa_case), make_tokens(2, 260), ends)


@on_both_devices
@pytest.mark.parametrize("form", [torch.bool, torch.int64, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("pad", PADS)
def test_fault_7_mask_forms_and_left_padding(
    make_model: Any, qsa_case: Any, make_tokens: Any, assert_pieces_agree: Any, form: torch.dtype, pad: int, device: str
) -> None:
    tokens = make_tokens(2, 120).to(device)
    mask = torch.ones_like(tokens, dtype=form)
    mask[0, :pad] = 0
    assert_pieces_agree(make_model(qsa_case).to(device), tokens, [90, *range(91, 121)], mask)


@on_both_devices
def test_fault_7_without_a_mask(
    make_model: Any, qsa_case: Any, make_tokens: Any, assert_pieces_agree: Any, device: str
) -> None:
    assert_pieces_agree(make_model(qsa_case).to(device), make_tokens(2, 120).to(device), [90, *range(91, 121)])


@torch.no_grad()
@pytest.mark.parametrize("contexts", [(65, 1), (1, 63, 130), (63, 65, 1, 280, 2, 129, 4)], ids=str)
def test_fault_25_ragged_batches_equal_single_runs(
    make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, exactly: Any, contexts: tuple[int, ...]
) -> None:
    """Each row of a left-padded batch, prefilled and decoded, is what it is alone."""
    model, new, longest = make_model(qsa_case), 6, max(contexts)
    tokens = make_tokens(len(contexts), longest + new)
    pads = torch.tensor([longest - n for n in contexts])
    mask = torch.arange(longest + new)[None] >= pads[:, None]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with hf.enabled(model):
        out = model(tokens[:, :longest], attention_mask=mask[:, :longest], position_ids=positions[:, :longest])
        logits = [out.logits]
        for end in range(longest + 1, longest + new + 1):
            step = slice(end - 1, end)
            out = model(tokens[:, step], attention_mask=mask[:, :end], position_ids=positions[:, step], cache=out.cache)
            logits.append(out.logits)
        batch = torch.cat(logits, dim=1)
        for row, pad in enumerate(pads.tolist()):
            with watch() as alone:
                expected = model(tokens[row : row + 1, pad:]).logits
            with exactly(model) as exact:
                exact_logits = exact(tokens[row : row + 1, pad:]).logits
            assert not any(bool(s.close.any()) for s in alone), "choose tokens without rounding ties"
            assert_within_budget(batch[row : row + 1, pad:], expected, exact_logits, f"row {row}")


@torch.no_grad()
@pytest.mark.parametrize("length", [5, 9, 300])
@pytest.mark.parametrize("pad", [0, 1, 3, 4, 7])
def test_fault_27_blocks_count_from_the_first_real_token(
    make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, assert_same_sets: Any, pad: int, length: int
) -> None:
    model, tokens = make_model(qsa_case), make_tokens(1, length)
    padded = torch.nn.functional.pad(tokens, (pad, 0), value=model.config.pad_token_id)
    mask = (torch.arange(pad + length) >= pad)[None]
    with watch() as stock:
        model(padded, attention_mask=mask)
    with hf.enabled(model):
        with watch() as ours:
            model(padded, attention_mask=mask)
        with watch() as alone:
            model(tokens)
    assert_same_sets(ours, stock, mask)
    for with_pad, without in zip(ours, alone, strict=True):
        assert not bool(with_pad.tokens[..., :pad].any()), "padding is never attended"
        real, position = with_pad.tokens[0, pad:, pad:], torch.arange(length)
        in_open_block, dense = (position + 1) % 4 != 0, position + 1 <= model.config.indexer_budget
        assert bool(real.diagonal()[in_open_block | dense].all()), "the tail reaches up to the row itself"
        same = (real == without.tokens[0]).all(dim=1) | with_pad.close[0, pad:] | without.close[0]
        assert bool(same.all()), "padding must not move the blocks"


@torch.no_grad()
def test_right_padding(
    make_model: Any, small_case: Any, make_tokens: Any, watch: Any, assert_same_sets: Any, exactly: Any
) -> None:
    model, tokens = make_model(small_case), make_tokens(4, 140)
    first, end = torch.tensor([0, 0, 5, 140]), torch.tensor([140, 97, 138, 140])
    column = torch.arange(140)[None]
    mask = (column >= first[:, None]) & (column < end[:, None])
    mask[3] = False
    mask[3, -1] = True
    with watch() as stock:
        expected = model(tokens, attention_mask=mask).logits[mask]
    with hf.enabled(model), watch() as ours:
        logits = model(tokens, attention_mask=mask).logits[mask]
    assert_same_sets(ours, stock, mask)
    with exactly(model) as exact:
        assert_within_budget(logits, expected, exact(tokens, attention_mask=mask).logits[mask])
