"""Reading and re-running jaxprs: the one file that knows JAX's program representation.

Decides how a traced program is flattened, how one of its operations is run again and where JAX's versions differ.
Does not decide any dtype; see `_autocast`. Nothing else in the package imports `jax.extend`.

The interfaces used are `jax.extend.core` and `jax.extend.source_info_util`, public though not frozen; they are the
part of JAX's interpreter machinery that has survived releases (eval loops do, `Trace` subclasses do not). The primitive
of JAX's random numbers is imported here too, for `_stochastic_rounding.py`.
"""

import dataclasses
import functools
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import linear_util, source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var
from jax.extend.core.primitives import convert_element_type_p
from jax.extend.random import threefry2x32_p as threefry2x32_p

JAX_FOLDER = os.path.dirname(jax.__file__) + os.sep
# Names that `full_precision` and `low_precision` give to the functions that they jit.
FULL_PRECISION_MARK = "jmp_train_full_precision"
LOW_PRECISION_MARK = "jmp_train_low_precision"

# Call primitives whose bodies are inlined: they change nothing but the name stack.
_INLINED = frozenset({"jit", "closed_call", "call", "eval_jaxpr"})
# Calls that change when their body runs or how it is differentiated, but not what it computes.
CALLS = frozenset({"remat2", "custom_jvp_call", "custom_vjp_call"})
# Equations with one body that runs once: on the operands, or on each device's part of them.
RUN_ONCE = CALLS | {"shard_map"}
_WITH_ONE_BODY = RUN_ONCE | {"jit"}
LOOPS = frozenset({"scan", "while"})
BARRIER = "optimization_barrier"  # of any number of values: each result is the operand of the same place
# The function by which each scatter combines the operand's element and the update.
_COMBINE = {
    "scatter": lambda old, new: new,
    "scatter-add": jax.lax.add,
    "scatter-sub": jax.lax.sub,
    "scatter-mul": jax.lax.mul,
    "scatter-max": jax.lax.max,
    "scatter-min": jax.lax.min,
}
_RECOMPUTED = "rematted_computation"  # what JAX calls the forward pass that rematerialization runs again
_WRAPPER = re.compile(r"^[\w.\-]*\((.*)\)$")  # jvp(...), transpose(...), vmap(...)
_SEPARATOR = re.compile(r"/(?![^()]*\))")  # not the slash in jvp(encoder/layer_0), which is one `jax.named_scope`


class Scope:
    """A name stack, shared by the nodes of one scope.

    Attributes:
      name_stack: as JAX records it.
      called_at: where the outermost of JAX's own functions around its nodes was called, `None` if there is none. JAX
        jits most of `jax.numpy`, and a traceback that is recorded inside a `jit` begins there, without the user's line.
      is_backward: whether its nodes were made by transposing, that is, belong to a backward pass.
      in_jvp: whether its nodes were recorded under forward-mode differentiation: primal and tangent operations.
      is_recomputed: whether its nodes belong to the forward pass that rematerialization runs again in the backward
        pass.
    """

    def __init__(self, name_stack: Any, called_at: Any):
        self.name_stack, self.called_at = name_stack, called_at
        self._text = text = str(name_stack)
        self.is_backward, self.in_jvp = "transpose(" in text, "jvp(" in text
        self.is_recomputed = _RECOMPUTED in text

    @property
    def path(self) -> str:
        """The path of `jax.named_scope` without transforms: forward and backward operations have one path."""
        return plain_scope(self._text)


