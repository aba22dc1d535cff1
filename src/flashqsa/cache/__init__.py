"""The caches that a QSA layer keeps (K and V, block keys, the ring of raw index keys), and a pool that owns them."""

from flashqsa.cache.layout import CacheLayout, ring_capacity
from flashqsa.cache.pool import ExportedRequest, PagedPool, PoolFullError, PoolTensor, Prefix
from flashqsa.cache.state import LayerCache

__all__ = [
    "CacheLayout",
    "ExportedRequest",
    "LayerCache",
    "PagedPool",
    "PoolFullError",
    "PoolTensor",
    "Prefix",
    "ring_capacity",
]
