"""The names of vLLM that the plugin replaces or builds on, and the arguments that they must have."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PACKAGE = "vllm.models.qwen4_exp"


@dataclass(frozen=True)
class Seam:
    """One function or method of vLLM.

    Attributes:
        module: Name of its module.
        name: Its name there, with the class for a method.
        arguments: Names of its arguments in order; a star stands before those that are keyword-only.
    """

    module: str
    name: str
    arguments: tuple[str, ...]


def _seam(module: str, name: str, arguments: str) -> Seam:
    return Seam(module, name, tuple(arguments.split()))


OPERATORS = (
    _seam(
        f"{PACKAGE}.nvidia.indexer_qsa",
        "qsa_prepare",
        "q k positions cos_sin_cache q_norm_weight k_norm_weight eps q_out state_cache state_slots state_block_table "
        "query_start_loc logical_positions compressed_cache compressed_slots k_work_metadata * compress_ratio "
        "mrope_section rope_pos_offset main_qkv main_q_norm_weight main_k_norm_weight main_eps main_kv_cache "
        "main_slot_mapping main_k_scale main_v_scale",
    ),
    _seam(
        f"{PACKAGE}.nvidia.ops.qsa",
        "qsa_sparse_paged_attention",
        "q k_cache v_cache logical_indices block_table token_to_req use_prefill_config out k_scale v_scale * "
        "output_gate",
    ),
    _seam(f"{PACKAGE}.nvidia.ops.qsa", "qsa_store_cache_rows", "cache slot_mapping rows"),
    _seam(
        f"{PACKAGE}.nvidia.ops.qsa",
        "qsa_compress_groups_with_ratio",
        "raw_keys raw_positions compressor_state_cache compressor_state_block_table token_to_req query_start_loc "
        "logical_positions compressed_slots compress_ratio rope_cache",
    ),
    _seam(
        f"{PACKAGE}.nvidia.ops.qsa_indexer",
        "qsa_select_paged_decode",
        "q k_cache page_table visible_blocks token_topk compress_ratio decode_query_len block_indices",
    ),
    _seam(
        f"{PACKAGE}.nvidia.ops.qsa_indexer",
        "qsa_select_paged_prefill",
        "q k_cache page_table query_start_loc visible_blocks token_topk compress_ratio max_query_len block_indices "
        "max_seq_len",
    ),
    _seam(
        f"{PACKAGE}.nvidia.ops.qsa_indexer",
        "expand_qsa_block_indices",
        "block_indices query_positions visible_blocks compress_ratio token_topk out",
    ),
)

FORWARDS = (
    _seam(
        f"{PACKAGE}.nvidia.indexer_qsa",
        "QSAIndexer.forward",
        "self projected_qk positions out * attn qkv slot_mapping",
    ),
    _seam(
        f"{PACKAGE}.nvidia.qsa",
        "Qwen4ExpQSAFlashAttentionImpl.forward_qsa",
        "self layer query key value kv_cache attn_metadata output token_to_req use_prefill_config output_gate "
        "output_scale output_block_scale",
    ),
)

CPU = (
    _seam(f"{PACKAGE}.nvidia.qsa", "is_flash_attn_varlen_func_available", ""),
    _seam(
        f"{PACKAGE}.nvidia.qsa",
        "Qwen4ExpQSAAttention.__init__",
        "self * vllm_config config layer_id quant_config reduce_results prefix",
    ),
    _seam(
        "vllm.v1.attention.ops.metadata",
        "compute_token_to_req_indices",
        "query_start_loc out num_mapped_tokens num_tokens",
    ),
)

STREAMS = (
    _seam(f"{PACKAGE}.nvidia.hyperconnection", "grouped_gemma_rmsnorm", "x weight eps num_groups"),
    _seam(f"{PACKAGE}.nvidia.hyperconnection", "hc_silu", "x hc_count"),
    _seam(f"{PACKAGE}.nvidia.hyperconnection", "hc_gate_mix", "x gate hc_count"),
    _seam(f"{PACKAGE}.nvidia.hyperconnection", "hc_combine", "residual block_output injection_logits hc_count"),
    _seam(
        f"{PACKAGE}.nvidia.hyperconnection",
        "hc_combine_norm",
        "residual block_output injection_logits norm_weight eps hc_count",
    ),
)


@dataclass(frozen=True)
class Seams:
    """What one minor version of vLLM has.

    Attributes:
        operators: Replaced in modes `ops` and `shadow`.
        forwards: Replaced in mode `full`; empty where that mode does not fit the version.
        cpu: What its CPU build needs besides.
        streams: Triton kernels between the layers that its CPU build has no form of.
    """

    operators: tuple[Seam, ...]
    forwards: tuple[Seam, ...]
    cpu: tuple[Seam, ...]
    streams: tuple[Seam, ...]

    def used(self, mode: str, *, on_cpu: bool) -> tuple[Seam, ...]:
        """Those that a mode replaces."""
        return (
            *self.operators,
            *(self.forwards if mode == "full" else ()),
            *((*self.cpu, *self.streams) if on_cpu else ()),
        )


_NOW = Seams(OPERATORS, FORWARDS, CPU, STREAMS)
MANIFEST = {
    # Before preparation was one operator: the indexer returns ids alone, and vLLM's own kernels prepare.
    "0.31": Seams(OPERATORS[1:], (), (), ()),
    "0.32": _NOW,
    "0.33": _NOW,
}
"""By minor version, as read in the source of its wheels; of 0.32 the CPU build's too."""


def seams_of(version: str) -> Seams | None:
    """The seams of an installed vLLM; None where its minor version is not known."""
    return MANIFEST.get(".".join(version.split(".")[:2]))


def arguments_of(function: Any) -> tuple[str, ...]:
    """Names of a function's arguments, as `Seam` lists them."""
    names: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return tuple(names)


def differences(seams: Sequence[Seam]) -> list[str]:
    """What an installed vLLM has differently, one line each; nothing when every seam fits."""
    found = []
    for seam in seams:
        try:
            owner: Any = importlib.import_module(seam.module)
            for part in seam.name.split("."):
                owner = getattr(owner, part)
        except (ModuleNotFoundError, AttributeError):
            found.append(f"{seam.module}.{seam.name} is missing")
            continue
        arguments = arguments_of(owner)
        if arguments != seam.arguments:
            found.append(
                f"{seam.module}.{seam.name} takes ({', '.join(arguments)}) instead of ({', '.join(seam.arguments)})"
            )
    return found
