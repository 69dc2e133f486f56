"""`autocast`: a function that runs another one in mixed precision.

Decides when a program is traced and planned, and that arguments and results keep the dtypes that were recorded. Does
not decide dtypes inside (`passes`) nor rules (`rules.py`, `primitives.py`).
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from .._dtypes import FLOAT32, facts
from .._finite import is_float0
from .._jaxpr import convert, open_jaxpr, trace
from .._policy import Policy, get_policy
from .._static import hide_static, is_argument, note_numbers, reveal_static
from .._values import as_argnums, check_callable
from .analysis.uses import RETURNED
from .emit import emit
from .ir import Precision, Program, precision_of
from .planner import Planner
from .rules import DEFAULT_RULES, Rules, check_rules

P = ParamSpec("P")
R = TypeVar("R")


def autocast(
    fn: Callable[P, R], policy: Policy | str, *, rules: Rules = DEFAULT_RULES, argnums: int | Sequence[int] = 0
) -> Callable[P, R]:
    """Returns a function that runs `fn` in mixed precision: dots in the compute dtype, every sum in float32.

    `fn` is traced as it stands, in float32. Its program is then planned as a whole: dots and convolutions read operands
    of the policy's compute dtype, which is what Tensor Cores need; operations that need range or accumulate run in
    float32; everything else follows its operands. The trace and the plan are made once for each set of argument shapes
    and dtypes, so that a value that `fn` reads from elsewhere, such as a global, is the one of the first call, as in
    `jax.jit`.

    Put it around the differentiated function, `autocast(jax.grad(loss))`, as `value_and_grad` does: then autocast sees
    the sums of the backward pass too. `jax.grad(autocast(loss))` works, calls user-written derivative rules, and
    differentiates the mixed-precision program: there the dots that compute weight gradients return 16 bits.

    Only operations recorded in float32 are narrowed. Code that casts by hand is left alone, except that its reductions
    accumulate in float32. Elementwise operations that read data (arguments outside `argnums`, captured arrays, literals
    that the compute dtype cannot hold) run in float32. With a compute dtype of 32 bits or more the returned function
    computes what `fn` does.

    Args:
      fn: any function of arrays; pytrees of them, keywords and Python numbers as under `jax.jit`. Flags, strings and
        other objects reach it as they are; a different one is another program. So does a number that is bound to it
        with `functools.partial`.
      policy: a `Policy`, or a name for `get_policy`. Autocast uses its `compute_dtype`, `reduce_dtype` (in which dots
        return weight gradients, and in which these are sent between devices), `matmul_precision` and `overrides`
        (parameters that stay in float32, as do the elementwise operations that read them).
      rules: the table of primitives with your edits; see `Rules`.
      argnums: which positional arguments hold the parameters. Parameters are narrowed to the dtype of the values that
        they are combined with; all other arguments are data.

    Returns:
      A function with `fn`'s arguments, results and result dtypes.

    Raises:
      TypeError: `fn` is not callable, or `rules` or `argnums` is something else.
      ValueError: `rules` set a scope to a 16-bit dtype that is not the policy's, or the function is called with fewer
        positional arguments than `argnums` names.

    Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.relu(x @ w))
    >>> gradient = autocast(jax.grad(loss), "mixed_float16")(jnp.ones((4, 2)), jnp.ones((8, 4)))
    >>> gradient.dtype
    dtype('float32')
    """
    check_callable("fn", fn, "pass the function to run in mixed precision")
    policy = get_policy(policy)
    planned = make_planned(fn, policy, rules, argnums)

    @functools.wraps(fn)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with matmul_precision(policy):
            if facts(policy.compute_dtype).bits > 16:
                return fn(*args, **kwargs)
            hidden = hide_static((args, kwargs), is_argument)
            plan, tree = planned(*hidden[0], **hidden[1])
            results = emit(plan.lowered, list(map(as_array, jax.tree.leaves(hidden))))
            recorded = plan.program.recorded
            return jax.tree.unflatten(tree, map(as_result, results, map(recorded.avals.__getitem__, recorded.outputs)))

    return run


class Plan:
    """A planned program in two forms: with the dtype of every operand, and with every cast as an equation.

    Attributes:
      program: the first form, for `explain`.
      lowered: the second form, which runs; made when it is first asked for.
    """

    def __init__(self, planner: Planner, program: Program):
        self._planner, self.program = planner, program

    @functools.cached_property
    def lowered(self) -> Program:
        return self._planner.lower(self.program)


class _Plans(weakref.WeakKeyDictionary[Any, dict[tuple[Precision, ...], Plan]]):
    """Plans by program and precisions of its arguments. A pickled function leaves them behind: they are made again."""

    def __reduce__(self) -> "tuple[type[_Plans], tuple[()]]":
        return _Plans, ()


def make_planned(
    fn: Callable, policy: Policy, rules: Rules, argnums: int | Sequence[int]
) -> Callable[..., tuple[Plan, Any]]:
    """Returns a function that gives the plan of `fn` for some arguments, and the tree of its result.

    `hide_static` moves leaves of the arguments that are no arrays into their structure. JAX caches traces, and plans
    are cached beside them: neither is made twice for the same shapes and dtypes.
    """
    check_rules(rules)
    check_scopes(rules, policy)
    chosen = as_argnums(argnums)
    chosen = (chosen,) if isinstance(chosen, int) else chosen
    plans = _Plans()

    @functools.wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # Puts a frame of this file into every traceback, by which others see that autocast traced the function.
        try:
            return fn(*reveal_static(args), **reveal_static(kwargs))
        except (TypeError, ValueError) as error:
            note_numbers(error, (args, kwargs))
            raise

    def planned(*args: Any, **kwargs: Any) -> tuple[Plan, Any]:
        jaxpr, shape = trace(recorded, *args, **kwargs)
        body = open_jaxpr(jaxpr)
        precisions = _argument_precisions(body, args, kwargs, policy, chosen)
        known = plans.setdefault(body, {})
        if precisions not in known:
            planner = Planner(policy, rules)
            known[precisions] = Plan(planner, planner.plan_whole(jaxpr, precisions, [RETURNED] * len(body.outvars)))
        return known[precisions], jax.tree.structure(shape)

    return planned


def check_scopes(rules: Rules, policy: Policy) -> None:
    """Raises for scopes in the other 16-bit dtype: a program has one compute dtype."""
    low = policy.compute_dtype
    for glob, dtype in rules.scopes:
        if facts(low).bits == facts(dtype).bits == 16 and dtype != low:
            raise ValueError(
                f"`rules` set the scope {glob!r} to {dtype.name}, but the policy computes in {low.name}; a scope is in "
                f"the policy's compute dtype or in float32."
            )


def matmul_precision(policy: Policy) -> contextlib.AbstractContextManager[Any]:
    """The context in which float32 products are recorded as `policy` says; the backward pass inherits it."""
    if policy.matmul_precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(policy.matmul_precision)


def as_array(leaf: Any) -> Any:
    """Python numbers as the arrays that tracing made of them."""
    return leaf if hasattr(leaf, "dtype") else jax.numpy.asarray(leaf)


def as_result(value: Any, aval: Any) -> Any:
    """A result as `jax.jit` returns it, given how it was recorded.

    A literal of the program is a number with JAX's dtype, and no array yet; and what was cast is not weakly typed.
    """
    if is_float0(value):
        return value
    array = value if isinstance(value, jax.Array) else jax.numpy.asarray(value)
    weakens = getattr(aval, "weak_type", False) and not jax.typeof(array).weak_type
    return convert(array, array.dtype, weak_type=True) if weakens else array


def _argument_precisions(
    body: Any, args: tuple, kwargs: dict, policy: Policy, chosen: tuple[int, ...]
) -> tuple[Precision, ...]:
    """What the planner knows of each argument leaf: a parameter, data, or not float32."""
    precisions: list[Precision] = []
    avals = iter([var.aval for var in body.invars])
    if args and not all(-len(args) <= n < len(args) for n in chosen):
        raise ValueError(
            f"`argnums` is {chosen}, but the function was called with {len(args)} positional arguments; name those "
            f"that hold the parameters, and pass `argnums=()` if none does."
        )
    parameters = sorted({n % len(args) for n in chosen}) if args else []
    # One argument keeps its own paths; several are told apart by their place in a tuple. Globs match either.
    trees = [args[n] for n in parameters]
    overrides = iter(policy.override_dtypes(trees[0] if len(trees) == 1 else tuple(trees)))
    for position, arg in enumerate([*args, kwargs]):
        for _ in jax.tree.leaves(arg):
            is_weak = position in parameters and next(overrides) != FLOAT32
            precision = Precision.WEAK if is_weak else Precision.FULL
            precisions.append(precision_of(next(avals), precision))
    return tuple(precisions)
