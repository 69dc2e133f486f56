"""The rewrites, in the order in which they are tried within each stage.

Each of them may be left out. `hoist_weight_casts` comes before `narrow_caches`, which keeps the scan that it narrows
for the derivative, with the operands that the scan has by then. `swapped_dots` looks at the dots that `fold_transposes`
leaves.
"""

from ...ir import Program
from .chained_casts import chained_casts
from .dot_as_sums import dot_as_sums
from .fold_transposes import fold_transposes
from .hoist_weight_casts import hoist_weight_casts
from .joined_shard_maps import joined_shard_maps
from .leaky_relus import leaky_relus
from .max_pools import entry_of_scatter, max_pools, pools_in_float32
from .narrow_caches import narrow_caches
from .narrow_transfers import narrow_transfers
from .one_hot_scatter import one_hot_scatter
from .relu_mask import relu_mask
from .rewrite import Rewrite as Rewrite
from .sliced_dots import sliced_dots
from .softmax_gradient import softmax_gradient
from .sums_of_one import entry_of_sum, sums_of_one
from .swapped_dots import swapped_dots
from .two_step_sums import two_step_sums
from .wide_biases import wide_biases
from .window_sums import window_sums

_POOL = "select_and_scatter_add"
REWRITES = (
    Rewrite("joined_shard_maps", of_recorded=joined_shard_maps),
    Rewrite("sums_of_one", entry={"reduce_sum": entry_of_sum}, of_equation={"reduce_sum": sums_of_one}),
    Rewrite("relu_mask", of_recorded=relu_mask),
    Rewrite("leaky_relus", of_planned=leaky_relus),
    Rewrite("max_pools", entry={_POOL: entry_of_scatter}, of_equation={_POOL: max_pools}, of_planned=pools_in_float32),
    Rewrite("one_hot_scatter", of_equation={"scatter-add": one_hot_scatter}),
    Rewrite("dot_as_sums", of_equation={"dot_general": dot_as_sums}),
    Rewrite("softmax_gradient", of_planned=softmax_gradient),
    Rewrite("fold_transposes", of_planned=fold_transposes),
    Rewrite("swapped_dots", of_planned=swapped_dots),
    Rewrite("hoist_weight_casts", of_lowered=hoist_weight_casts),
    Rewrite("narrow_caches", of_lowered=narrow_caches),
    Rewrite("narrow_transfers", of_planned=narrow_transfers),
    Rewrite("sliced_dots", of_lowered=sliced_dots),
    Rewrite("chained_casts", of_lowered=chained_casts),
    Rewrite("window_sums", of_equation={"reduce_window_sum": window_sums}),
    Rewrite("two_step_sums", of_planned=two_step_sums),
    Rewrite("wide_biases", of_lowered=wide_biases),
)


def rewrite_planned(program: Program) -> Program:
    """Applies the rewrites of single equations, then those of programs whose dtypes are decided."""
    equations, of_equation = [*program.equations], program.context.planner.of_equation
    for i, equation in enumerate(equations):
        name = equation.node.name
        if name in of_equation and (found := of_equation[name](program, equation)):
            equations[i] = equation.replace(rewrite=found)
    program = program.replace(equations=equations)
    for rewrite in program.context.planner.rewrites:
        program = rewrite.of_planned(program) if rewrite.of_planned else program
    return program


def rewrite_lowered(program: Program) -> Program:
    """Applies the rewrites of programs whose casts are equations."""
    for rewrite in program.context.planner.rewrites:
        program = rewrite.of_lowered(program) if rewrite.of_lowered else program
    return program
