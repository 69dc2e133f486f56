"""The parameters that a module assigned to while its loss was computed, as `nnx.WeightNorm` does.

    model_state                               the variables that are no parameters, after the call
    model_state of a loss that assigns        and the parameters that it assigned, with their new values

Decides which these are, and that a step starts from what was assigned. Does not decide whether the step is applied; if
it is not, the assignments are dropped with it (`_skip.py`).
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from .._jaxpr import FlatJaxpr, Node, branches_of, flatten, loop_of, trace


def with_assigned(model_state: Any, params: Any, after: Any, run: Callable[[Any], Any]) -> Any:
    """`model_state` with the variables of `params` that `run` assigned to.

    Args:
      model_state: all other variables, after the call.
      params: the `nnx.State` of the variables that are differentiated, before the call.
      after: the same after it.
      run: computes `after` from `params`.
    """
    leaves, structure = jax.tree.leaves(params), jax.tree.structure(params)
    if all(map(operator.is_, jax.tree.leaves(after), leaves)):
        return model_state
    # `nnx.jit` and `nnx.remat` give back every variable of the modules that they are given, as a result of the call.
    # The program shows which are those that came in.
    jaxpr, _ = trace(lambda *leaves: jax.tree.leaves(run(jax.tree.unflatten(structure, leaves))), *leaves)
    sources = forwarded_arguments(flatten(jaxpr))
    unchanged = dict(nnx.to_flat_state(jax.tree.unflatten(structure, [i == at for i, at in enumerate(sources)])))
    found = [each for each in nnx.to_flat_state(after) if not all(jax.tree.leaves(unchanged[each[0]]))]
    return nnx.merge_state(model_state, nnx.from_flat_state(found))


def split_assigned(model_state: Any, params: Any) -> tuple[Any, Any]:
    """The parameters that a step starts from, and the variables that are none.

    Args:
      model_state: as `with_assigned` returns it.
      params: the parameters before the call.
    """
    if not isinstance(model_state, nnx.State):
        return params, model_state
    known, flat = {path for path, _ in nnx.to_flat_state(params)}, nnx.to_flat_state(model_state)
    found = [(path, variable) for path, variable in flat if path in known]
    others = nnx.from_flat_state([(path, variable) for path, variable in flat if path not in known])
    return nnx.merge_state(params, nnx.from_flat_state(found)), others


def check_precise(model_state: Any, params: Any, given: Any) -> None:
    """Raises if a parameter was assigned although `loss_fn` was given a rounded copy, in which updates would be lost.

    Args:
      model_state: as `with_assigned` returns it.
      params: the parameters before the call.
      given: what `loss_fn` was given of them; shapes and dtypes suffice.
    """
    copies = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(given)}
    before = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(params)}
    for path, _ in nnx.to_flat_state(model_state):
        for old, copy in zip(before.get(path, ()), copies.get(path, ()), strict=True):
            if copy.dtype.itemsize < old.dtype.itemsize:
                raise ValueError(
                    f"`loss_fn` assigned to {'/'.join(map(str, path))!r}, of which autocast=False gives it a copy in "
                    f"{copy.dtype.name}, and updates would be lost in the rounding. Use autocast=True, or keep what a "
                    f"step computes in a variable of another kind, such as nnx.BatchStat."
                )


def forwarded_arguments(program: FlatJaxpr) -> list[int | None]:
    """For each result of a program the position of the argument that it equals, through calls, branches and loops.

    >>> program = flatten(jax.make_jaxpr(lambda x, y: (y, x + 1, jax.checkpoint(lambda x: x)(x)))(1.0, 2.0))
    >>> forwarded_arguments(program)
    [1, None, 0]
    """
    ranks = [len(getattr(program.avals[number], "shape", ())) for number in program.inputs]
    # The argument that a value equals, and the order in which it has the argument's axes: `nnx.scan` over another axis
    # than the first transposes, and transposes back.
    arguments = {
        number: (i, tuple(range(rank))) for i, (number, rank) in enumerate(zip(program.inputs, ranks, strict=True))
    }
    for node in program.nodes:
        if node.name == "transpose" and node.ins[0] in arguments:
            argument, axes = arguments[node.ins[0]]
            arguments[node.outs[0]] = argument, tuple(axes[axis] for axis in node.params["permutation"])
        for result, operand in _forwarded_by(node):
            if node.ins[operand] in arguments:
                arguments[node.outs[result]] = arguments[node.ins[operand]]
    found = [arguments.get(number, (None, ())) for number in program.outputs]
    return [argument if axes == tuple(range(len(axes))) else None for argument, axes in found]


def _forwarded_by(node: Node) -> Iterator[tuple[int, int]]:
    """The results of a node with a program inside that equal operands: the positions of both."""
    params = node.params
    if (loop := loop_of(node.eqn)) is not None:
        # A stack of the rows of an operand equals the operand.
        _, consts, carry, skip, _ = loop
        for result, inside in enumerate(forwarded_arguments(flatten(loop.body))):
            if inside is not None and (inside == consts + result if result < carry else inside >= consts + carry):
                yield result, skip + inside
        return
    skip, bodies = branches_of(node.eqn)
    each = [forwarded_arguments(flatten(body)) for body in bodies]
    for result, (inside, *others) in enumerate(zip(*each, strict=True)):
        if inside is None or others.count(inside) < len(others):
            continue
        # A result that a `shard_map` joins by the spec by which it split the operand equals the operand.
        if node.name != "shard_map" or params["in_specs"][inside] == params["out_specs"][result]:
            yield result, skip + inside