# `eq=False`: nodes are told apart by identity, which also makes them hashable.
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One operation of a flattened program: `ins` and `outs` index `FlatJaxpr.avals`.

    `calls` are the inlined calls around it, innermost first: JAX cuts a traceback where `jit` begins. `name` is the
    primitive's, `params` are the equation's.
    """

    eqn: JaxprEqn
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    scope: Scope
    low_region: bool
    calls: tuple[JaxprEqn, ...] = ()
    name: str = dataclasses.field(init=False)
    params: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self):
        # Fields, since planning reads them many times.
        object.__setattr__(self, "name", self.eqn.primitive.name)
        object.__setattr__(self, "params", self.eqn.params)


@dataclasses.dataclass(frozen=True, eq=False)
class FlatJaxpr:
    """A jaxpr with its calls inlined, as a straight list of nodes over numbered values.

    Attributes:
      avals: one abstract value per number.
      known: the values that are known, literals and captured arrays, by their numbers.
      captured: the numbers among `known` that are captured arrays (or tracers) rather than literals.
      inputs, outputs: numbers, in the order of the jaxpr's arguments and results.
    """

    avals: list[Any]
    known: dict[int, Any]
    captured: frozenset[int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    nodes: tuple[Node, ...]

    @functools.cached_property
    def producers(self) -> dict[int, Node]:
        """The node that computes each value; none of inputs and of what is known."""
        return {number: node for node in self.nodes for number in node.outs}

    def known_array(self, number: int) -> Any:
        """A known value as an array of its recorded dtype. A literal may be a Python number, which has none."""
        value = self.known[number]
        return value if hasattr(value, "dtype") else np.asarray(value, self.avals[number].dtype)


def trace(fn: Callable, /, *avals, **kwavals) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of `fn` on abstract values (or arrays) and the tree of its result; cached by JAX per function."""
    return jax.make_jaxpr(fn, return_shape=True)(*avals, **kwavals)


def trace_in_place_of(eqn: JaxprEqn, fn: Callable) -> ClosedJaxpr | Jaxpr:
    """The jaxpr of `fn` on the operands of `eqn`, recorded at the source line of `eqn`."""
    with source_info_util.user_context(eqn.source_info.traceback):
        return trace(fn, *(var.aval for var in eqn.invars))[0]


def open_jaxpr(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """The `Jaxpr` itself; from JAX 0.11 both types are one."""
    inner: Any = jaxpr
    return inner.jaxpr if hasattr(inner, "jaxpr") else inner


def consts_of(jaxpr: ClosedJaxpr | Jaxpr) -> Sequence[Any]:
    return getattr(jaxpr, "consts", ())


def sub_jaxprs(params: dict[str, Any]) -> Iterator[ClosedJaxpr | Jaxpr]:
    """Every jaxpr among an equation's parameters, branches included."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (ClosedJaxpr, Jaxpr)):
                yield item


def with_programs(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters of an equation that hold programs which `change` replaces, with the new ones."""

    def new(item: Any) -> Any:
        return change(item) if isinstance(item, (ClosedJaxpr, Jaxpr)) else item

    # Only parameters that `change` replaced: an equation whose programs stay can then be kept. `jax.tree.map` reaches a
    # program alone or in a tuple, named or not, because a program is a leaf to JAX.
    return {
        name: jax.tree.map(new, value)
        for name, value in params.items()
        if any(new(item) is not item for item in sub_jaxprs({name: value}))
    }


def with_params(jaxpr: Any, changed: Callable[[JaxprEqn], dict[str, Any]]) -> Any:
    """A program with some parameters of its equations changed; the program itself if none are."""
    body, equations = open_jaxpr(jaxpr), []
    for eqn in body.eqns:
        params = changed(eqn)
        equations.append(eqn.replace(params={**eqn.params, **params}) if params else eqn)
    if all(map(operator.is_, equations, body.eqns)):  # equations that share a program share it still
        return jaxpr
    body = body.replace(eqns=equations)
    return body if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=body)


def branches_of(eqn: JaxprEqn) -> tuple[int, Sequence[ClosedJaxpr | Jaxpr]]:
    """The programs of which an equation runs one, once, and the position of the operand that is their first argument.

    They are the branches of a `cond`, or what a call runs; none of any other equation.
    """
    if eqn.primitive.name == "cond":
        return 1, eqn.params["branches"]
    return 0, [next(sub_jaxprs(eqn.params))] if eqn.primitive.name in _WITH_ONE_BODY else []


def region_mark(eqn: JaxprEqn) -> str | None:
    """The precision region that an inner `jit` stands for, which survives differentiation by its name."""
    name = eqn.params.get("name") if eqn.primitive.name == "jit" else None
    return name if name in (FULL_PRECISION_MARK, LOW_PRECISION_MARK) else None


