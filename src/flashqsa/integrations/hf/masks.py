"""In place of an attention mask: the step as a plan, made once a forward and shared by all layers.

transformers asks its mask interface for a [B, 1, Q, KV] mask. Under the name registered here it gets an `HFStep`
instead, of a size that grows with the rows, never with rows times context.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NoReturn

import torch

from flashqsa.config import QSAConfig
from flashqsa.errors import FlashQSAError, UnsupportedError
from flashqsa.plan import StepPlan, plan_step

MASK_NAME = "flashqsa"

PAGE_BLOCKS = 64
"""Blocks of a page: contexts get whole pages, so that kernels address all of them alike."""

LARGEST_SHARE = 8
"""A context gets at most one page, or one part in so many, more than it needs."""

_forwards = itertools.count()


class PlaceError(FlashQSAError, IndexError):
    """A token has no place in a cache or in a table; transformers raises IndexError there as well."""


@dataclass(frozen=True)
class HFStep:
    """One forward of the model.

    Attributes:
        plan: The step; rows are [B, Q] flattened, caches are contiguous per batch row.
        starts: [B] first visible token of each batch row, where its blocks are counted from.
        ends: [B] one past the last visible token of each batch row.
        kv_tokens: Key columns of the K and V that layers will hand over.
        block_capacity: Blocks that each batch row's pooled keys have room for.
        forward_id: Number of the forward in this process; the same on every device and with every budget.
    """

    plan: StepPlan
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    kv_tokens: int
    block_capacity: int
    forward_id: int = field(default_factory=lambda: next(_forwards))
    _variants: dict[Any, HFStep] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def grows_everywhere(self) -> bool:
        """Whether the last column is a token of every batch row."""
        return all(start < self.kv_tokens == end for start, end in zip(self.starts, self.ends, strict=True))

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> HFStep:
        """The same step on another device, copied once: the layers of a model may be spread over several.

        Args:
            device: Where a layer runs.
            non_blocking: As accelerate passes it; a plan is needed at once.
        """
        if device == self.plan.device:
            return self
        device = torch.empty(0, device=device).device  # "cuda" becomes the one that it stands for
        if device == self.plan.device:
            return self
        named = {f.name: getattr(self.plan, f.name) for f in fields(self.plan) if f.init}
        return self._variant(
            (device, self.plan.topk_blocks),
            lambda: {name: x.to(device) for name, x in named.items() if isinstance(x, torch.Tensor)},
        )

    def with_budget(self, topk_blocks: int) -> HFStep:
        """The same step with another number of blocks that a row selects at most, made once.

        Args:
            topk_blocks: That number.
        """
        if topk_blocks == self.plan.topk_blocks:
            return self
        return self._variant((self.plan.device, topk_blocks), lambda: {"topk_blocks": topk_blocks})

    def with_columns(self, kv_tokens: int) -> HFStep:
        """The same step over K and V with another number of columns, made once.

        Args:
            kv_tokens: That number, at least the tokens after this forward.
        """
        if kv_tokens == self.kv_tokens or len(self.starts) == 1:  # one batch row begins where it does
            return self

        def changes() -> dict[str, Any]:
            plan = self.plan
            assert plan.first_slots is not None
            assert plan.first_block_slots is not None
            further = plan.first_block_slots // self.block_capacity * (kv_tokens - self.kv_tokens)
            slot_ids = plan.slot_ids + further[plan.request_ids.clamp(min=0).to(torch.int64)]
            return {
                "first_slots": plan.first_slots + further,
                "slot_ids": torch.where(plan.slot_ids < 0, plan.slot_ids, slot_ids),
            }

        return self._variant(("columns", kv_tokens), changes, kv_tokens=kv_tokens)

    def _variant(self, key: Any, changes: Callable[[], dict[str, Any]], **own: Any) -> HFStep:
        if key not in self._variants:
            self._variants[key] = replace(self, plan=replace(self.plan, **changes()), _variants={}, **own)
        return self._variants[key]

    @property
    def dtype(self) -> NoReturn:
        """What transformers' own layer asks its mask for: it got a step because its model's config is an enabled one.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "flashqsa: every QSA layer that shares an enabled config must run on FlashQSA, got one with the forward of "
            "transformers. Call enable on this model too: it has the config of another one, or hooks hide its class; "
            "and disable after the backward pass, where checkpointing runs layers again."
        )


