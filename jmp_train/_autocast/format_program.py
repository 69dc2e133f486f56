"""A `Program` as text, in the manner of jaxprs: `explain(...).program()` returns it, and tests of passes compare it.

Decides nothing about the program.
"""

import textwrap

import numpy as np

from .ir import SEPARATE, Program, Use, dtype_of, is_float32, with_dtype


def format_program(program: Program) -> str:
    """The program as text, in the manner of `jax.make_jaxpr`: a line for each equation, with the dtypes of its results.

    `cast`, `saved` and the other values of `Op` are equations that autocast adds. `remat` marks equations that run
    again for the backward pass, `[highest]` products that run with float32's precision. Before `insert_casts` each
    operand is followed by its dtype; `*` marks a residual, `*2` and so on a residual that is an expression of its own,
    and `dead` an equation that does not run at its place.
    """
    names: dict[int, str] = {}

    def name(value: int) -> str:
        literal = program.constants.get(value)
        if literal is not None and value not in program.captured and np.size(literal) == 1:
            return f"{np.asarray(literal).item()!r}"
        return names.setdefault(value, _letters(len(names)))

    def typed(value: int) -> str:
        aval = program.avals[value]
        if value < len(program.facts) and is_float32(aval):
            aval = with_dtype(aval, dtype_of(program.precision(value), program.low))
        return f"{name(value)}:{aval.str_short(short_dtypes=True)}"

    def operand(use: Use) -> str:
        dtype = f":{use.dtype.name}" if use.dtype is not None else ""
        number = str(use.residual) if use.residual >= SEPARATE else ""
        return name(use.value) + dtype + "*" * bool(use.residual) + number

    read = {number for equation in program.equations for number in equation.operands}
    lines = [f"{{ lambda {' '.join(typed(n) for n in sorted(program.captured & read))} ;"]
    lines[0] += f" {' '.join(map(typed, program.inputs))} . let"
    for equation in program.equations:
        strict = "[highest]" if equation.params.get("precision") else ""
        changed = strict if equation.rewrite is None else f"[{equation.rewrite.__name__}]"
        words = ["dead"] * equation.dead + ["remat"] * equation.remat + [equation.name]
        results = " ".join(map(typed, equation.results)) or "_"
        lines.append(f"    {results} = {' '.join(words)}{changed} {' '.join(map(operand, equation.uses))}")
        lines += [textwrap.indent(format_program(body), " " * 8) for body in equation.bodies]
    return "\n".join([*lines, f"  in ({', '.join(map(name, program.outputs))}) }}"])


def _letters(number: int) -> str:
    """a, b, ..., z, ba, bb, ...: as jaxprs name their variables."""
    text = ""
    while True:
        number, letter = divmod(number, 26)
        text = chr(ord("a") + letter) + text
        if not number:
            return text
