"""Small qwen4_exp models, transformers' own forward as the oracle, and what each QSA layer selected."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flashqsa.commands.tiny_weights import draw_weight
from flashqsa.integrations import hf
from flashqsa.integrations.hf import forward as seam
from flashqsa.results import Selection
from flashqsa.testing import stream, tiny_config

try:
    import transformers
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling
except ImportError:  # the extra is not installed
    collect_ignore_glob = ["test_*.py"]


def _speak_as_later_versions() -> None:
    """Earlier ones call the cache `past_key_values`; tests say `cache`."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

    for name in ("Qwen4ExpForCausalLM", "Qwen4ExpTextModel"):
        owner = getattr(modeling, name)
        theirs = owner.forward

        def forward(self: Any, *args: Any, theirs: Any = theirs, **kwargs: Any) -> Any:
            if "cache" in kwargs:
                kwargs["past_key_values"] = kwargs.pop("cache")
            return theirs(self, *args, **kwargs)

        owner.forward = functools.wraps(theirs)(forward)
    for output in (MoeCausalLMOutputWithPast, MoeModelOutputWithPast):
        output.cache = property(lambda self: self.past_key_values)
    transformers.PreTrainedModel.activation_checkpointing_enable = (
        transformers.PreTrainedModel.gradient_checkpointing_enable
    )


if "modeling" in globals() and "cache" not in inspect.signature(modeling.Qwen4ExpForCausalLM.forward).parameters:
    _speak_as_later_versions()

CLOSE = 1e-5
"""Share of a row's largest score within which its K-th and next score count as tied by rounding."""

LINEAR, QSA = "linear_attention", "full_attention"  # as checkpoints say; each version has its own name
PAD_ID, EOS_ID, BYTES = 301, 300, 256


