"""`PagedPool`: pages, rings and lengths of many requests, for engines without a cache manager of their own."""

from flashqsa.cache.pool.accounts import PoolFullError, Prefix
from flashqsa.cache.pool.exported import ExportedRequest
from flashqsa.cache.pool.memory import PoolTensor
from flashqsa.cache.pool.pool import PagedPool

__all__ = ["ExportedRequest", "PagedPool", "PoolFullError", "PoolTensor", "Prefix"]