def _inlined_body(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    if region_mark(eqn) == FULL_PRECISION_MARK:  # stays one equation, which runs as recorded
        return None
    if any(_specified(s) for key in ("in_shardings", "out_shardings") for s in eqn.params.get(key, ())):
        return None  # a `jit` with shardings of its own is a constraint, not only a call
    return next(sub_jaxprs(eqn.params), None)


def _specified(sharding: Any) -> bool:
    # By name: JAX does not export the type of its `UNSPECIFIED`.
    return type(sharding).__name__ != "UnspecifiedValue"


def flatten(
    jaxpr: ClosedJaxpr | Jaxpr,
    also: Collection[str] = (),
    replaced: Mapping[str, Callable[[JaxprEqn], ClosedJaxpr | Jaxpr | None]] = MappingProxyType({}),
) -> FlatJaxpr:
    """Inline every plain call of `jaxpr`; time and size linear in the equations made.

    Args:
      jaxpr: the program.
      also: further primitives whose bodies are inlined.
      replaced: by primitive, what gives the program that stands for an equation, if another one does.
    """
    inlined = _INLINED.union(also)
    avals: list[Any] = []
    known: dict[int, Any] = {}
    captured: set[int] = set()
    arrays: dict[int, int] = {}  # of captured arrays that are written as literals, by their ids
    nodes: list[Node] = []

    def new(aval: Any) -> int:
        avals.append(aval)
        return len(avals) - 1

    def literal(var: Literal) -> int:
        # With `jax_use_simplified_jaxpr_constants` JAX writes a captured array wherever it is read.
        if np.ndim(var.val) and id(var.val) in arrays:
            return arrays[id(var.val)]
        number = new(var.aval)
        known[number] = var.val
        if np.ndim(var.val):
            captured.add(number)
            arrays[id(var.val)] = number
        return number

    def numbers(env: dict, atoms: Sequence[Any]) -> list[int]:
        return [literal(atom) if isinstance(atom, Literal) else env[atom] for atom in atoms]

    def inline(
        closed: ClosedJaxpr | Jaxpr,
        args: Sequence[int],
        stack: Any,
        low_region: bool,
        calls: tuple[JaxprEqn, ...] = (),
        called_at: Any = None,
    ) -> list[int]:
        body = open_jaxpr(closed)
        # The user's own function, called by one of JAX's, has lines of its own.
        if not _is_of_jax(body):
            called_at = None
        env = dict(zip(body.invars, args, strict=True))
        for var, const in zip(body.constvars, consts_of(closed), strict=True):
            env[var] = new(var.aval)
            known[env[var]] = const
            captured.add(env[var])
        scopes: dict[int, Scope] = {}  # of the equations' name stacks, which JAX shares among those of one scope
        for eqn in body.eqns:
            ins = tuple(numbers(env, eqn.invars))
            inner = None
            if eqn.primitive.name in inlined:
                inner = _inlined_body(eqn)
            elif eqn.primitive.name in replaced:
                inner = replaced[eqn.primitive.name](eqn)
            inner_stack = eqn.source_info.name_stack
            if (key := id(inner_stack)) not in scopes:
                scopes[key] = Scope(stack + inner_stack, called_at)
            scope = scopes[key]
            if inner is not None:
                marked = low_region or region_mark(eqn) == LOW_PRECISION_MARK
                site = called_at or eqn.source_info  # the outermost call
                results = inline(inner, ins, scope.name_stack, marked, (eqn, *calls), site)
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            outs = tuple([new(var.aval) for var in eqn.outvars])
            env.update(zip(eqn.outvars, outs, strict=True))
            if eqn.primitive.name == "device_put":
                for put, operand, result in zip(_each_array(eqn), ins, outs, strict=True):
                    if put.params["devices"] == (None,):  # moves nothing, as in `jax.scipy.sparse.linalg.cg`
                        env[put.outvars[0]] = operand
                    else:
                        nodes.append(Node(put, (operand,), (result,), scope, low_region, calls))
            else:
                nodes.append(Node(eqn, ins, outs, scope, low_region, calls))
        return numbers(env, body.outvars)

    inputs = tuple(new(var.aval) for var in open_jaxpr(jaxpr).invars)
    outputs = tuple(inline(jaxpr, inputs, source_info_util.new_name_stack(), False))
    return FlatJaxpr(avals, known, frozenset(captured), inputs, outputs, tuple(nodes))


def _each_array(device_put: JaxprEqn) -> Iterator[JaxprEqn]:
    """A `device_put` of several arrays as one of each: nothing ties them to each other."""
    for i, variables in enumerate(zip(device_put.invars, device_put.outvars, strict=True)):
        operand, result = variables
        params = {name: value[i : i + 1] for name, value in device_put.params.items()}
        yield device_put.replace(invars=[operand], outvars=[result], params=params)


def last_reads(steps: Sequence[tuple[Collection[int], Collection[int]]], alive: Iterable[int]) -> list[list[int]]:
    """For each step, given the values that it reads and makes, those not `alive` that no later step reads."""
    alive, dying = {*alive}, []
    for reads, made in reversed(steps):
        touched = {*reads, *made}
        dying.append(list(touched - alive))
        alive |= touched
    return dying[::-1]


def contexts(node: Node) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Those of the source line and named scopes, and of the settings, that `node` was recorded with."""
    stack = source_info_util.current_name_stack() + node.scope.name_stack
    source = node.scope.called_at or node.eqn.source_info
    return source_info_util.user_context(source.traceback, name_stack=stack), node.eqn.ctx.manager


def bind(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Run `eqn` on `args`, some of its parameters changed; always returns a list."""
    # JAX keeps some parameters in another form than a primitive is bound with, as the functions of a `custom_jvp_call`.
    params = {**eqn.params, **changed, **_combiner(eqn, args)}
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def applies_function(scatter: JaxprEqn) -> bool:
    """Whether a `scatter` writes a function of what was there, as `x.at[i].apply(fn)` does, rather than its updates."""
    if scatter.params["update_jaxpr"] is None:
        return False
    body = open_jaxpr(scatter.params["update_jaxpr"])  # of what is there and the update, which it returns as it is
    return body.outvars[0] is not body.invars[1]


def _combiner(eqn: JaxprEqn, args: Sequence[Any]) -> dict[str, Any]:
    """The parameters of a scatter that hold its combining function, which is compiled for one dtype."""
    combine = _COMBINE.get(eqn.primitive.name)
    recorded: Any = eqn.invars[0].aval if eqn.invars else None
    if combine is None or eqn.params["update_jaxpr"] is None or args[0].dtype == recorded.dtype:
        return {}
    if eqn.primitive.name == "scatter" and applies_function(eqn):
        raise TypeError(f"a function that is applied to elements was recorded for {recorded.dtype.name}")
    scalar = jax.ShapeDtypeStruct((), args[0].dtype)
    return {"update_jaxpr": open_jaxpr(trace(combine, scalar, scalar)[0]), "update_consts": ()}


def convert(x: Any, dtype: np.dtype, weak_type: bool = False) -> Any:
    """An array in another dtype, and with a weak type if asked for, which the casts that JAX exports do not give.

    >>> convert(jax.numpy.ones(2), np.dtype("float16"), weak_type=True)
    Array([1., 1.], dtype=float16, weak_type=True)
    """
    return convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak_type, sharding=None)