@dataclass(frozen=True)
class ModelCase:
    """Shape of one small model, and the prompt that its tests use."""

    name: str
    ratio: int
    budget: int
    index: tuple[int, int]
    """Index heads and their dimension."""
    heads: tuple[int, int, int]
    """Query heads, KV heads and their dimension."""
    rotary: float
    section: tuple[int, int, int]
    prompt: int
    layers: tuple[str, ...] = (LINEAR, QSA)
    ngram: bool = False
    bias: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def config(self, **overrides: Any) -> Any:
        fields: dict[str, Any] = tiny_config(
            vocab_size=320,
            hidden_size=96,
            num_hidden_layers=len(self.layers),
            layer_types=list(self.layers),
            num_attention_heads=self.heads[0],
            num_key_value_heads=self.heads[1],
            head_dim=self.heads[2],
            attention_bias=self.bias,
            indexer_n_heads=self.index[0],
            indexer_head_dim=self.index[1],
            indexer_budget=self.budget,
            indexer_compress_ratio=self.ratio,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_value_heads=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            num_experts=4,
            hc_lowrank=8,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": self.rotary,
                "mrope_section": list(self.section),
                "mrope_interleaved": True,
            },
        )
        if self.ngram:
            fields |= {"ple_layer_ids": [1], "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 2}
        config = transformers.Qwen4ExpTextConfig(**fields | overrides)
        config._experts_implementation = "eager"  # the other one takes no float64
        return config


CASES = (
    ModelCase("released_ratios", 4, 44, (4, 32), (6, 2, 64), 0.25, (4, 2, 2), 320),
    ModelCase("one_index_head_ties_at_zero", 2, 180, (1, 32), (4, 1, 32), 0.5, (3, 3, 2), 300),
    ModelCase("blocks_of_8", 8, 56, (2, 64), (4, 2, 64), 0.25, (4, 2, 2), 500),
    ModelCase("eight_wide_index_heads", 4, 100, (8, 128), (8, 2, 128), 0.25, (6, 5, 5), 700),
    ModelCase("ngram_three_kv_heads", 2, 18, (3, 48), (6, 3, 48), 0.25, (2, 2, 2), 300, ngram=True),
    ModelCase("two_qsa_layers", 4, 52, (4, 32), (6, 2, 32), 0.5, (4, 2, 2), 360, layers=(LINEAR, QSA, LINEAR, QSA)),
    ModelCase(
        "three_qsa_layers_in_a_row", 4, 76, (2, 32), (4, 1, 64), 0.25, (3, 3, 2), 380, (LINEAR, QSA, QSA, QSA), True
    ),
    ModelCase("odd_index_dim", 8, 40, (5, 40), (5, 1, 40), 0.5, (4, 3, 3), 400),
    ModelCase("nine_heads_with_bias", 2, 42, (6, 96), (9, 3, 96), 0.25, (4, 4, 4), 350, bias=True),
    ModelCase("no_grouping_all_rotates", 4, 24, (2, 32), (2, 2, 32), 1.0, (6, 5, 5), 310),
    ModelCase(
        "ngram_two_qsa_layers_of_8", 8, 88, (8, 32), (12, 3, 32), 0.5, (4, 2, 2), 600, (LINEAR, QSA, LINEAR, QSA), True
    ),
    ModelCase("one_wide_index_head", 4, 120, (1, 128), (3, 1, 64), 0.25, (3, 3, 2), 450),
)
ONLY_QSA = ModelCase("only_qsa", 4, 36, (3, 32), (4, 2, 32), 0.5, (3, 3, 2), 260, (QSA, QSA))
"""No recurrent layer: rows depend on their own past alone, through what this library computes."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker("transformers")


@pytest.fixture(autouse=True)
def dense_masks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What transformers builds dense masks with raises for a model that runs on FlashQSA, unless `allowed` is set.

    While `inside` holds anything it raises for every model.
    """
    from transformers import AttentionMaskInterface, masking_utils

    guard = SimpleNamespace(allowed=False, inside=[])

    def refusing(name: str) -> Callable[..., Any]:
        dense = getattr(masking_utils, name)

        def mask(*args: Any, **kwargs: Any) -> Any:
            name_in_config = getattr(kwargs.get("config"), "_attn_implementation", None)
            on_flashqsa = hf.replacing.class_attributes or name_in_config == hf.masks.MASK_NAME
            refused = guard.inside or (on_flashqsa and not guard.allowed)
            assert not refused, f"{name} was called while FlashQSA was enabled"
            return dense(*args, **kwargs)

        return mask

    for key in ("sdpa", "eager"):
        mask = refusing(f"{key}_mask")
        monkeypatch.setattr(masking_utils, f"{key}_mask", mask)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, key, mask)
    return guard


@pytest.fixture
def cache_keeps_positions() -> None:
    """Skips versions that keep the position history beside the cache, where what is done to it does not reach."""
    from transformers.cache_utils import DynamicIndexedLayer

    if not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):
        pytest.skip(f"transformers {transformers.__version__} does not keep positions in the cache")


@pytest.fixture
def all_cases() -> tuple[ModelCase, ...]:
    return CASES


@pytest.fixture
def small_case() -> ModelCase:
    return CASES[0]


@pytest.fixture
def qsa_case() -> ModelCase:
    return ONLY_QSA


MakeModel = Callable[..., Any]


