"""`tiny_config`: a small `qwen4_exp_text` configuration that a CPU runs in seconds."""

from __future__ import annotations

from typing import Any


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Configuration of a small random text model, as a dict.

    It suits `QSAConfig.from_dict` and, as keyword arguments, transformers' `Qwen4ExpTextConfig`. Its fourth layer is
    QSA: 6/2 heads of 64, 4 index heads of 32, blocks of 4 tokens, a budget of 64; 16 dimensions rotate.

    Args:
        **overrides: Entries that replace or join these; None removes one.
    """
    config: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "indexed_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "output_gate_type": "silu",
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    config.update(overrides)
    return {name: value for name, value in config.items() if value is not None}