def bind_with_rules(eqn: JaxprEqn, args: Sequence[Any], wrap: Callable[..., tuple[Callable, ...]]) -> list[Any]:
    """Run a `custom_jvp_call` or `custom_vjp_call` with its function and rules replaced by `wrap(*originals)`."""
    params = dict(eqn.primitive.get_bind_params(dict(eqn.params)))
    # The function itself and its rules, as callables of flat arguments.
    originals = params.pop("subfuns")
    replaced = wrap(*(fun.call_wrapped for fun in originals))
    subfuns = tuple(
        linear_util.wrap_init(new, debug_info=old.debug_info) for new, old in zip(replaced, originals, strict=True)
    )
    return list(eqn.primitive.bind(*args, subfuns=subfuns, **params))


def bind_with_bodies(eqn: JaxprEqn, args: Sequence[Any], bodies: Sequence[ClosedJaxpr], **changed: Any) -> list[Any]:
    """Run `eqn` with other programs inside; of a `while` the body comes first."""
    if eqn.primitive.name == "cond":
        return bind(eqn, args, branches=tuple(bodies))
    if eqn.primitive.name == "remat2":  # takes a jaxpr without constants: they become operands
        (body,) = bodies
        jaxpr = open_jaxpr(body)
        if jaxpr.constvars:  # otherwise equations that share a body share it still
            jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        return bind(eqn, [*consts_of(body), *args], jaxpr=jaxpr)
    keys = [key for key, value in eqn.params.items() if isinstance(value, ClosedJaxpr)]
    if eqn.primitive.name == "while":
        keys = ["body_jaxpr", "cond_jaxpr"]
    return bind(eqn, args, **dict(zip(keys, bodies, strict=True)), **changed)


