"""What a model selects, as arrays: heat maps, shares, overlaps, distances, and the dense attention mass of blocks."""

from flashqsa.analysis.distances import DistanceHistogram, distance_histogram
from flashqsa.analysis.heat_map import HeatMap, block_heat_map
from flashqsa.analysis.mass import BlockMass, block_mass, iterate_block_mass
from flashqsa.analysis.mass_kept import KeptMass, kept_mass
from flashqsa.analysis.overlap import layer_overlap, neighbour_overlap
from flashqsa.analysis.rows import LayerRows, context_share, layer_rows

__all__ = [
    "BlockMass",
    "DistanceHistogram",
    "HeatMap",
    "KeptMass",
    "LayerRows",
    "block_heat_map",
    "block_mass",
    "context_share",
    "distance_histogram",
    "iterate_block_mass",
    "kept_mass",
    "layer_overlap",
    "layer_rows",
    "neighbour_overlap",
]
