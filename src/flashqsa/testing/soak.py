"""`soak`: a random scheduler over a `PagedPool`, every request compared with itself alone after every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.checks import expect_int, expect_type, values_are_checked
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.testing.alone import LayerInputs
from flashqsa.testing.soak_layers import Stages
from flashqsa.testing.soak_server import SoakServer

SOAK_CONFIG = QSAConfig(
    hidden_size=32, q_heads=2, kv_heads=1, head_dim=16, index_heads=2, index_head_dim=16, budget_tokens=32,
    block_tokens=4, rotary_dim=8, mrope_section=(2, 1, 1), qsa_layer_ids=(1, 3),
)  # fmt: skip
"""Two small layers; a row selects 8 blocks of 4 tokens."""


@dataclass(frozen=True)
class SoakReport:
    """What a soak did.

    Attributes:
        steps: Steps of the scheduler.
        requests: Requests that were opened.
        rows: Rows that were compared, in every layer.
        replays: Steps that one CUDA graph ran.
        actions: How often each action was done; ``full`` counts calls that the pool refused for lack of room.
    """

    steps: int
    requests: int
    rows: int
    replays: int
    actions: dict[str, int]


def run_stages(backend: str) -> Stages:
    """The library's own stages on one backend."""

    def stages(
        inputs: LayerInputs, cache: LayerCache, plan: StepPlan, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        ready = inputs.prepared(cache, plan, backend=backend)
        if selection is None:
            selection = select_blocks(ready.index_q, cache, plan, backend=backend)
        output = attend(ready.q, cache, selection, plan, gate=ready.gate, backend=backend)
        assert isinstance(output, torch.Tensor)
        return output, selection

    return stages


@torch.no_grad()
def soak(
    steps: int,
    *,
    seed: int = 0,
    stages: Stages | str = "auto",
    config: QSAConfig = SOAK_CONFIG,
    max_requests: int = 6,
    max_tokens: int = 1600,
    page_tokens: int = 16,
    num_pages: int = 260,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    graphs: bool = False,
) -> SoakReport:
    """Serve random requests, and compare every row of every step with its request alone.

    Each step does one thing: a ragged step (prefill chunks of 1 to 700 rows beside decode rows), a padded decode step
    through a refilled plan, a verify step with up to 7 drafts of which a random number is accepted, a draft step that
    reuses selections made in different earlier steps, an aborted step, or a new request (empty, forked, by a prefix of
    any length, of a live request or of one that is gone, or handed over to itself with other pages and another ring).
    Free memory is NaN throughout, and so are the projections of padding rows. The oracle calls only the ``reference``
    backend, on contiguous tensors, and on the CPU whatever the device: most of the time is its.

    Args:
        steps: How many steps.
        seed: Decides all of it.
        stages: A backend's name, or what runs one layer of a step: your own backend.
        config: Shapes of the layers.
        max_requests: Requests at once.
        max_tokens: Tokens of a request at most, a multiple of the block size.
        page_tokens: Tokens of a page.
        num_pages: Pages of the pool; so few that it fills up.
        dtype: Model dtype. In bf16 and fp16 a kernel that rounds once differently may select otherwise than the
            definition; fp32 is exact enough to tell.
        device: Where to run.
        graphs: Capture all layers of a step through the refilled plan once, in a CUDA graph, and replay it for every
            later one. `stages` must be fit for that: no host waits.

    Returns:
        What was done.

    Raises:
        AssertionError: A row differs; the message names step, request, layer and rows.
        ArgumentError: A number breaks a rule; or `graphs` on another device than CUDA, or with FLASHQSA_DEBUG=1, which
            waits.
    """
    _check(steps, seed, stages, config, max_requests, max_tokens)
    where = torch.device(device)
    if graphs and (where.type != "cuda" or values_are_checked(where)):
        raise ArgumentError(
            f"soak: graphs must be off unless the device is CUDA and FLASHQSA_DEBUG is not set, got {graphs} on "
            f"{where}. Run without graphs."
        )
    server = SoakServer(
        run_stages(stages) if isinstance(stages, str) else stages, config, seed=seed, max_requests=max_requests,
        max_tokens=max_tokens, page_tokens=page_tokens, num_pages=num_pages, dtype=dtype, device=where, graphs=graphs,
    )  # fmt: skip
    for number in range(steps):
        server.step(number)
    return SoakReport(steps, server.opened, server.rows, server.layers.replays, dict(server.actions))


def _check(steps: int, seed: int, stages: object, config: QSAConfig, max_requests: int, max_tokens: int) -> None:
    """A soak that does nothing shows nothing: no step, no request or no token is a mistake."""
    where = "soak"
    expect_int(where, "steps", steps, least=1)
    expect_int(where, "seed", seed, least=None)
    expect_int(where, "max_requests", max_requests, least=1)
    expect_type(where, "config", config, QSAConfig)
    r = config.block_tokens
    expect_int(where, "max_tokens", max_tokens, least=r)
    if max_tokens % r:
        raise ArgumentError(
            f"{where}: max_tokens must be a multiple of block_tokens = {r}, got {max_tokens}. Round it to whole blocks."
        )
    if not isinstance(stages, str) and not callable(stages):
        raise ArgumentError(
            f"{where}: stages must be the name of a backend or a function, got {stages!r}. Pass a function that runs "
            "one layer of a step."
        )
