"""Mode `shadow`: vLLM's operators serve, FlashQSA's run beside them on the same tensors for a number of steps.

What both made is compared and timed, then a table is logged and vLLM's operators alone go on. Preparation writes
caches, so ours comes first there, on slots whose contents are put back before vLLM's operator runs.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from flashqsa.checks import FP8
from flashqsa.errors import FlashQSAError

logger = logging.getLogger("vllm.flashqsa")

Operator = Callable[..., Any]
Arguments = dict[str, Any]


@dataclass
class Compared:
    """What the calls of one operator showed.

    Attributes:
        calls: Calls in which both ran.
        rows: Rows compared.
        differing_rows: Rows with other ids, or, of preparation, ring rows of other bytes.
        largest_error: Largest difference of two numbers; infinite where one alone is NaN.
        ours_us: Microseconds of each call of FlashQSA's operator.
        theirs_us: The same of vLLM's.
        refusals: What FlashQSA's raised, by message.
    """

    calls: int = 0
    rows: int = 0
    differing_rows: int = 0
    largest_error: float = 0.0
    ours_us: list[float] = field(default_factory=list)
    theirs_us: list[float] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)

    def add_numbers(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare two float tensors of one shape."""
        if ours.numel():
            a, b = ours.to(torch.float32), theirs.to(torch.float32)
            error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
            self.largest_error = max(self.largest_error, float(error.nan_to_num(nan=torch.inf).max()))

    def add_rows(self, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare two integer tensors [rows, ...] row by row."""
        self.differing_rows += int((ours != theirs).flatten(1).any(dim=1).sum())

    def line(self, name: str) -> str:
        """One line for people."""
        told = [f"{self.calls} calls", f"{self.rows} rows", f"{self.differing_rows} with other ids"]
        told.append(f"largest error {self.largest_error:.3g}")
        if self.ours_us:
            ours, theirs = statistics.median(self.ours_us), statistics.median(self.theirs_us)
            told.append(f"median {ours:,.1f} us, vLLM {theirs:,.1f} us")
        told += [f"refused {count} times: {message}" for message, count in self.refusals.items()]
        return f"{name}: {', '.join(told)}"


class Shadow:
    """Runs both for a number of steps.

    Args:
        steps: How many.
        current_step: Returns an object that is another one in every step.
    """

    def __init__(self, steps: int, current_step: Callable[[], object]) -> None:
        self.compared: dict[str, Compared] = {}
        self._left = steps
        self._current_step = current_step
        self._seen: object = self  # no step yet
        self._told = False
        self.captured_calls = 0

    def wrap(self, name: str, ours: Operator, theirs: Operator) -> Operator:
        """The operator that vLLM calls instead of its own.

        Args:
            name: vLLM's name of it.
            ours: FlashQSA's.
            theirs: vLLM's.
        """
        signature, compare = inspect.signature(ours), COMPARISONS[name]

        def shadowed(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on():
                return theirs(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            compared = self.compared.setdefault(name, Compared())
            return compare(compared, ours, theirs, bound.arguments)

        return shadowed

    def _is_on(self) -> bool:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.captured_calls += 1  # a captured graph holds vLLM's operators alone
            return False
        if self._left < 0:
            return False
        step = self._current_step()
        if step is not self._seen:
            self._seen = step
            self._left -= 1
        if self._left < 0:
            self.tell()
        return self._left >= 0

    def tell(self) -> None:
        """Log the table, once."""
        if self._told or not (self.compared or self.captured_calls):
            return
        self._told = True
        for name, compared in self.compared.items():
            logger.info("FlashQSA in the shadow of %s.", compared.line(name))
        if self.captured_calls:
            logger.info(
                "FlashQSA left out %d calls captured in CUDA graphs: run with enforce_eager to compare all.",
                self.captured_calls,
            )

    def tell_at_exit(self) -> None:
        """Log the table when the process ends before all steps were made."""
        atexit.register(self.tell)


def _timed(times: list[float], device: torch.device, call: Callable[[], Any]) -> Any:
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
        return result
    started = time.perf_counter()
    result = call()
    times.append((time.perf_counter() - started) * 1e6)
    return result


def _run_ours(compared: Compared, ours: Operator, device: torch.device, arguments: Arguments) -> tuple[Any, bool]:
    """Our result, and whether there is one: what ours refuses is told in the table, and vLLM serves."""
    try:
        return _timed(compared.ours_us, device, lambda: ours(**arguments)), True
    except FlashQSAError as error:
        message = str(error)
        compared.refusals[message] = compared.refusals.get(message, 0) + 1
        return None, False


def _run_theirs(compared: Compared, theirs: Operator, device: torch.device, arguments: Arguments, ran: bool) -> Any:
    compared.calls += ran
    return _timed(compared.theirs_us if ran else [], device, lambda: theirs(**arguments))


def _rows_at(cache: torch.Tensor, slot_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache [pages, page, heads, width] whose float8 is bytes, and page and place of each slot that is written."""
    live = slot_ids[(slot_ids >= 0) & (slot_ids < cache.shape[0] * cache.shape[1])]
    held = cache.view(torch.uint8) if cache.dtype == FP8 else cache
    return held, live // cache.shape[1], live % cache.shape[1]


class _Written:
    """Rows of a cache before and after our operator; `put_back` undoes it."""

    def __init__(self, cache: torch.Tensor, slot_ids: torch.Tensor) -> None:
        self.cache, self.pages, self.places = _rows_at(cache, slot_ids)
        self.dtype = cache.dtype
        self.before = self.cache[self.pages, self.places]
        self.ours = self.before

    def put_back(self) -> None:
        self.ours = self.cache[self.pages, self.places]
        self.cache[self.pages, self.places] = self.before

    def numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What ours wrote, and what is there now."""
        return self.ours.view(self.dtype), self.cache[self.pages, self.places].view(self.dtype)

    def bytes(self) -> tuple[torch.Tensor, torch.Tensor]:
        ours, theirs = self.numbers()
        return ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)


def _compare_prepare(compared: Compared, ours: Operator, theirs: Operator, arguments: Arguments) -> Any:
    caches = ("main_kv_cache", "main_slot_mapping"), ("compressed_cache", "compressed_slots")
    written = [_Written(arguments[cache], arguments[slots]) for cache, slots in caches]
    ring = _Written(arguments["state_cache"], arguments["state_slots"])
    index_q, device = torch.empty_like(arguments["q_out"]), arguments["q"].device
    try:
        made, ran = _run_ours(compared, ours, device, arguments | {"q_out": index_q})
    finally:
        for part in (*written, ring):
            part.put_back()
    result = _run_theirs(compared, theirs, device, arguments, ran)
    if ran:
        live = arguments["logical_positions"][: index_q.shape[0]] >= 0
        compared.rows += int(live.sum())
        compared.add_numbers(index_q[live], arguments["q_out"][live])
        for our_rows, their_rows in zip(made, result, strict=True):
            compared.add_numbers(our_rows[live], their_rows[live])
        for part in written:
            compared.add_numbers(*part.numbers())
        compared.add_rows(*ring.bytes())
    return result


def _compare_select(compared: Compared, ours: Operator, theirs: Operator, arguments: Arguments) -> None:
    out, device = arguments["block_indices"], arguments["q"].device
    ids = torch.empty_like(out)
    _, ran = _run_ours(compared, ours, device, arguments | {"block_indices": ids})
    _run_theirs(compared, theirs, device, arguments, ran)
    if ran:
        columns = torch.arange(out.shape[1], device=device)[None]
        unused = columns >= arguments["visible_blocks"][:, None]
        compared.rows += out.shape[0]
        compared.add_rows(*(part.masked_fill(unused, -1).sort(dim=1).values for part in (ids, out)))


def _compare_expand(compared: Compared, ours: Operator, theirs: Operator, arguments: Arguments) -> None:
    out, device = arguments["out"], arguments["block_indices"].device
    tokens = torch.empty_like(out)
    _, ran = _run_ours(compared, ours, device, arguments | {"out": tokens})
    _run_theirs(compared, theirs, device, arguments, ran)
    if ran:
        compared.rows += out.shape[0]
        compared.add_rows(tokens, out)


def _compare_attention(compared: Compared, ours: Operator, theirs: Operator, arguments: Arguments) -> Any:
    device = arguments["q"].device
    made, ran = _run_ours(compared, ours, device, arguments | {"out": None})
    result = _run_theirs(compared, theirs, device, arguments, ran)
    if ran:
        compared.rows += made.shape[0]
        compared.add_numbers(made, result)
    return result


def _compare_store(compared: Compared, ours: Operator, theirs: Operator, arguments: Arguments) -> None:
    written, device = _Written(arguments["cache"], arguments["slot_mapping"]), arguments["cache"].device
    try:
        _, ran = _run_ours(compared, ours, device, arguments)
    finally:
        written.put_back()
    _run_theirs(compared, theirs, device, arguments, ran)
    if ran:
        compared.rows += arguments["slot_mapping"].shape[0]
        compared.add_rows(*written.bytes())


def _compare_compress(compared: Compared, ours: Operator, theirs: Operator, arguments: Arguments) -> Any:
    device = arguments["raw_keys"].device
    made, ran = _run_ours(compared, ours, device, arguments)
    result = _run_theirs(compared, theirs, device, arguments, ran)
    if ran:
        closes = arguments["compressed_slots"] >= 0
        compared.rows += int(closes.sum())
        compared.add_numbers(made[0][closes], result[0][closes])
        compared.add_rows(made[1][closes], result[1][closes])
    return result


COMPARISONS: dict[str, Callable[[Compared, Operator, Operator, Arguments], Any]] = {
    "qsa_prepare": _compare_prepare,
    "qsa_select_paged_decode": _compare_select,
    "qsa_select_paged_prefill": _compare_select,
    "expand_qsa_block_indices": _compare_expand,
    "qsa_sparse_paged_attention": _compare_attention,
    "qsa_store_cache_rows": _compare_store,
    "qsa_compress_groups_with_ratio": _compare_compress,
}
