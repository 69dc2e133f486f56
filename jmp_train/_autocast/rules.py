"""`Rules`: the table with a user's edits, and the marks that set the precision of a region.

Decides which rule holds for an operation: the region it is in, over its named scope, over its primitive. Does not
decide dtypes, which depend on the operation's neighbours; see `passes`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from .._dtypes import BFLOAT16, FLOAT16, FLOAT32, cast_floating, did_you_mean, facts, to_dtype
from .._jaxpr import FULL_PRECISION_MARK, LOW_PRECISION_MARK
from .._paths import check_glob, glob_matches
from .._static import hide_static, of_hidden
from .._text import short_repr
from .._values import check_callable, set_fields
from .primitives import TABLE, UNKNOWN, Entry, Rule

P = ParamSpec("P")
R = TypeVar("R")

# Rules that say what a primitive is, rather than in which dtype it runs: no edit may give them to another primitive.
_FIXED = (Rule.ENTER, Rule.COLLECTIVE)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which operations run in 16 bits: the table of primitives, with edits. Immutable, hashable.

    Precedence, strongest first: a region (`full_precision`, `low_precision`), a named scope (`with_scopes`), an edit
    (`replace`), the table.

    Attributes:
      edits: `(primitive name, rule)` pairs that replace rows of the table.
      scopes: `(glob, dtype)` pairs over `jax.named_scope` paths; the last that matches wins.
      low_residuals: whether float32 values that are saved for the backward pass across a dot, or for the equations that
        need a norm's sums, are stored in the compute dtype. They are computed in float32 either way.

    >>> rules = DEFAULT_RULES.replace({"exp": Rule.FOLLOW}).with_scopes({"LayerNorm*": "float32"})
    >>> rules.entry("exp").rule, rules.scope_dtype("Block_0/LayerNorm_1")
    (<Rule.FOLLOW: 'follow'>, dtype('float32'))
    """

    edits: tuple[tuple[str, Rule], ...] = ()
    scopes: tuple[tuple[str, np.dtype], ...] = ()
    low_residuals: bool = True

    def __post_init__(self) -> None:
        # Sorted, so that rules with the same edits are equal and hash alike. The order of scopes decides, and is kept.
        edits = dict(_pairs("edits", self.edits, "{'exp': 'follow'}"))
        scopes = _pairs("scopes", self.scopes, "{'LayerNorm*': 'float32'}")
        rules = {name: _to_rule(name, rule) for name, rule in edits.items()}
        set_fields(
            self,
            edits=tuple(sorted(rules.items(), key=lambda edit: edit[0])),
            scopes=tuple((check_glob("scopes", glob), _to_scope_dtype(glob, dtype)) for glob, dtype in scopes),
        )

    def replace(self, edits: Mapping[str, Rule | str]) -> "Rules":
        """Returns rules in which the named primitives follow another rule.

        Args:
          edits: primitive names (`"exp"`, `"dot_general"`: as `jax.make_jaxpr` prints them) and the rule for each,
            a `Rule` or its name.

        Raises:
          TypeError: `edits` is no dictionary from names.
          ValueError: the name is no primitive of the table, or the rule is none that can be given.

        >>> DEFAULT_RULES.replace({"tanh": "high"}).entry("tanh").rule
        <Rule.HIGH: 'high'>
        """
        new = dict(_pairs("edits", edits, "{'exp': 'follow'}"))
        return dataclasses.replace(self, edits=tuple({**dict(self.edits), **new}.items()))

    def with_scopes(self, scopes: Mapping[str, DTypeLike]) -> "Rules":
        """Returns rules that set the precision of parts of a model by their `jax.named_scope` path.

        Linen puts every module on this path; forward and backward operations of a module have the same path. A glob
        matches whole segments at any depth, and all scopes below; `Net/.` matches only operations directly in `Net`,
        `.` those without a scope. `explain` reports a scope that matched nothing; in `assert_policy` it is an error.

        Args:
          scopes: globs and, for each, `"float32"` (runs as recorded, nothing narrowed) or a 16-bit dtype, which must be
            the policy's compute dtype (everything narrowed but sums).

        Raises:
          TypeError: `scopes` is no dictionary from globs.
          ValueError: a glob has an empty segment, or the dtype is none of the two.

        >>> DEFAULT_RULES.with_scopes({"Dense_?": "float32"}).scope_dtype("MLP/Dense_3")
        dtype('float32')
        """
        added = _pairs("scopes", scopes, "{'LayerNorm*': 'float32'}")
        return dataclasses.replace(self, scopes=(*self.scopes, *added))

    def with_residuals(self, dtype: DTypeLike | None) -> "Rules":
        """Returns rules that store values for the backward pass in `"float32"`, or (`None`) in the compute dtype.

        >>> DEFAULT_RULES.with_residuals("float32").low_residuals
        False
        """
        if dtype is not None and to_dtype(dtype, "dtype") != FLOAT32:
            raise ValueError(f"`dtype` is {dtype!r}; use 'float32', or None for the policy's compute dtype.")
        return dataclasses.replace(self, low_residuals=dtype is None)

    def entry(self, primitive: str) -> Entry:
        """Returns the table's row for a primitive, edits included."""
        entry = TABLE.get(primitive, UNKNOWN)
        rule = self._edits.get(primitive)
        return entry if rule is None else dataclasses.replace(entry, rule=rule, reason="set by Rules.replace")

    def scope_dtype(self, scope: str) -> np.dtype | None:
        """Returns what `with_scopes` says of a scope path, `None` if nothing."""
        return next((dtype for glob, dtype in reversed(self.scopes) if glob_matches(glob, scope)), None)

    @functools.cached_property
    def _edits(self) -> dict[str, Rule]:
        return dict(self.edits)


