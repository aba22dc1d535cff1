"""Public test kit: random steps in hostile memory, independent oracles, comparers.

Importing it needs torch alone. Nothing here is used by the library itself.
"""

from flashqsa.testing import oracles
from flashqsa.testing.cases import StepCase
from flashqsa.testing.compare import (
    assert_best_selection,
    assert_bitwise_equal,
    assert_same_selection,
    assert_scores_within,
    assert_selection_form,
    assert_ulp_close,
    assert_within_budget,
    error_budget,
    score_bounds,
    ulp_distance,
)
from flashqsa.testing.configs import tiny_config
from flashqsa.testing.hostile import (
    Guarded,
    Snapshot,
    as_bytes,
    assert_unchanged,
    guarded,
    guarded_like,
    poison,
    poison_slots,
    snapshot,
)
from flashqsa.testing.soak import SoakReport, soak
from flashqsa.testing.steps import Step, make_step
from flashqsa.testing.truth import RequestTruth, randn, stream

__all__ = [
    "Guarded",
    "RequestTruth",
    "Snapshot",
    "SoakReport",
    "Step",
    "StepCase",
    "as_bytes",
    "assert_best_selection",
    "assert_bitwise_equal",
    "assert_same_selection",
    "assert_scores_within",
    "assert_selection_form",
    "assert_ulp_close",
    "assert_unchanged",
    "assert_within_budget",
    "error_budget",
    "guarded",
    "guarded_like",
    "make_step",
    "oracles",
    "poison",
    "poison_slots",
    "randn",
    "score_bounds",
    "snapshot",
    "soak",
    "stream",
    "tiny_config",
    "ulp_distance",
]
