"""Pooled keys follow what transformers does to a cache: reordered, selected, repeated and offloaded with it.

The methods of transformers' indexed cache layers are wrapped while an enabled model uses one. Nothing depends on it
for correctness of what `pooled` sees by itself; it saves pooling the whole context again, and tells of writes that
torch does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet, finalize

import torch

from flashqsa.integrations.hf.pooled import ATTRIBUTE, UNWATCHED, PooledKeys

LAYERS = ("DynamicIndexedLayer", "StaticIndexedLayer")

_users: WeakSet[Any] = WeakSet()
_own_methods: dict[tuple[type, str], Callable[..., Any]] = {}


def _pick(state: PooledKeys, rows: torch.Tensor) -> None:
    """The batch rows of `rows`, in its order."""
    batch = len(state.counts)
    alike = len({*zip(state.counts, state.starts, strict=True)}) == 1
    picked = torch.arange(batch, device=rows.device)[rows]  # ids may be numbers, negative ones too, or a mask
    state.keys = state.keys[picked.to(state.keys.device)]
    ids = [0] * picked.shape[0] if alike else picked.tolist()  # nothing is read from the device without need
    state.counts, state.starts = [state.counts[i] for i in ids], tuple(state.starts[i] for i in ids)


def _repeat(state: PooledKeys, repeats: int) -> None:
    state.keys = state.keys.repeat_interleave(repeats, dim=0)
    state.counts = [count for count in state.counts for _ in range(repeats)]
    state.starts = tuple(start for start in state.starts for _ in range(repeats))


def _stay(state: PooledKeys) -> None:
    """Only the device changes."""


FOLLOWED: dict[str, Callable[..., None]] = {
    "reorder_cache": _pick,
    "batch_select_indices": _pick,
    "batch_repeat_interleave": _repeat,
    "offload": _stay,
    "prefetch": _stay,
}
OVERWRITTEN = ("update_indexer", "reset")
"""After these, what was pooled is given up; the forward that pools remembers it anew."""


def follow_caches(user: Any) -> None:
    """Wrap the cache layers' methods while `user`, an attention, is in use and enabled."""
    if user in _users:
        return
    _users.add(user)
    finalize(user, _give_back_unless_used).atexit = False  # a model may go without being disabled
    if _own_methods:
        return
    from transformers import cache_utils

    for layer_class in (getattr(cache_utils, name) for name in LAYERS if hasattr(cache_utils, name)):
        for name in (*FOLLOWED, *OVERWRITTEN):
            if name in vars(layer_class):
                theirs = vars(layer_class)[name]
                _own_methods[layer_class, name] = theirs
                setattr(layer_class, name, _wrapped(theirs, FOLLOWED.get(name)))


def unfollow_caches(user: Any) -> None:
    """Give the methods back when nobody uses them any longer."""
    _users.discard(user)
    _give_back_unless_used()


def _give_back_unless_used() -> None:
    if any(True for _ in _users) or not _own_methods:  # a set of weak references counts some that are gone
        return
    for (layer_class, name), theirs in _own_methods.items():
        setattr(layer_class, name, theirs)
    _own_methods.clear()
    UNWATCHED.times += 1


def users() -> list[Any]:
    """The attentions that caches are followed for."""
    return list(_users)


def _wrapped(theirs: Callable[..., Any], follow: Callable[..., None] | None) -> Callable[..., Any]:
    """A cache layer's method, and then what it means for pooled keys."""

    @wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, ATTRIBUTE):
            return theirs(self, *args, **kwargs)
        state: PooledKeys = getattr(self, ATTRIBUTE)
        belongs = follow is not None and state.belongs_to(self.indexer_keys)
        delattr(self, ATTRIBUTE)  # whatever happens to the keys, nothing stale stays
        result = theirs(self, *args, **kwargs)
        if follow is not None and belongs and isinstance(self.indexer_keys, torch.Tensor):
            follow(state, *args, *kwargs.values())
            state.keys = state.keys.to(self.indexer_keys.device, non_blocking=True)
            state.bind(self.indexer_keys)
            setattr(self, ATTRIBUTE, state)
        return result

    return method
