"""Preparation: norms, rotation, and the only writes to the caches."""

from flashqsa.preparation.api import prepare
from flashqsa.preparation.weights import NormWeights

__all__ = ["NormWeights", "prepare"]
