"""Attention over the selected blocks and the tail."""

from flashqsa.attention.api import attend, attend_tokens
from flashqsa.attention.merge import merge_partials

__all__ = ["attend", "attend_tokens", "merge_partials"]
