"""vLLM on FlashQSA: a plugin that vLLM loads by itself in every process it starts."""

from flashqsa.integrations.vllm_plugin.counts import report
from flashqsa.integrations.vllm_plugin.registration import register

__all__ = ["register", "report"]
