"""The passes of autocast and their order: from a recorded jaxpr to the program that runs.

Decides the order of the passes. Each pass is one file of `passes`; the facts that they ask for are in `analysis`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._jaxpr import LOOPS, RUN_ONCE, ClosedJaxpr, FlatJaxpr, Jaxpr, flatten
from .._policy import Policy
from .analysis.entries import entries_of
from .analysis.uses import Flags, Uses, find_uses
from .analysis.whole_program.products import Products
from .ir import TOP, Context, Place, Precision, Program
from .passes.assign_dtypes import assign_dtypes
from .passes.body_residuals import body_residuals
from .passes.dead_code import mark_dead
from .passes.f32_accumulators import f32_accumulators
from .passes.insert_casts import insert_casts
from .passes.rewrites import REWRITES, Rewrite, rewrite_lowered, rewrite_planned
from .passes.save_for_sums import save_for_sums
from .passes.save_or_remat import save_or_remat
from .passes.separate_sums import separate_sums
from .passes.shared_roundings import shared_roundings
from .passes.widen import widen
from .passes.without_tf32 import without_tf32
from .primitives import DOTS, Entry, Rule
from .rules import Rules

Pass = Callable[[Program], Program]

# From a recorded program to one whose every use names a dtype; each body before the equation that it belongs to.
PLANNING: tuple[Pass, ...] = (
    assign_dtypes,  # first: all other passes ask for the precision of values
    without_tf32,  # the products that are in float32 by now stay there
    save_or_remat,  # after dtypes: the costs of a float32 value and of a 16-bit one differ
    save_for_sums,  # after residuals: only uses on the same side of a dot are still open
    widen,  # undoes narrowing that saves nothing: for that all saved copies have to be known
    rewrite_planned,  # the passes above look at primitives, which this changes
    separate_sums,  # asks which values are still rematerialized, and for the sums that will run
    shared_roundings,  # asks which values are still narrow, and read by rematerialized exponentials
    mark_dead,  # asks which values are only rematerialized in the end
)
# From there to a program that says all that runs; the bodies first.
LOWERING: tuple[Pass, ...] = (
    insert_casts,  # first: from here on a value has one dtype, and passes can compare bytes
    body_residuals,  # exchanges the values that one scan or `shard_map` passes to another
    rewrite_lowered,  # last: scans have their final operands
)


class Planner:
    """Plans programs under one policy and one set of rules; caches what it derives from each jaxpr.

    Args:
      policy: its compute and reduce dtypes are used.
      rules: the table of primitives with the user's edits.
      rewrites: the rewrites to apply; leaving out any of them changes the program, but not its results.
    """

    def __init__(self, policy: Policy, rules: Rules, rewrites: Sequence[Rewrite] = REWRITES):
        self.policy, self.rules, self.rewrites = policy, rules, tuple(rewrites)
        # The rewrites of single equations, by primitive.
        self.of_equation = {name: find for rewrite in rewrites for name, find in rewrite.of_equation.items()}
        self.has_backward = False  # whether a backward pass is in the whole program, loops' and calls' bodies left out
        # By the ids of equations and jaxprs, which `_recorded` keeps alive, so that no other object gets the same.
        self.wide: set[int] = set()  # dots that do not run in 16 bits
        # The ids of nodes that compute states of unrolled loops, and of nodes with which sums start; see `unrolled.py`.
        self.states, self.starts = set[int](), set[int]()
        self._recorded: dict[tuple[int, Place], tuple[Any, FlatJaxpr, list[Entry]]] = {}
        self._inlined: dict[int, FlatJaxpr] = {}  # where it stands decides rules, not equations
        self._uses: dict[tuple, Uses] = {}
        self._planned: dict[tuple, Program] = {}

    def fresh(self) -> "Planner":
        """Another planner of the same policy and rules, for a program of its own, such as a derivative rule."""
        return Planner(self.policy, self.rules, self.rewrites)

    def plan_whole(
        self,
        jaxpr: ClosedJaxpr | Jaxpr,
        precisions: Sequence[Precision],
        out_flags: Sequence[Flags],
        place: Place = TOP,
    ) -> Program:
        """Plans a program that is no body, and returns its results as recorded; the arguments are those of `plan`."""
        self.analyze(jaxpr, precisions, place)
        program = self.plan(jaxpr, precisions, out_flags, place)
        # Lowering asks for none of these, and they would keep the jaxpr alive, which is the weak key of its plan.
        for cache in (self._recorded, self._inlined, self._uses, self._planned):
            cache.clear()
        return program.returning_recorded()

    def analyze(self, jaxpr: ClosedJaxpr | Jaxpr, precisions: Sequence[Precision], place: Place = TOP) -> None:
        """Finds the products of a whole program that have to run in float32, and whether a backward pass is in it.

        Called before any of the program is planned.
        """
        Products(self).find(jaxpr, precisions, place)
        for _, program, entries in self._recorded.values():
            pairs = zip(program.nodes, entries, strict=True)
            self.wide.update(id(node.eqn) for node, entry in pairs if node.name in DOTS and entry.rule is not Rule.LOW)
        recorded, _ = self.recorded(jaxpr, place)
        # From the end: a backward pass, if there is one, is there, so that the first node that is asked decides.
        self.has_backward = any(map(place.is_backward, reversed(recorded.nodes)))

    def plan(
        self,
        jaxpr: ClosedJaxpr | Jaxpr,
        precisions: Sequence[Precision],
        out_flags: Sequence[Flags],
        place: Place = TOP,
        roundable: Sequence[int] = (),
    ) -> Program:
        """The program after the last of `stages`, which takes the same arguments.

        JAX records a function that is called several times, such as a rematerialized layer, as one jaxpr.
        """
        key = (id(jaxpr), place, *[each.value for each in precisions], *out_flags, *roundable)
        if key not in self._planned:
            *_, (_, self._planned[key]) = self.stages(jaxpr, precisions, out_flags, place, roundable)
        return self._planned[key]

    def stages(
        self,
        jaxpr: ClosedJaxpr | Jaxpr,
        precisions: Sequence[Precision],
        out_flags: Sequence[Flags],
        place: Place = TOP,
        roundable: Sequence[int] = (),
    ) -> Iterator[tuple[str, Program]]:
        """The program after each planning pass, by the name of the pass.

        Args:
          jaxpr, place: the program, and the equation to which it belongs.
          precisions, out_flags, roundable: as in `Context`.
        """
        recorded, entries = self.recorded(jaxpr, place)
        uses = self.uses(jaxpr, place, out_flags)
        context = Context(self, entries, uses, precisions, out_flags, roundable)
        low = self.policy.compute_dtype
        program = Program(
            recorded, context, place, low, recorded.avals, recorded.known, recorded.inputs, recorded.outputs
        )
        for run in PLANNING:  # `assign_dtypes`, the first, plans the bodies
            program = run(program)
            yield run.__name__, program

    def lower(self, program: Program) -> Program:
        """Runs the lowering passes on a planned program and the programs inside it."""
        *_, (_, program) = self.lowering_stages(program)
        return program

    def lowering_stages(self, program: Program) -> Iterator[tuple[str, Program]]:
        """The program after each lowering pass, by the name of the pass.

        The bodies first, since `body_residuals` moves equations from one lowered body to another.
        """
        equations, lowered = [*program.equations], dict[int, Program]()
        for i, equation in enumerate(equations):
            for body in equation.bodies:
                if id(body) not in lowered:  # one that several equations run is lowered once
                    lowered[id(body)] = self.lower(body)
            if equation.bodies:
                equations[i] = equation.replace(bodies=tuple([lowered[id(body)] for body in equation.bodies]))
        program = program.replace(equations=equations)
        for run in LOWERING:
            program = run(program)
            yield run.__name__, program

    def recorded(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place) -> tuple[FlatJaxpr, list[Entry]]:
        """The flattened program, the rewrites of recorded programs applied, and the rule of each of its equations."""
        key = (id(jaxpr), place)
        if key not in self._recorded:
            # Before rules, products or uses are asked for: these depend on the dtypes of a loop's carries.
            program = flatten(jaxpr, replaced=dict.fromkeys(LOOPS, f32_accumulators))
            for rewrite in self.rewrites:
                program = rewrite.of_recorded(program) if rewrite.of_recorded else program
            entries = entries_of(program, self.rules, place, self.rewrites)
            self._recorded[key] = (jaxpr, program, entries)
        return self._recorded[key][1:]

    def inlined(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place) -> FlatJaxpr:
        """The flattened program, with rematerialized calls and functions with derivative rules inlined as well.

        An analysis that asks how a carry comes back has to look into these calls: a body may be one call only.
        """
        program, _ = self.recorded(jaxpr, place)
        if RUN_ONCE.isdisjoint([node.name for node in program.nodes]):
            return program
        if id(jaxpr) not in self._inlined:
            self._inlined[id(jaxpr)] = flatten(jaxpr, also=RUN_ONCE)
        return self._inlined[id(jaxpr)]

    def uses(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, out_flags: Sequence[Flags]) -> Uses:
        """How each value is used, given how the results are used."""
        key = (id(jaxpr), place, tuple(out_flags))
        if key not in self._uses:
            program, entries = self.recorded(jaxpr, place)
            self._uses[key] = find_uses(self, program, entries, place, out_flags)
        return self._uses[key]

    def in_flags(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, out_flags: Sequence[Flags]) -> list[Flags]:
        """How a body's arguments are used in it."""
        uses = self.uses(jaxpr, place, out_flags)
        return [uses.flags[number] for number in self.recorded(jaxpr, place)[0].inputs]
