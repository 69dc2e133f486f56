"""Finds running sums that a loop carries in 16 bits, in the jaxpr, because the compiled module no longer shows them."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# The relation of a value to the carry: none, the carry itself, the carry plus something, or any other.
NOTHING, CARRY, SUM, OTHER = range(4)

# Operations whose result still counts as the carry.
TRANSPARENT = {
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "pcast", "pvary",
    "reduce_precision", "reshape", "squeeze", "transpose",
}  # fmt: skip
ADDITIONS = {"add", "add_any", "sub", "scatter-add", "scatter_add", "scatter-sub"}


def sixteen_bit_carries(fn: Callable[..., Any]) -> Callable[..., list[str]]:
    """Returns a function that lists the 16-bit sums which the loops of `fn` carry from step to step.

    A carry is listed if its next value is itself plus something that does not depend on it: a gradient summed over
    micro-batches, or the gradient of a weight that a scan uses in every step. A residual stream `h + block(h)` is a
    recurrence of that many pairwise additions, each rounded once as outside a loop, and is not listed.

    Example:
      >>> xs = jnp.ones(10, jnp.float16)
      >>> sixteen_bit_carries(lambda xs: jax.lax.scan(lambda c, x: (c + x, ()), xs[0], xs))(xs)
      ['scan carry 0: float16[]']
    """

    def carries(*args: Any) -> list[str]:
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
        return [found for eqn in _equations(jaxpr) for found in _sums_of_loop(eqn)]

    return carries


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in _sub_jaxprs(eqn):
            yield from _equations(sub)


def _sub_jaxprs(eqn: Any) -> Iterator[Any]:
    for leaf in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(leaf):
            yield _open(leaf)


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if hasattr(jaxpr, "consts") else jaxpr


def _sums_of_loop(eqn: Any) -> Iterator[str]:
    if eqn.primitive.name == "scan":
        body, (start, count) = eqn.params["jaxpr"], _scan_counts(eqn.params)
    elif eqn.primitive.name == "while":
        body, start = eqn.params["body_jaxpr"], eqn.params["body_nconsts"]
        count = len(_open(body).outvars)
    else:
        return
    body = _open(body)
    for index in range(count):
        aval = body.invars[start + index].aval
        if jnp.issubdtype(aval.dtype, jnp.floating) and jnp.finfo(aval.dtype).bits == 16:
            relations = [CARRY if i == start + index else NOTHING for i in range(len(body.invars))]
            if _follow(body, relations)[index] == SUM:
                yield f"{eqn.primitive.name} carry {index}: {aval.str_short()}"


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many constants and how many carried values a scan has."""
    if "ft_in" not in params:  # before jax 0.12
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carry))


def _follow(jaxpr: Any, relations: list[int]) -> list[int]:
    """The relation of each output of `jaxpr` to the carry, given that of each input."""
    known = dict(zip(jaxpr.invars, relations, strict=True))

    def read(atom: Any) -> int:
        return NOTHING if hasattr(atom, "val") else known.get(atom, NOTHING)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _outputs(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _outputs(eqn: Any, inputs: list[int]) -> list[int]:
    name, related = eqn.primitive.name, [relation for relation in inputs if relation != NOTHING]
    if not related:
        return [NOTHING] * len(eqn.outvars)
    bodies = [sub for sub in _sub_jaxprs(eqn) if len(sub.outvars) == len(eqn.outvars)]
    if bodies and name != "while":
        # The predicate of a `cond` is no argument of its branches.
        branches = [_follow(body, inputs[len(inputs) - len(body.invars) :]) for body in bodies]
        return [max(outputs) for outputs in zip(*branches, strict=True)]
    if len(related) == 1 and related[0] != OTHER:
        if name in TRANSPARENT:
            return [related[0]] * len(eqn.outvars)
        if name in ADDITIONS and inputs[0 if name == "sub" else inputs.index(related[0])] != NOTHING:
            return [SUM]
    if name == "select_n" and inputs[0] == NOTHING and OTHER not in related:
        return [max(related)]
    return [OTHER] * len(eqn.outvars)