def check_rules(rules: Any) -> None:
    if not isinstance(rules, Rules):
        got = short_repr(rules)
        raise TypeError(
            f"`rules` must be a Rules, got {got}; edit the default: DEFAULT_RULES.replace({{...}}). Arguments of the "
            f"function belong to the one that is returned: explain(fn, policy)(*args)."
        )


def _pairs(argument: str, value: Any, example: str) -> list[tuple[str, Any]]:
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 and isinstance(p[0], str) for p in pairs):
        return list(pairs)
    raise TypeError(f"`{argument}` must be a dictionary from names, such as {example}; got {short_repr(value)}.")


def _to_scope_dtype(glob: str, dtype: DTypeLike) -> np.dtype:
    found = to_dtype(dtype, f"scopes[{glob!r}]")
    if facts(found).bits not in (16, 32):
        raise ValueError(f"`scopes` sets {glob!r} to {found.name}; use float32 or a 16-bit dtype.")
    return found


def _to_rule(name: str, rule: Rule | str) -> Rule:
    if name not in TABLE:
        raise ValueError(
            f"`edits` names {name!r}, which is no primitive of the table{did_you_mean(name, TABLE)}; use a name as "
            f"`jax.make_jaxpr` prints it."
        )
    try:
        rule = Rule(rule)
    except ValueError:
        valid = [valid.value for valid in Rule if valid not in _FIXED]
        raise ValueError(
            f"`edits[{name!r}]` is {rule!r}, which is no rule{did_you_mean(str(rule), valid)}; use one of {valid}."
        ) from None
    if rule in _FIXED or (TABLE[name].rule in _FIXED and rule is not Rule.RECORDED):
        raise ValueError(
            f"`edits[{name!r}]` is {rule}, but {name} is {TABLE[name].rule} in the table: a collective, or a primitive "
            f"with a program inside, can only be set to Rule.RECORDED, and no other primitive can become one."
        )
    return rule


DEFAULT_RULES = Rules()


def _marked(fn: Callable[P, R], mark: str) -> Callable[P, R]:
    check_callable("fn", fn, "pass the function whose operations are to be marked")

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        body = of_hidden(fn)  # a new function, which may be given a name
        # JAX records the name as a parameter of the call, which `grad`, `vmap` and loops preserve.
        body.__name__ = body.__qualname__ = mark
        return jax.jit(body)(*hide_static(args), **hide_static(kwargs))

    return call


def full_precision(fn: Callable[P, R]) -> Callable[P, R]:
    """Marks a function: inside it autocast runs everything as recorded, with nothing narrowed.

    Products of float32 numbers are not computed in TF32 either, unless their precision or the policy's is set.

    In a float32 trace `x.astype(jnp.float32)`, the usual guard of hand-written mixed precision, records nothing, so
    that autocast cannot see it. It sees this mark, which `grad`, `jit`, `vmap` and loops preserve. Without autocast the
    mark changes nothing.

    Args:
      fn: a function of pytrees. Arrays in them are traced, as under `jax.jit`; everything else arrives as it is.

    Returns:
      A function with the same arguments and results.

    >>> @full_precision
    ... def normalise(x):
    ...     return x / jax.numpy.sum(x)
    >>> float(normalise(np.ones(4, np.float32))[0])
    0.25
    """
    return _marked(fn, FULL_PRECISION_MARK)


def low_precision(fn: Callable[P, R], *, dtype: DTypeLike | None = None) -> Callable[P, R]:
    """Marks a function: inside it autocast narrows every operation but sums, whatever the table says.

    Args:
      fn: a function of pytrees; arrays in it are traced, as under `jax.jit`.
      dtype: `None` for the policy's compute dtype, which marks the region and changes nothing without autocast. With a
        dtype, floating arguments are cast to it when `fn` is called, and floating results back to float32: for kernels
        that accept only 16-bit operands and cannot be traced with others.

    Returns:
      A function with the same arguments and results.

    Raises:
      TypeError: `fn` is not callable, or `dtype` no dtype.
      ValueError: `dtype` is neither float16 nor bfloat16.

    >>> scores = low_precision(jax.numpy.exp)
    >>> attend = low_precision(lambda x: x.dtype.name, dtype="bfloat16")
    >>> attend(np.ones(3, np.float32))
    'bfloat16'
    """
    if dtype is None:
        return _marked(fn, LOW_PRECISION_MARK)
    narrow = to_dtype(dtype, "dtype")
    if narrow not in (FLOAT16, BFLOAT16):
        raise ValueError(
            f"`dtype` must be 'float16' or 'bfloat16', got {narrow.name}. "
            "`full_precision` marks what has to run in float32."
        )
    check_callable("fn", fn, "pass the function whose operations are to be marked")

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = cast_floating((args, kwargs), narrow)
        return cast_floating(fn(*args, **kwargs), FLOAT32)

    return call