class Loop(NamedTuple):
    """A `scan` or `while`: its operands are constants of a condition, constants, the carry, and rows.

    Attributes:
      body: is given all but the first, and returns the carry and rows.
      consts: how many constants.
      carry: how many carried values.
      skip: how many constants of a `while`'s condition.
      condition: of a `while`; is given its constants and the carry.
    """

    body: ClosedJaxpr
    consts: int
    carry: int
    skip: int = 0
    condition: ClosedJaxpr | None = None


def loop_of(eqn: JaxprEqn) -> Loop | None:
    """The loop that an equation is, if it is one."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        return Loop(params["jaxpr"], *scan_counts(eqn))
    if eqn.primitive.name != "while":
        return None
    consts, skip = params["body_nconsts"], params["cond_nconsts"]
    return Loop(params["body_jaxpr"], consts, len(eqn.outvars), skip, params["cond_jaxpr"])


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many constants and how many carried values lead a `scan`'s operands."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].update(range(len(eqn.invars))).unpack()  # from JAX 0.12: three trees
    return len(list(consts)), len(list(carry))


# A model of many layers has as many name stacks, each asked for by several passes.
@functools.lru_cache(maxsize=4096)
def plain_scope(stack: str) -> str:
    """A name stack without its transforms.

    >>> plain_scope("transpose(jvp(Net))/Block"), plain_scope("transpose(jvp(Net/Block))/mul")
    ('Net/Block', 'Net/Block/mul')
    >>> plain_scope("transpose(jvp(Net))/rematted_computation/Block")
    'Net/Block'
    """
    segments: list[str] = []
    for segment in _SEPARATOR.split(stack):
        name = segment  # such as transpose(jvp(Net)), or Block
        while match := _WRAPPER.match(name):
            name = match.group(1)
        names = [part for part in name.strip("()").split("/") if part and part != _RECOMPUTED]
        if name != segment and names and segments[: len(names)] == names:
            segments.clear()  # a transposed call repeats its path: transpose(jvp(Net))/Block/jvp(Net)/Block
        segments += names
    return "/".join(segments)


def leave_out_of_source_lines(path: str) -> None:
    """Makes JAX name the caller as the source of equations that functions in `path` record, as for JAX's own files."""
    source_info_util.register_exclusion(path)


def _is_of_jax(jaxpr: Jaxpr) -> bool:
    return JAX_FOLDER in (jaxpr.debug_info.func_src_info or "")


def is_in_function_of_jax(node: Node, name: str) -> bool:
    """Whether JAX recorded the node in a function of its own that has this name."""
    bodies = (open_jaxpr(call.params["jaxpr"]) for call in node.calls if call.params.get("name") == name)
    return any(map(_is_of_jax, bodies))


def source_line(node: Node) -> str:
    """`file:line (function)` of the user's code that recorded the node."""
    return source_info_util.summarize(node.scope.called_at or node.eqn.source_info)
