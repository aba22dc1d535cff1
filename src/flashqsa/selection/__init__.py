"""Selection: index queries times block keys, exact top-K under one tie rule, and what is done with the result."""

from flashqsa.selection.api import select_blocks
from flashqsa.selection.expand import expand_tokens
from flashqsa.selection.merge import merge_selections

__all__ = ["expand_tokens", "merge_selections", "select_blocks"]
