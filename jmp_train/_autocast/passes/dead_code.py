"""Equations whose results nothing reads.

    a = exp x                          a = exp x
    b = mul a a                   ->   b = dead mul a a      (`b*` is computed again, from `a`)
    c = dot_general a w                c = dot_general a w
    d = mul b* c                       d = mul b* c

`mark_dead` looks at a program before `insert_casts`, where a residual is read through what it is rematerialized from;
`remove_dead_code` at one after it.
"""

from collections.abc import Callable, Iterable, Sequence

from ..ir import Equation, Op, Program


def mark_dead(program: Program) -> Program:
    """The program in which equations that need not run at their place are marked as dead."""
    needed, runs_again = set(program.outputs), set()  # values read as they are, and those that are rematerialized
    remat, equations = program.residuals.remat, []
    for equation in reversed(program.equations):
        dead = equation.dead or (needed.isdisjoint(equation.results) and not has_effects(equation))
        if not dead:
            for number, _, residual in equation.uses:
                (runs_again if residual and number in remat else needed).add(number)
        # `insert_casts` will run it across a dot, dead or not; there it reads residuals, whatever its uses say.
        if not runs_again.isdisjoint(equation.results):
            for number in equation.operands:
                (runs_again if number in remat else needed).add(number)
        equations.append(equation.replace(dead=True) if dead else equation)
    return program.replace(equations=equations[::-1])


def remove_dead_code(program: Program) -> Program:
    """The program without equations whose results are neither read nor returned."""
    return program.replace(equations=computing(program.equations, program.outputs, also=has_effects))


def computing(
    equations: Sequence[Equation],
    wanted: Iterable[int],
    given: Iterable[int] = (),
    also: Callable[[Equation], bool] = lambda equation: False,
) -> list[Equation]:
    """The equations that compute some values from given ones; equations for which `also` holds are included."""
    given = {*given}
    needed, found = {*wanted} - given, []
    for equation in reversed(equations):
        if also(equation) or not needed.isdisjoint(equation.results):
            found.append(equation)
            needed.update({*equation.operands} - given)
    return found[::-1]


def has_effects(equation: Equation) -> bool:
    return equation.op is Op.RECORDED and bool(equation.node.eqn.effects)