@pytest.fixture
def make_model() -> MakeModel:
    """Model of a case with weights that make attention decide something; on the library only once enabled."""

    def make(case: ModelCase, *, model_class: Any = None, **overrides: Any) -> Any:
        model = (model_class or transformers.Qwen4ExpForCausalLM)(case.config(**overrides)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(draw_weight(name, parameter.shape, case.seed))
        return model

    return make


@pytest.fixture
def make_tokens() -> Callable[..., torch.Tensor]:
    def make(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, BYTES, (batch, tokens), generator=stream(seed, 17))

    return make


@dataclass(frozen=True)
class Selected:
    """What one QSA layer let its rows attend in one forward.

    Attributes:
        layer_id: Index of the layer.
        tokens: [B, Q, KV] bool.
        close: [B, Q] bool, rows whose K-th and next score may be in the other order by rounding alone. Ties at zero are
            not among them: ReLU makes them exact.
        tied: [B, Q] bool, rows whose K-th and next score are equal.
    """

    layer_id: int
    tokens: torch.Tensor
    close: torch.Tensor
    tied: torch.Tensor

    @property
    def sparse_rows(self) -> int:
        """Rows that attend fewer tokens than there are columns up to them."""
        queries, columns = self.tokens.shape[1:]
        return int((self.tokens.sum(dim=-1) <= torch.arange(columns - queries, columns)).sum())


def _close_and_tied(best: torch.Tensor, last: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return torch.stack([(last - following < CLOSE * best) & (last != 0), last == following], dim=-1)


class _StableTopK(TorchFunctionMode):
    """`Tensor.topk` as a stable descending sort: of equal scores the lowest ids."""

    def __init__(self) -> None:
        self.ends: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        values, indices = scores.sort(dim=0, descending=True, stable=True)
        more = values.shape[0] > count
        nothing = torch.zeros(2, dtype=torch.bool)
        self.ends.append(_close_and_tied(values[0], values[count - 1], values[count]).cpu() if more else nothing)
        return SimpleNamespace(values=values[:count], indices=indices[:count])


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[list[Selected]]]:
    """Makes transformers the oracle, and gives a context that lists what each QSA layer selects, on either side."""
    hf.acceptance.accept(modeling)  # before anything is patched, and not to be listened to
    listening: list[list[Selected]] = []
    stock_forward, our_select = modeling.Qwen4ExpTextQSAIndexer.forward, seam.select_blocks

    def indexer_forward(
        self: Any, hidden: torch.Tensor, embeddings: Any, mask: torch.Tensor, cache: Any, **kwargs: Any
    ) -> Any:
        with _StableTopK() as stable:
            chosen = stock_forward(self, hidden, embeddings, mask, cache, **kwargs)
        visible = (mask if mask.dtype == torch.bool else mask == 0)[:, 0]
        ends = torch.zeros(*visible.shape[:2], 2, dtype=torch.bool)
        if stable.ends:
            ends[visible.sum(dim=-1).cpu() >= self.compress_ratio] = torch.stack(stable.ends)
        for records in listening:
            records.append(Selected(self.layer_idx, chosen[:, 0] & visible, *ends.unbind(-1)))
        return chosen

    def select_blocks(index_q: torch.Tensor, cache: Any, plan: Any, **kwargs: Any) -> Selection:
        selection = our_select(index_q, cache, plan, **kwargs)
        for records in listening:
            one_more = dataclasses.replace(plan, topk_blocks=plan.topk_blocks + 1)
            scores = our_select(index_q, cache, one_more, return_scores=True).scores
            records.append(_selected(selection, scores, cache, plan))
        return selection

    monkeypatch.setattr(modeling.Qwen4ExpTextQSAIndexer, "forward", indexer_forward)
    monkeypatch.setattr(seam, "select_blocks", select_blocks)

    @contextmanager
    def listen() -> Iterator[list[Selected]]:
        records: list[Selected] = []
        listening.append(records)
        yield records
        listening.remove(records)

    return listen


def _selected(selection: Selection, scores: torch.Tensor | None, cache: Any, plan: Any) -> Selected:
    """The token columns of a selection over request-contiguous caches."""
    assert scores is not None
    batch, columns = cache.k_pages.shape[:2]
    if plan.num_requests == 1:  # a cache that grew in place has its pages side by side
        batch, columns = 1, batch * columns
    rows, r = plan.num_rows, plan.block_tokens
    blocks, counts, visible = (x.cpu() for x in (selection.block_ids, selection.block_counts, selection.visible_blocks))
    request_ids, positions, first_slots = (x.cpu() for x in (plan.request_ids, plan.positions, plan.first_slots))
    live = request_ids >= 0
    starts = first_slots[request_ids.clamp(min=0).long()] % columns
    blocks = blocks.long()
    blocks[torch.arange(blocks.shape[1])[None] >= counts[:, None]] = columns
    tokens = (starts[:, None, None] + blocks[..., None] * r + torch.arange(r)).flatten(1).clamp(max=columns)
    chosen = torch.zeros(rows, columns + 1, dtype=torch.bool).scatter_(1, tokens, True)[:, :columns]
    column = torch.arange(columns)[None]
    tail_start = starts + visible * r
    chosen |= (column >= tail_start[:, None]) & (column <= (starts + positions)[:, None])
    chosen &= live[:, None]
    best = scores.cpu().sort(dim=1, descending=True).values
    more = (visible > plan.topk_blocks) & live
    ends = _close_and_tied(best[:, 0], best[:, -2], best[:, -1]) & more[:, None]
    return Selected(cache.layer_id, chosen.view(batch, -1, columns), *ends.view(batch, -1, 2).unbind(-1))


@pytest.fixture
def join() -> Callable[[list[Selected]], list[Selected]]:
    """Puts the rows of successive forwards over one cache below each other: one `Selected` a layer."""

    def joined(records: list[Selected]) -> list[Selected]:
        layers: dict[int, list[Selected]] = {}
        for record in records:
            layers.setdefault(record.layer_id, []).append(record)
        wide = max(record.tokens.shape[-1] for record in records)
        return [
            Selected(
                layer_id,
                torch.cat([torch.nn.functional.pad(s.tokens, (0, wide - s.tokens.shape[-1])) for s in rows], dim=1),
                torch.cat([s.close for s in rows], dim=1),
                torch.cat([s.tied for s in rows], dim=1),
            )
            for layer_id, rows in sorted(layers.items())
        ]

    return joined


Compare = Callable[..., int]


@pytest.fixture
def assert_same_sets() -> Compare:
    """Compares two lists of `Selected`, row by row; returns how many rows were left out as close."""

    def compare(ours: list[Selected], stock: list[Selected], real: torch.Tensor | None = None) -> int:
        """`real` [B, tokens] bool says which tokens are no padding; a forward's rows are the last of its columns."""
        assert [s.layer_id for s in ours] == [s.layer_id for s in stock]
        left_out = 0
        for mine, theirs in zip(ours, stock, strict=True):
            assert mine.tokens.shape == theirs.tokens.shape
            queries, columns = mine.tokens.shape[1:]
            live = torch.ones(mine.tokens.shape[0], columns, dtype=torch.bool)
            if real is not None:
                live[:, : real.shape[1]] = real[:, :columns]
            live = live[:, -queries:]
            close = mine.close | theirs.close
            left_out += int((close & live).sum())
            differs = (mine.tokens != theirs.tokens).any(dim=-1) & live & ~close
            assert not bool(differs.any()), (
                f"layer {mine.layer_id}: {int(differs.sum())} of {differs.numel()} rows differ, first "
                f"{differs.nonzero()[0].tolist()}"
            )
        return left_out

    return compare


class _Float64(TorchFunctionMode):
    """Whatever asks for fp32 gets float64, except while paused."""

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        return func(*args, **kwargs)


@pytest.fixture
def exactly() -> Callable[[Any], AbstractContextManager[Any]]:
    """A copy of a model, on transformers alone, in float64 except for the rotary tables: they stay what they were."""

    @contextmanager
    def in_float64(model: Any) -> Iterator[Any]:
        exact = hf.disable(copy.deepcopy(model)).double()
        mode = _Float64()
        rotary = next(module for module in exact.modules() if isinstance(module, modeling.Qwen4ExpTextRotaryEmbedding))
        rotary.register_forward_pre_hook(lambda *_: setattr(mode, "paused", True))
        rotary.register_forward_hook(lambda *_: setattr(mode, "paused", False))
        with mode:
            yield exact

    return in_float64
