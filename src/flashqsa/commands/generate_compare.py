"""Two engines after the same prompt: are their tokens the same, and how do their speeds relate?"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from flashqsa.commands.generate_engine import EngineRun


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first generated token that differs. What follows it follows from it.

    Attributes:
        index: Its place among the generated tokens, from 0.
        stock_token_id: What stock transformers chose; None past its last token.
        flashqsa_token_id: What FlashQSA chose; None past its last token.
        stock_margin: How far that token's logit lay above the second best there.
        flashqsa_margin: The same of FlashQSA.
    """

    index: int
    stock_token_id: int | None
    flashqsa_token_id: int | None
    stock_margin: float | None
    flashqsa_margin: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Stock transformers beside FlashQSA.

    Attributes:
        first_difference: None when all tokens are the same.
        prefill_ratio: Seconds of stock transformers over those of FlashQSA.
        decode_ratio: The same for the tokens after the first; None when there was no other.
        total_ratio: The same for both together.
    """

    first_difference: Difference | None
    prefill_ratio: float
    decode_ratio: float | None
    total_ratio: float

    @property
    def same_tokens(self) -> bool:
        """Whether both engines generated the same tokens."""
        return self.first_difference is None


def compare_runs(stock: EngineRun, flashqsa: EngineRun) -> Comparison:
    """Compares the tokens and the times of two runs of one request."""
    decoded = stock.decode_tokens_per_s and flashqsa.decode_tokens_per_s
    return Comparison(
        first_difference=_first_difference(stock, flashqsa),
        prefill_ratio=stock.generated.prefill_s / flashqsa.generated.prefill_s,
        decode_ratio=stock.generated.decode_s / flashqsa.generated.decode_s if decoded else None,
        total_ratio=stock.total_s / flashqsa.total_s,
    )


def _first_difference(stock: EngineRun, flashqsa: EngineRun) -> Difference | None:
    made = [zip(run.generated.token_ids, run.generated.margins, strict=True) for run in (stock, flashqsa)]
    for index, (theirs, ours) in enumerate(zip_longest(*made, fillvalue=(None, None))):
        if theirs[0] != ours[0]:
            return Difference(
                index=index,
                stock_token_id=theirs[0],
                flashqsa_token_id=ours[0],
                stock_margin=theirs[1],
                flashqsa_margin=ours[1],
            )
    return None
