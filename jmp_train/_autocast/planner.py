"""The passes of autocast and their order: from a recorded jaxpr to the program that runs.

Decides what comes before what. Each pass is one file of `passes`; what they ask about a program is in `analysis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._jaxpr import LOOPS, RUN_ONCE, ClosedJaxpr, FlatJaxpr, Jaxpr, flatten
from .._policy import Policy
from .analysis.entries import entries_of
from .analysis.products import Products
from .analysis.uses import Flags, Uses, find_uses
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
    assign_dtypes,  # all that follows asks what a value is
    without_tf32,  # the products that are in float32 now are those that stay there
    save_or_remat,  # by dtype: a float32 value is another candidate than a 16-bit one
    save_for_sums,  # only what readers on the same side of a dot find is still open
    widen,  # undoes narrowing that saves nothing, which all saved copies have to be known for
    rewrite_planned,  # what the primitives of equations are no longer matters to what is above
    separate_sums,  # what is still rematerialized, by sums as they will run
    shared_roundings,  # which values are still narrow, and read by rematerialized exponentials
    mark_dead,  # what is only rematerialized now
)
# From there to a program that says all that runs; the bodies first.
LOWERING: tuple[Pass, ...] = (
    insert_casts,  # from here on a value has one dtype, and what follows can compare bytes
    body_residuals,  # exchanges what one scan or `shard_map` hands to another
    rewrite_lowered,  # last: scans have the operands that they will have
)


class Planner:
    """Plans programs under one policy and one set of rules; remembers what it derived from each jaxpr.

    Args:
      policy: its compute and reduce dtypes hold.
      rules: the table of primitives with the user's edits.
      rewrites: the rewrites to apply; without any of them the program is another, not its results.
    """

    def __init__(self, policy: Policy, rules: Rules, rewrites: Sequence[Rewrite] = REWRITES):
        self.policy, self.rules, self.rewrites = policy, rules, tuple(rewrites)
        # The rewrites of single equations, by primitive.
        self.of_equation = {name: find for rewrite in rewrites for name, find in rewrite.of_equation.items()}
        self.has_backward = False  # whether a backward pass is in the whole program, loops' and calls' bodies left out
        # By the ids of equations and jaxprs, which `_recorded` keeps alive, so that no other object gets the same.
        self.wide: set[int] = set()  # dots that do not run in 16 bits
        # By the ids of nodes: what computes states of unrolled loops, and what sums start with; see `unrolled.py`.
        self.states, self.starts = set[int](), set[int]()
        self._recorded: dict[tuple[int, Place], tuple[Any, FlatJaxpr, list[Entry]]] = {}
        self._inlined: dict[int, FlatJaxpr] = {}  # where it stands decides rules, not equations
        self._uses: dict[tuple, Uses] = {}

    def fresh(self) -> Planner:
        """Another planner of the same policy and rules, for a program of its own, such as a derivative rule."""
        return Planner(self.policy, self.rules, self.rewrites)

    def plan_whole(
        self,
        jaxpr: ClosedJaxpr | Jaxpr,
        precisions: Sequence[Precision],
        out_flags: Sequence[Flags],
        place: Place = TOP,
    ) -> Program:
        """Plans a program that is inside no other, whose results leave as recorded; arguments as of `plan`."""
        self.analyze(jaxpr, precisions, place)
        program = self.plan(jaxpr, precisions, out_flags, place)
        # Lowering asks for none of these, and they would keep the jaxpr alive, by which `autocast` knows the plan.
        for cache in (self._recorded, self._inlined, self._uses):
            cache.clear()
        return program.returning_recorded()

    def analyze(self, jaxpr: ClosedJaxpr | Jaxpr, precisions: Sequence[Precision], place: Place = TOP) -> None:
        """Finds the products of a whole program that have to run in float32, and whether a backward pass is in it.

        Before any of it is planned.
        """
        Products(self).find(jaxpr, precisions, place)
        for _, program, entries in self._recorded.values():
            pairs = zip(program.nodes, entries, strict=True)
            self.wide.update(id(node.eqn) for node, entry in pairs if node.name in DOTS and entry.rule is not Rule.LOW)
        recorded, _ = self.recorded(jaxpr, place)
        # From the end, where a backward pass is if there is one: then the first node that is asked answers.
        self.has_backward = any(map(place.is_backward, reversed(recorded.nodes)))

    def plan(self, *args: Any, **kwargs: Any) -> Program:
        """The program after the last of `stages`, which takes the same arguments."""
        *_, (_, program) = self.stages(*args, **kwargs)
        return program

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
          jaxpr, place: the program, and where it stands.
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
        equations = [*program.equations]
        for i, equation in enumerate(equations):
            if equation.bodies:
                equations[i] = equation.replace(bodies=tuple(map(self.lower, equation.bodies)))
        program = program.replace(equations=equations)
        for run in LOWERING:
            program = run(program)
            yield run.__name__, program

    def recorded(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place) -> tuple[FlatJaxpr, list[Entry]]:
        """The flattened program, the rewrites of recorded programs applied, and the rule of each of its equations."""
        key = (id(jaxpr), place)
        if key not in self._recorded:
            # Before rules, products or uses are asked: these depend on the dtype of what a loop carries.
            program = flatten(jaxpr, replaced=dict.fromkeys(LOOPS, f32_accumulators))
            for rewrite in self.rewrites:
                program = rewrite.of_recorded(program) if rewrite.of_recorded else program
            entries = entries_of(program, self.rules, place, self.rewrites)
            self._recorded[key] = (jaxpr, program, entries)
        return self._recorded[key][1:]

    def inlined(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place) -> FlatJaxpr:
        """The flattened program, rematerialized calls and functions with derivative rules written out, too.

        What asks how a carry comes back has to look into these calls: around a step they are all that the body holds.
        """
        program, _ = self.recorded(jaxpr, place)
        if RUN_ONCE.isdisjoint([node.name for node in program.nodes]):
            return program
        if id(jaxpr) not in self._inlined:
            self._inlined[id(jaxpr)] = flatten(jaxpr, also=RUN_ONCE)
        return self._inlined[id(jaxpr)]

    def uses(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, out_flags: Sequence[Flags]) -> Uses:
        """What becomes of each value, given what becomes of the results."""
        key = (id(jaxpr), place, tuple(out_flags))
        if key not in self._uses:
            program, entries = self.recorded(jaxpr, place)
            self._uses[key] = find_uses(self, program, entries, place, out_flags)
        return self._uses[key]

    def in_flags(self, jaxpr: ClosedJaxpr | Jaxpr, place: Place, out_flags: Sequence[Flags]) -> list[Flags]:
        """What becomes of a body's arguments."""
        uses = self.uses(jaxpr, place, out_flags)
        return [uses.flags[number] for number in self.recorded(jaxpr, place)[0].inputs]
