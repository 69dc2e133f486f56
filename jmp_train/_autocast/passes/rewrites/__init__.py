"""The rewrites, in the order in which they are tried; none relies on another."""

from __future__ import annotations

from ...ir import Program
from .chained_casts import ChainedCasts
from .dot_as_sums import DotAsSums
from .fold_transposes import FoldTransposes
from .hoist_weight_casts import HoistWeightCasts
from .joined_shard_maps import JoinedShardMaps
from .max_pools import MaxPools
from .narrow_caches import NarrowCaches
from .narrow_transfers import NarrowTransfers
from .one_hot_scatter import OneHotScatter
from .relu_mask import ReluMask
from .rewrite import Rewrite as Rewrite
from .rewrite import steps as steps
from .sliced_dots import SlicedDots
from .sums_of_one import SumsOfOne
from .two_step_sums import TwoStepSums
from .window_sums import WindowSums

REWRITES: tuple[Rewrite, ...] = (
    JoinedShardMaps(),
    SumsOfOne(),
    ReluMask(),
    MaxPools(),
    OneHotScatter(),
    DotAsSums(),
    FoldTransposes(),
    HoistWeightCasts(),
    NarrowCaches(),
    NarrowTransfers(),
    SlicedDots(),
    ChainedCasts(),
    WindowSums(),
    TwoStepSums(),
)


def rewrite_planned(program: Program) -> Program:
    """Applies the rewrites of single equations, then those of programs whose dtypes are decided."""
    equations = [*program.equations]
    for rewrite in program.context.rewrites:
        for i, equation in enumerate(equations):
            if equation.node.name in rewrite.primitives and (found := rewrite.of_equation(program, equation)):
                equations[i] = equation.replace(rewrite=found)
    program = program.replace(equations=equations)
    for step in steps(program.context.rewrites, "of_planned"):
        program = step(program)
    return program


def rewrite_lowered(program: Program) -> Program:
    """Applies the rewrites of programs whose casts are equations."""
    for step in steps(program.context.rewrites, "of_lowered"):
        program = step(program)
    return program
