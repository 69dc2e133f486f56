"""The two halves of a differentiated `shard_map` as one.

    l, r:f32[..] = shard_map { forward } w x          l, g = shard_map { forward; backward } w x ct
    ct = mul scale 1.0                          ->
    g = shard_map { backward } r w ct

JAX differentiates a `shard_map` into one for the forward pass and one for the backward pass, which gets residuals of
the first. If they are planned apart, the second cannot rematerialize a value from values of the first. If the cotangent
with which the backward pass starts does not depend on the forward pass, as with a loss, one `shard_map` computes both,
as if the loss had been differentiated inside.
"""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from ...._jaxpr import FlatJaxpr, Literal, Node, Scope, Var, open_jaxpr

# Parameters that must be equal: the devices, the mesh axes that are manual in the body, and how JAX checks its results.
_SAME = ("mesh", "newly_manual_axes", "check_vma")


def joined_shard_maps(program: FlatJaxpr) -> FlatJaxpr:
    """The program in which backward `shard_map`s that need nothing from between run in their forward ones."""
    nodes = program.nodes
    for second in [node for node in nodes if node.name == "shard_map"]:
        read = {*second.ins}
        for first in [node for node in nodes if node.name == "shard_map" and not read.isdisjoint(node.outs)]:
            joined = _with_joined(nodes, first, second, program.outputs)
            if joined is not None:
                nodes = joined
                break
    return program if nodes is program.nodes else dataclasses.replace(program, nodes=nodes)


class _Value(NamedTuple):
    """An operand or result of a `shard_map`.

    Attributes:
      number: its number in the program.
      outside, inside: its variables in the equation and in its body.
      spec: how it is divided among the devices.
    """

    number: int
    outside: Any
    spec: Any
    inside: Any


def _operands(node: Node) -> list[_Value]:
    body = open_jaxpr(node.params["jaxpr"])
    return list(map(_Value, node.ins, node.eqn.invars, node.params["in_specs"], body.invars))


def _results(node: Node) -> list[_Value]:
    body = open_jaxpr(node.params["jaxpr"])
    return list(map(_Value, node.outs, node.eqn.outvars, node.params["out_specs"], body.outvars))


def _with_joined(
    nodes: tuple[Node, ...], first: Node, second: Node, outputs: Collection[int]
) -> tuple[Node, ...] | None:
    """The nodes with two `shard_map`s as one; `None` where that cannot be."""
    alike = all([first.params[key] == second.params[key] for key in _SAME])
    # The equations of a rematerialized function do not say themselves that they belong to a backward pass.
    halves = not first.scope.is_backward and (second.scope.is_backward or first.scope.is_recomputed)
    start, end = nodes.index(first), nodes.index(second)
    # Equations between them change their order, but effects, such as a print, have to keep theirs.
    if not halves or not alike or any([node.eqn.effects for node in nodes[start : end + 1]]):
        return None
    dependent, before, after = {*first.outs}, list[Node](), list[Node]()
    for node in nodes[start + 1 : end]:
        if dependent.isdisjoint(node.ins):
            before.append(node)
        else:
            after.append(node)
            dependent.update(node.outs)
    # An operand of the second that depends on the first must be a result of the first, on the same devices: otherwise
    # an equation between them computes it, or JAX moves it.
    handed_on = [(each.number, each.spec) for each in _operands(second) if each.number in dependent]
    if not {(each.number, each.spec) for each in _results(first)}.issuperset(handed_on):
        return None
    rest = (*after, *nodes[end + 1 :])
    read = {*outputs}.union(*(node.ins for node in rest))
    return (*nodes[:start], *before, _joined(first, second, read), *rest)


def _joined(first: Node, second: Node, read: Collection[int]) -> Node:
    """One node for both, with those results of the first that are `read`."""
    operands, results = _operands(first), _results(first)
    body, backward = open_jaxpr(first.params["jaxpr"]), open_jaxpr(second.params["jaxpr"])
    equations = [_inside(eqn, first.scope) for eqn in body.eqns]
    known = {(each.number, each.spec): each.inside for each in (*operands, *results)}
    names: dict[Any, Any] = {}  # of the second body's variables: those of the first may be the same

    def renamed(atoms: Iterable[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else names[atom] for atom in atoms]

    for each in _operands(second):
        if (each.number, each.spec) not in known:
            known[each.number, each.spec] = Var(each.inside.aval)
            operands.append(each._replace(inside=known[each.number, each.spec]))
        names[each.inside] = known[each.number, each.spec]
    for eqn in backward.eqns:
        names.update({variable: Var(variable.aval) for variable in eqn.outvars})
        eqn = eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars))
        equations.append(_inside(eqn, second.scope))
    results = [each for each in results if each.number in read]
    results += [each._replace(inside=renamed([each.inside])[0]) for each in _results(second)]
    body = body.replace(
        invars=[each.inside for each in operands],
        outvars=[each.inside for each in results],
        eqns=equations,
        effects=body.effects | backward.effects,
    )
    in_specs, out_specs = (tuple(each.spec for each in values) for values in (operands, results))
    eqn = first.eqn.replace(
        invars=[each.outside for each in operands],
        outvars=[each.outside for each in results],
        params={**first.params, "jaxpr": body, "in_specs": in_specs, "out_specs": out_specs},
    )
    ins, outs = (tuple(each.number for each in values) for values in (operands, results))
    # The scopes of the two calls became parts of their equations' name stacks above: the joined call has none itself.
    scope = Scope(type(first.scope.name_stack)(), first.scope.called_at)
    return Node(eqn, ins, outs, scope, first.low_region, first.calls)


def _inside(eqn: Any, scope: Scope) -> Any:
    """An equation of a body with the name stack of the call as a part of its own."""
    source = eqn.source_info
    return eqn.replace(source_info=source.replace(name_stack=scope.name_stack + source.name_stack))