def block_capacity(kv_tokens: int, block_tokens: int) -> int:
    """Blocks to allocate for a context: whole pages, in steps that grow with it, so that contexts seldom move."""
    pages = max(1, -(-kv_tokens // (PAGE_BLOCKS * block_tokens)))
    step = max(1, (1 << (pages.bit_length() - 1)) // LARGEST_SHARE)
    return -(-pages // step) * step * PAGE_BLOCKS


@torch.compiler.disable  # type: ignore[untyped-decorator]
def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    device: torch.device | None = None,
    **_: Any,
) -> HFStep:
    """The mask interface of transformers, returning a step.

    Args:
        batch_size: Batch rows (`B`).
        q_length: New tokens of each batch row (`Q`), padding included.
        kv_length: Tokens of the caches after this forward.
        q_offset: Tokens in the caches before it.
        kv_offset: Always 0 for these models.
        mask_function: Which keys a query sees; only plain causality is served.
        attention_mask: [B, >= tokens] bool, False for padding; or None.
        config: Text config of the model.
        device: Where the step runs.

    Raises:
        UnsupportedError: Packed sequences or other mask functions, and masks with holes.
        PlaceError: The cache is too small.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is not causal_mask_function or kv_offset:
        raise UnsupportedError(
            "flashqsa: the attention mask must be causal with padding at most, got a custom mask function (packed "
            "sequences have one). Pass one sequence a batch row, or disable FlashQSA for this call."
        )
    past = int(q_offset)
    total = past + q_length
    starts, ends = _visible_ranges(attention_mask, batch_size, past, total)
    if total > kv_length:
        raise PlaceError(
            f"flashqsa: max_cache_len must be at least the {total} tokens after this forward, got a static cache of "
            f"{kv_length}. Make a larger one."
        )
    qsa = _known_config(config)
    capacity = block_capacity(kv_length, qsa.block_tokens)
    plan = _plan_batch(starts, ends, past, total, kv_length, capacity, qsa, device or torch.device("cpu"))
    return HFStep(plan, starts, ends, kv_length, capacity)


_configs: dict[Any, tuple[Callable[[], Any], QSAConfig]] = {}
MOST_CONFIGS = 64


def _known_config(config: Any) -> QSAConfig:
    """What a model's config says, read anew only where the sizes that a step needs are others than before."""
    key = (id(config), getattr(config, "indexer_compress_ratio", None), getattr(config, "indexer_budget", None))
    known = _configs.get(key)
    if known is not None and known[0]() is config:
        return known[1]
    qsa = QSAConfig.from_pretrained_config(config)
    if len(_configs) >= MOST_CONFIGS:
        _configs.clear()
    _configs[key] = weakref.ref(config), qsa
    return qsa


def _visible_ranges(
    attention_mask: torch.Tensor | None, batch_size: int, past: int, total: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First visible token, and one past the last, of each batch row."""
    if attention_mask is None:
        return (0,) * batch_size, (total,) * batch_size
    visible = attention_mask[..., :total].to(torch.bool)
    if list(visible.shape) != [batch_size, total]:
        got = list(attention_mask.shape)
        raise UnsupportedError(
            f"flashqsa: attention_mask must be [B, tokens] = [{batch_size}, {total}], got {got}. "
            "Pass the mask of the whole sequence, cached tokens included."
        )
    counts, firsts = visible.sum(dim=1), visible.view(torch.int8).argmax(dim=1)
    runs = visible[:, 0] + (visible[:, 1:] > visible[:, :-1]).sum(dim=1)
    values = torch.stack([counts, firsts, runs]).tolist()  # read once
    starts, ends = [], []
    for row, (tokens, first, run) in enumerate(zip(*values, strict=True)):
        if run > 1:
            raise UnsupportedError(
                f"flashqsa: attention_mask must be padding on the left and right alone, got holes in batch row {row}. "
                "Remove the masked tokens from the sequence."
            )
        starts.append(first if tokens else total)
        ends.append(starts[-1] + tokens)
    return tuple(starts), tuple(ends)


def _plan_batch(
    starts: tuple[int, ...],
    ends: tuple[int, ...],
    past: int,
    total: int,
    kv_tokens: int,
    capacity: int,
    config: QSAConfig,
    device: torch.device,
) -> StepPlan:
    """Rows of padding before and after a sequence become padding requests (length 0) of their own."""
    query_starts, seq_lens, first_slots, first_block_slots = [0], [], [], []
    for batch_row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        live = range(max(start, past), max(min(end, total), max(start, past)))
        for rows, seq_len in ((live.start - past, 0), (len(live), end - start), (total - live.stop, 0)):
            if rows > 0:
                query_starts.append(query_starts[-1] + rows)
                seq_lens.append(seq_len)
                first_slots.append(batch_row * kv_tokens + start)
                first_block_slots.append(batch_row * capacity)
    numbers = [(query_starts, torch.int32), (seq_lens, torch.int32)]
    numbers += [(first_slots, torch.int64), (first_block_slots, torch.int64)]
    starts_there, lens_there, slots_there, block_slots_there = _on_device(numbers, device)
    return plan_step(
        starts_there,
        lens_there,
        None,
        page_tokens=None,
        block_tokens=config.block_tokens,
        topk_blocks=config.topk_blocks,
        max_query_len=total - past,
        max_seq_len=total,
        first_slots=slots_there,
        first_block_slots=block_slots_there,
        num_rows=query_starts[-1],
    )


def _on_device(numbers: list[tuple[list[int], torch.dtype]], device: torch.device) -> list[torch.Tensor]:
    """Lists as tensors; to a GPU in one copy from pinned memory, for which the host does not wait."""
    here = [torch.tensor(values, dtype=dtype) for values, dtype in numbers]
    if device.type != "cuda":
        return [x.to(device) for x in here]
    ends = list(itertools.accumulate(-(-x.nbytes // 16) * 16 for x in here))  # as kernels like to find them
    packed = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    places = [slice(end - -(-x.nbytes // 16) * 16, end - -(-x.nbytes // 16) * 16 + x.nbytes)
              for x, end in zip(here, ends, strict=True)]  # fmt: skip
    for x, place in zip(here, places, strict=True):
        packed[place] = x.view(torch.uint8)
    there = packed.to(device, non_blocking=True)
    return [there[place].view(x.dtype) for x, place in zip(here, places, strict=True)]
