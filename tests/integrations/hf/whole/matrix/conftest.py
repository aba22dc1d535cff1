"""The ways in which a model is run, what it said there, and what is stored of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.testing import error_budget

NEW_TOKENS = 48
PADS = (0, 1, 3, 7)
STORED = Path(__file__).parent / "stored"
SEEDS = (0, 3, 4, 7, 9, 10, 12, 13, 15, 26, 28, 30, 34, 38, 41, 43, 44, 59, 67, 74, 75, 82, 88, 93)
PROBED_STEPS, PROBED_TOKENS = (0, 1, 7, 22, 47), (3, 77, 130, 199, 255)
"""Which logits are stored."""


ORACLE_RUNS = ("single", "left", "right", "beams", "turns")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", SEEDS)


@pytest.fixture
def oracle_runs() -> tuple[str, ...]:
    return ORACLE_RUNS


@pytest.fixture
def shape(seed: int, draw_shape: Any) -> Any:
    return draw_shape(seed)


@pytest.fixture
def all_shapes(draw_shape: Any) -> list[Any]:
    return [draw_shape(seed) for seed in SEEDS]


@dataclass(frozen=True)
class Said:
    """What a model said in one run.

    Attributes:
        text: [B, T] all tokens, prompts, padding and what was generated.
        real: [B, T] bool, False for padding.
        positions: [B, T] position of each token.
        tokens: [B, 48] the greedy tokens.
        logits: [B, 48, V] which they are the best of.
        selected: What each QSA layer selected, rows of all forwards joined.
    """

    text: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    selected: list[Any]

    def close_rows(self) -> list[list[int]]:
        """Layer, batch row and row of those whose K-th and next score are tied by rounding."""
        return [
            [s.layer_id, *place] for s in self.selected for place in (s.close & self.real_rows(s)).nonzero().tolist()
        ]

    def real_rows(self, selected: Any) -> torch.Tensor:
        """[B, Q] rows that are no padding."""
        rows = torch.ones_like(selected.close)
        known = min(rows.shape[1], self.real.shape[1])
        rows[: self.real.shape[0], :known] = self.real[:, :known]
        return rows

    def digests(self, left_out: list[list[int]]) -> dict[str, list[str]]:
        """A hash of the sets of all rows, for each layer and batch row, without those left out."""
        skipped = {tuple(place) for place in left_out}
        return {
            str(s.layer_id): [
                _digest(s.tokens[b], [r for r in live.nonzero()[:, 0].tolist() if (s.layer_id, b, r) not in skipped])
                for b, live in enumerate(self.real_rows(s))
            ]
            for s in self.selected
        }


def _digest(sets: torch.Tensor, rows: list[int]) -> str:
    listed = sets[rows].nonzero().to(torch.int32)
    return hashlib.sha256(listed.numpy().tobytes()).hexdigest()[:16]


def _probes(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, PROBED_STEPS, :][..., PROBED_TOKENS]


Run = Callable[..., Said]


@dataclass(frozen=True)
class Runs:
    """The runs of one shape; each takes a model and, where sides are switched, the context that enables it.

    Attributes:
        prompts: [4, P].
        listen: Context that lists what is selected.
        join: Joins what successive forwards selected.
    """

    prompts: torch.Tensor
    listen: Any
    join: Any

    def single(self, model: Any, **options: Any) -> Said:
        prompt = self.prompts[:1]
        return self._generate(model, prompt, torch.ones_like(prompt), **options)

    def left(self, model: Any) -> Said:
        mask = (torch.arange(self.prompts.shape[1])[None] >= torch.tensor(PADS)[:, None]).long()
        prompts = self.prompts.masked_fill(mask == 0, model.config.pad_token_id)
        return self._generate(model, prompts, mask)

    def beams(self, model: Any) -> Said:
        prompt = self.prompts[1:2]
        return self._generate(model, prompt, torch.ones_like(prompt), num_beams=3)

    def static(self, model: Any) -> Said:
        return self.single(model, cache_implementation="static")

    def chunked(self, model: Any) -> Said:
        """Cuts at odd places, from one token to most of the prompt, then decoding over that cache."""
        prompt = self.prompts[:1]
        ends = [1, 2, 5, 18, 19, prompt.shape[1] - 4, prompt.shape[1] - 1]
        with self.listen() as before, torch.no_grad():
            cache, start = None, 0
            for end in ends:
                cache = model(prompt[:, start:end], cache=cache, use_cache=True).cache
                start = end
        return self._generate(model, prompt, torch.ones_like(prompt), before, cache=cache)

    def turns(self, model: Any) -> Said:
        """A first answer, then more from the user, over the same cache."""
        prompt, first = self.prompts[2:3], self.prompts.shape[1] // 2
        with self.listen() as before:
            turn = model.generate(prompt[:, :first], max_new_tokens=11, do_sample=False, return_dict_in_generate=True)
        text = torch.cat([turn.sequences, prompt[:, first:]], dim=1)
        return self._generate(model, text, torch.ones_like(text), before, cache=turn.cache)

    def switched(self, model: Any, enable: Any) -> Said:
        """A cache that stock began goes to FlashQSA, back, and again to FlashQSA."""
        text, cache, logits = self.prompts[:1], None, []
        with self.listen() as selected, torch.no_grad():
            for step in range(NEW_TOKENS):
                with enable(model) if (step + 12) // 16 % 2 else nullcontext():
                    out = model(text if cache is None else text[:, -1:], cache=cache, use_cache=True)
                cache = out.cache
                logits.append(out.logits[:, -1:])
                text = torch.cat([text, logits[-1].argmax(dim=-1)], dim=1)
        return self._said(text, torch.ones_like(self.prompts[:1]), torch.cat(logits, dim=1), selected)

    @torch.no_grad()
    def right(self, model: Any) -> Said:
        """One forward: nothing can be decoded behind padding. Its last 48 rows of each text count."""
        total = self.prompts.shape[1]
        lengths = total - torch.tensor(PADS)[:, None]
        mask = (torch.arange(total)[None] < lengths).long()
        prompts = self.prompts.masked_fill(mask == 0, model.config.pad_token_id)
        with self.listen() as selected:
            logits = model(prompts, attention_mask=mask, use_cache=False).logits
        logits = logits.gather(1, _last_rows(lengths)[..., None].expand(-1, -1, logits.shape[-1]))
        positions = torch.arange(total).expand_as(prompts)
        return Said(prompts, mask.bool(), positions, logits.argmax(dim=-1), logits, self.join(selected))

    def exact(self, said: Said, exact_model: Any) -> torch.Tensor:
        """The logits [B, 48, V] of a run by a float64 model that is told the text."""
        last = (said.text.shape[1] - said.real.flip(1).long().argmax(dim=1))[:, None]
        if bool(said.real[:, -1].all()):
            last = last - 1  # what was generated last was never read
        logits = exact_model(
            said.text, attention_mask=said.real.long(), position_ids=said.positions, use_cache=False
        ).logits
        return logits.gather(1, _last_rows(last)[..., None].expand(-1, -1, logits.shape[-1]))

    def _generate(self, model: Any, prompt: torch.Tensor, mask: torch.Tensor, before: Any = (), **options: Any) -> Said:
        options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
        with self.listen() as selected:
            out = model.generate(prompt, attention_mask=mask, output_logits=True, **options)
        logits = torch.stack(out.logits, dim=1)
        if options.get("num_beams"):
            logits = logits[out.beam_indices[:, :NEW_TOKENS], torch.arange(NEW_TOKENS)]
        return self._said(out.sequences, mask, logits, [*before, *selected])

    def _said(self, text: torch.Tensor, mask: torch.Tensor, logits: torch.Tensor, selected: list[Any]) -> Said:
        real = torch.cat([mask, mask.new_ones(mask.shape[0], NEW_TOKENS)], dim=1).bool()
        positions = (real.long().cumsum(dim=1) - 1).clamp(min=0)
        return Said(text, real, positions, text[:, -NEW_TOKENS:], logits, self.join(selected))


def _last_rows(ends: torch.Tensor) -> torch.Tensor:
    """[B, 48] the rows before each end [B, 1]."""
    return ends - NEW_TOKENS + torch.arange(NEW_TOKENS)


@pytest.fixture
def make_runs(make_tokens: Any, watch: Any, join: Any) -> Callable[[Any], Runs]:
    return lambda shape: Runs(make_tokens(len(PADS), shape.prompt, shape.seed), watch, join)


@dataclass(frozen=True)
class Truth:
    """What the oracle said in one run, as far as it is stored.

    Attributes:
        tokens: [B][48] the greedy tokens.
        exact: [B][5][5] some of their logits in float64.
        budget: Largest error that the logits may have.
        close: Layer, batch row and row of those that are left out, tied by rounding.
        sets: By layer and batch row, a hash of the selected sets of all other rows.
    """

    tokens: list[list[int]]
    exact: list[list[list[float]]]
    budget: float
    close: list[list[int]]
    sets: dict[str, list[str]]

    @classmethod
    def of(cls, said: Said, exact: torch.Tensor) -> Truth:
        close = said.close_rows()
        budget = error_budget(said.logits, exact)
        rounded = [[[float(f"{x:.9g}") for x in step] for step in row] for row in _probes(exact).tolist()]
        return cls(said.tokens.tolist(), rounded, float(f"{budget:.4g}"), close, said.digests(close))

    def check(self, said: Said) -> None:
        """Raise AssertionError unless a run selected and said the same."""
        assert said.tokens.tolist() == self.tokens
        assert said.digests(self.close) == self.sets, "compare with a live oracle to see the rows: see regenerate.py"
        error = float((_probes(said.logits).double() - torch.tensor(self.exact).double()).abs().max())
        assert error <= self.budget, f"a logit is off by {error:.3e}, {self.budget:.3e} are allowed"


@dataclass(frozen=True)
class Store:
    """The files of stored results."""

    folder: Path

    def read(self, shape: Any) -> dict[str, Truth]:
        stored = json.loads((self.folder / f"{shape}.json").read_text())
        return {name: Truth(**fields) for name, fields in stored.items()}

    def write(self, shape: Any, truths: dict[str, Truth]) -> None:
        self.folder.mkdir(exist_ok=True)
        text = json.dumps({name: vars(truth) for name, truth in truths.items()}, separators=(",", ":"))
        (self.folder / f"{shape}.json").write_text(text + "\n")


@pytest.fixture
def store() -> Store:
    return Store(STORED)


@pytest.fixture
def truth_of() -> Callable[[Said, torch.Tensor], Truth]:
    return Truth.of
