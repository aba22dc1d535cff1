"""FlashQSA: Qwen Sparse Attention (qwen4_exp) for PyTorch."""

from flashqsa.attention import attend, attend_tokens, merge_partials
from flashqsa.backends import explain
from flashqsa.cache import CacheLayout, ExportedRequest, LayerCache, PagedPool, PoolFullError, Prefix, ring_capacity
from flashqsa.config import QSAConfig
from flashqsa.errors import FlashQSAError
from flashqsa.layer import QSAAttention, QSAIndexer
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import NormWeights, prepare
from flashqsa.recording import Recording, record
from flashqsa.results import Prepared, Selection
from flashqsa.rope import RopeTable
from flashqsa.selection import expand_tokens, merge_selections, select_blocks
from flashqsa.warming import WarmupReport, warmup

__version__ = "0.1.0"

__all__ = [
    "CacheLayout",
    "ExportedRequest",
    "FlashQSAError",
    "LayerCache",
    "NormWeights",
    "PagedPool",
    "PoolFullError",
    "Prefix",
    "Prepared",
    "QSAAttention",
    "QSAConfig",
    "QSAIndexer",
    "Recording",
    "RopeTable",
    "Selection",
    "StepPlan",
    "WarmupReport",
    "__version__",
    "attend",
    "attend_tokens",
    "expand_tokens",
    "explain",
    "merge_partials",
    "merge_selections",
    "plan_step",
    "prepare",
    "record",
    "ring_capacity",
    "select_blocks",
    "warmup",
]
