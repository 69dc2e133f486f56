"""A program after each pass of autocast, as text, and with rewrites left out."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jmp_train as jmp
from jmp_train._autocast.analysis.uses import RETURNED
from jmp_train._autocast.emit import emit
from jmp_train._autocast.ir import Precision, Program, precision_of
from jmp_train._autocast.passes.rewrites import REWRITES, Rewrite
from jmp_train._autocast.planner import Planner


def stages(
    fn: Callable[..., Any],
    *args: Any,
    policy: Any = "mixed_float16",
    rules: jmp.Rules = jmp.DEFAULT_RULES,
    rewrites: Sequence[Rewrite] = REWRITES,
) -> Iterator[tuple[str, Program]]:
    """The name of each pass and the program after it; the first argument holds the parameters, all others are data."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    weak = len(jax.tree.leaves(args[0]))
    precisions = [
        precision_of(aval, Precision.WEAK if i < weak else Precision.FULL) for i, aval in enumerate(jaxpr.in_avals)
    ]
    planner = Planner(jmp.get_policy(policy), rules, rewrites)
    planner.analyze(jaxpr, precisions)
    program = None
    for name, program in planner.stages(jaxpr, precisions, [RETURNED] * len(jaxpr.out_avals)):
        yield name, program
    assert program is not None
    yield from planner.lowering_stages(program.returning_recorded())


def after(name: str, fn: Callable[..., Any], *args: Any, **options: Any) -> Program:
    """The program after one pass."""
    return dict(stages(fn, *args, **options))[name]


def lines(text: str) -> str:
    """A program that a test spells out, without the indentation of the test."""
    return textwrap.dedent(text).strip("\n ")


def add_any(x: Any, y: Any) -> Any:
    """The sum of two cotangents."""
    return jax.linear_transpose(lambda z: (z, z), x)((x, y))[0]


def with_batching_rule(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, recorded as a primitive that contains a program, and for which autocast has no rule of its own."""
    recorded = jax.custom_batching.custom_vmap(fn)

    def rule(size: int, batched: Sequence[bool], *args: Any) -> tuple[Any, bool]:
        del size
        return jax.vmap(fn, [0 if each else None for each in batched])(*args), True

    recorded.def_vmap(rule)
    return recorded


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Runs the program after the last pass."""
    *_, (_, program) = stages(fn, *args, **options)
    return emit(program, jax.tree.leaves(args))
