"""The caches that a QSA layer keeps: main K/V, block keys, the ring of raw index keys and its positions."""

from flashqsa.cache.layout import CacheLayout, ring_capacity
from flashqsa.cache.state import LayerCache

__all__ = ["CacheLayout", "LayerCache", "ring_capacity"]
