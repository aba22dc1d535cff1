"""`PagedPool`: the one owner of pages, rings and lengths, for engines without a cache manager of their own."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flashqsa.cache.layout import CacheLayout
from flashqsa.cache.pool import checking, handover
from flashqsa.cache.pool.accounts import Account, PoolAccounts, Taken
from flashqsa.cache.pool.exported import device_of, model_of, plain_model
from flashqsa.cache.pool.lifecycle import PoolLifecycle
from flashqsa.cache.pool.listing import summary_text
from flashqsa.cache.pool.memory import PoolMemory, PoolTensor, Scale, scales_of_layers
from flashqsa.cache.pool.steps import PlannedRequest, StepNumbers, expect_refillable, fill_plan, shape_of
from flashqsa.cache.state import LayerCache
from flashqsa.checks import expect_int, expect_type
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from flashqsa.cache.pool.exported import ExportedRequest
    from flashqsa.plan import StepPlan


class PagedPool(PoolLifecycle):
    """Caches of all layers, and who owns what in them.

    A request is named by any hashable value. It has pages for its tokens, some of them perhaps shared with others that
    have the same prefix, and a ring of its own. All lengths, page ids and ring ids are kept on the host; nothing is
    read back from the device. A page is written only by its one holder: a shared one is copied first.

    Calls that copy (`plan_step` of a request whose last page is shared, `open` with a prefix, `fork`, `export_request`)
    copy what has been written: make them after the layers of the last step were launched, on the same stream.

    A call that raises has changed nothing, and one that a signal stops has happened or not. Not for several threads at
    once. With ``FLASHQSA_DEBUG=1`` free memory is filled with NaN; rows that were planned but not written, and what was
    written to free pages and to full pages of others, are found (this waits for the device); and the accounts are
    checked after every call.

    Args:
        layout: Shapes and dtypes of one layer.
        topk_blocks: Blocks that a row selects at most.
        num_pages: Pages to allocate.
        num_rings: Requests that can be open at once.
        layer_ids: The model's QSA layers.
        k_scale: What stored float8 keys are multiplied by, one for all layers or one a layer; as in `LayerCache`.
        v_scale: The same for values.
        model: What decides the content of caches besides their shapes, any JSON value. A request is imported only from
            a pool with the same; None, in either pool, compares nothing.
        poison: Fill free memory with NaN, as ``FLASHQSA_DEBUG=1`` does, but without its checks, which wait for the
            device.
        device: Where the caches live, the CPU by default.

    Attributes:
        layout: As given.
        caches: A `LayerCache` for each layer, in order: hand them to the stages or to `QSAAttention`.
        layer_ids: As given.
        speculative_rows: How many rows a step may add and `rollback` take back again, whatever the length.

    Raises:
        ArgumentError: A number breaks a rule.
        DeviceError: There is no such device.
        torch.OutOfMemoryError: The device has not enough memory (RuntimeError on the CPU).
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        topk_blocks: int,
        num_pages: int,
        num_rings: int,
        layer_ids: Sequence[int],
        k_scale: Scale | Sequence[Scale] = None,
        v_scale: Scale | Sequence[Scale] = None,
        model: Any = None,
        poison: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        where = "PagedPool"
        expect_type(where, "layout", layout, CacheLayout, hint="CacheLayout.from_config makes one.")
        for name, value in (("topk_blocks", topk_blocks), ("num_pages", num_pages), ("num_rings", num_rings)):
            expect_int(where, name, value, least=1)
        expect_type(where, "layer_ids", layer_ids, Iterable, hint="Pass a list of layer numbers.")
        layer_ids = tuple(layer_ids)
        for layer_id in layer_ids:
            expect_int(where, "layer_ids", layer_id)
        self.layout, self.layer_ids = layout, tuple(int(layer_id) for layer_id in layer_ids)
        self.model = plain_model(where, model)
        if not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            raise ArgumentError(
                f"{where}: layer_ids must be at least one layer, each once, got {list(self.layer_ids)}. "
                "Pass qsa_layer_ids of the config."
            )
        layers = len(self.layer_ids)
        memory = PoolMemory(
            layout, layer_ids=self.layer_ids, num_pages=num_pages, num_rings=num_rings,
            device=device_of(where, device),
            k_scales=scales_of_layers(where, "k_scale", k_scale, layers),
            v_scales=scales_of_layers(where, "v_scale", v_scale, layers),
        )  # fmt: skip
        accounts = PoolAccounts(
            num_pages, num_rings, page_tokens=layout.page_tokens, block_tokens=layout.block_tokens,
            ring_tokens=layout.ring_tokens,
        )  # fmt: skip
        self.caches = memory.caches
        self._numbers = StepNumbers(layout.page_tokens, layout.block_tokens, layout.ring_tokens, int(topk_blocks),
                                    int(num_pages), self.caches[0].device)  # fmt: skip
        self.speculative_rows = layout.ring_tokens - layout.block_tokens
        super().__init__(memory, accounts, poison=poison)

    @classmethod
    def from_config(
        cls,
        config: QSAConfig,
        *,
        page_tokens: int,
        num_pages: int,
        num_rings: int,
        speculative_rows: int = 0,
        layer_ids: Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        k_scale: Scale | Sequence[Scale] = None,
        v_scale: Scale | Sequence[Scale] = None,
        poison: bool = False,
        device: torch.device | str = "cpu",
    ) -> PagedPool:
        """A pool for a checkpoint.

        Args:
            config: The checkpoint's constants.
            page_tokens: Tokens of a page, a multiple of the block size.
            num_pages: Pages to allocate.
            num_rings: Requests that can be open at once.
            speculative_rows: Draft rows that a step may add and take back.
            layer_ids: Layers to keep, `qsa_layer_ids` of the config by default.
            dtype: Model dtype.
            kv_dtype: Dtype of K and V, the model dtype by default.
            index_dtype: Dtype of block keys, the model dtype by default.
            k_scale: As in `PagedPool`.
            v_scale: As in `PagedPool`.
            poison: As in `PagedPool`.
            device: Where the caches live.

        Raises:
            ArgumentError, DTypeError: A number or a dtype breaks a rule.
        """
        expect_type("PagedPool.from_config", "config", config, QSAConfig)
        layout = CacheLayout.from_config(
            config, page_tokens=page_tokens, speculative_rows=speculative_rows, dtype=dtype, kv_dtype=kv_dtype,
            index_dtype=index_dtype,
        )  # fmt: skip
        return cls(
            layout, topk_blocks=config.topk_blocks, num_pages=num_pages, num_rings=num_rings,
            layer_ids=config.qsa_layer_ids if layer_ids is None else layer_ids, k_scale=k_scale, v_scale=v_scale,
            model=model_of(config), poison=poison, device=device,
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickled pool would have caches that are no longer views of its memory."""
        raise UnsupportedError(
            f"PagedPool: a pool must not be copied or pickled, got {self!r}. Export its requests, and import them into "
            "another pool."
        )

    def __repr__(self) -> str:
        used = self.num_pages - self.free_pages
        return f"PagedPool({len(self.requests)} requests, {used} of {self.num_pages} pages, {self._numbers.device})"

    def cache(self, layer_id: int) -> LayerCache:
        """Caches of one layer, by its id.

        Raises:
            ArgumentError: The pool does not keep that layer.
        """
        if layer_id not in self.layer_ids:
            raise ArgumentError(
                f"PagedPool.cache: layer_id must be one of {list(self.layer_ids)}, got {layer_id!r}. "
                "Name it when the pool is made."
            )
        return self.caches[self.layer_ids.index(layer_id)]

    def pages_needed(self, rows: Mapping[Any, int]) -> int:
        """Free pages that `plan_step` or `extend` would take for these rows; compare with `free_pages`.

        Raises:
            ArgumentError: A request is not open, or a count is none.
        """
        return self._accounts.pages_needed(self._work("PagedPool.pages_needed", rows))

    def extend(self, request: Hashable, rows: int) -> None:
        """Reserve pages for the next rows of a request, and copy those of them that are shared. No length changes.

        `plan_step` does so itself; this is for admission ahead of time.

        Args:
            request: The request.
            rows: How many rows.

        Raises:
            ArgumentError: It is not open.
            PoolFullError: There are too few free pages.
        """
        where = "PagedPool.extend"
        self._accounts.account(where, request)  # before it is a key
        work = self._work(where, {request: rows})
        chosen = self._accounts.choose(where, work)
        self._expect_unwritten(where, chosen)
        self._take(chosen)
        self._freed([], [])

    def plan_step(
        self,
        rows: Mapping[Any, int],
        *,
        num_requests: int | None = None,
        num_rows: int | None = None,
        table_pages: int | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        out: StepPlan | None = None,
    ) -> StepPlan:
        """Grow requests by the rows of a step, and plan it. Rows are packed in the order of `rows`.

        For a CUDA graph, make a plan with the largest shapes and bounds it will see, capture the layers with it, and
        refill it with ``out=`` before each replay: what a step leaves over is padding.

        Args:
            rows: New rows of each request that takes part; 0 is allowed.
            num_requests: Requests of the plan, padding included; as many as in `rows` by default.
            num_rows: Packed rows of the plan, padding included; as many as there are by default.
            table_pages: Columns of the page table; as many as the longest request needs by default.
            max_query_len: Bound on the rows of a request; the exact one by default.
            max_seq_len: Bound on lengths; the exact one by default.
            out: A plan that this pool made, to refill in place. It fixes shapes and bounds. When memory runs out
                meanwhile it may be half filled: refill it again before it runs.

        Returns:
            The plan, `out` itself when given.

        Raises:
            ArgumentError: A request is not open, a count is none, or the step does not fit the shapes.
            PoolFullError: There are too few free pages.
        """
        where, accounts = "PagedPool.plan_step", self._accounts
        work = self._work(where, rows)
        if out is not None:
            expect_refillable(where, out, self._numbers)
        columns = {account.request: accounts.pages_of(account.length + count) for account, count in work}
        sizes = {"num_requests": num_requests, "num_rows": num_rows, "table_pages": table_pages,
                 "max_query_len": max_query_len, "max_seq_len": max_seq_len}  # fmt: skip
        chosen = accounts.choose(where, work)
        pages = {account.request: array("i", account.page_ids) for account, _ in work}
        for taken in chosen:
            pages[taken.account.request][taken.column : taken.column + 1] = array("i", [taken.page_id])
        planned = [
            PlannedRequest(account.ring_id, count, account.length + count,
                           pages[account.request][: columns[account.request]])
            for account, count in work
        ]  # fmt: skip
        shape = shape_of(where, planned, sizes, out)
        for account, _ in work:
            self._expect_written(where, account)
        self._expect_unwritten(where, chosen)
        self._memory.drop_graphs()
        plan = fill_plan(planned, shape, self._numbers, out)
        self._take(chosen, work)
        self._freed([], [])
        return plan

    def export_request(self, request: Hashable) -> ExportedRequest:
        """Copy all that a request has, for another pool, process or time. The request stays open.

        Args:
            request: The request.

        Returns:
            The copy, on the pool's device; `save` writes it to a file.

        Raises:
            ArgumentError: It is not open.
        """
        where = "PagedPool.export_request"
        account = self._accounts.account(where, request)
        self._expect_written(where, account)
        return handover.export(account, self._memory, self._accounts, model=self.model)

    def import_request(self, request: Hashable, exported: ExportedRequest) -> int:
        """Open a request with what was exported, on pages and a ring of this pool. Page sizes may differ.

        Args:
            request: Its name here.
            exported: What `export_request` or `ExportedRequest.load` gave.

        Returns:
            Its tokens.

        Raises:
            ArgumentError: The name is taken; or the export is of another model or other layers, incomplete, or its
                lengths disagree.
            ShapeError, DTypeError: A tensor of it does not fit its length or this pool.
            PoolFullError: No ring or too few pages are free.
        """
        where, accounts = "PagedPool.import_request", self._accounts
        accounts.expect_new(where, request)
        handover.check(where, exported, self._memory, layer_ids=self.layer_ids, model=self.model)
        accounts.expect_ring(where)
        length = int(exported.length)
        accounts.expect_pages(where, accounts.pages_of(length))
        pages, ring_id = accounts.next_pages(accounts.pages_of(length)), accounts.free_ring_ids[-1]
        ring_start = max(int(exported.ring_start), length - accounts.ring_tokens)
        self._free_memory.take(where, pages, [ring_id])
        self._memory.forget_ring(ring_id)
        handover.write(exported, self._memory, pages, ring_id, ring_start)
        accounts.add_fresh(request, length, ring_start)
        self._freed([], [])
        return length

    def check_plan(self, plan: StepPlan) -> None:
        """Raise unless a plan's pages, rings and lengths are those of its requests now. Waits for the device.

        Args:
            plan: A plan that is about to run.

        Raises:
            ArgumentError: A request was closed, rolled back or planned again since; the message names it.
        """
        checking.check_plan("PagedPool.check_plan", plan, self._accounts)

    def tensors(self) -> list[PoolTensor]:
        """Every tensor of the pool, layer by layer: name, dtype, tokens a row, shareable or private."""
        return self._memory.list()

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in full pages, in all layers."""
        return self.layout.token_bytes * len(self.layer_ids)

    def summary(self) -> str:
        """A table of the tensors and of what a token, a page and a request cost, to print."""
        layers = len(self.layer_ids)
        return summary_text(
            self.tensors(), layers=layers, page_bytes=self.layout.page_bytes * layers,
            request_bytes=self.layout.request_bytes * layers, token_bytes=self.token_bytes,
        )  # fmt: skip

    def _work(self, where: str, rows: Mapping[Any, int]) -> list[tuple[Account, int]]:
        """Accounts of requests, with their new rows."""
        expect_type(where, "rows", rows, Mapping, hint="Pass {request: number of new rows}.")
        for request, count in rows.items():
            expect_int(where, f"rows[{request!r}]", count)
        return [(self._accounts.account(where, request), int(count)) for request, count in rows.items()]

    def _expect_unwritten(self, where: str, chosen: Sequence[Taken]) -> None:
        self._free_memory.take(where, [taken.page_id for taken in chosen], [])

    def _take(self, chosen: Sequence[Taken], work: Sequence[tuple[Account, int]] = ()) -> None:
        """Give pages to their requests, the shared ones copied first, and count new rows."""
        for taken in chosen:
            if taken.source is not None:
                self._memory.copy_page(taken.source, taken.page_id)
                if self._poisons():
                    began = taken.column * self.layout.page_tokens
                    self._memory.poison_rows(taken.page_id, max(taken.account.length - began, 0))
        self._accounts.take(chosen, work)
