"""Why an equation gave a non-finite value, and what cures it.

Decides the verdict and its cure from the equation's own operands, run again in float32, and from a run of the whole
program in float32. Does not decide which equation is to blame; see `_taint.py` and `_find_overflow.py`.
"""

import dataclasses
import enum
import glob
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._dtypes import FLOAT16, FLOAT32, FLOAT64, facts
from ..._paths import glob_matches
from ..._tracebacks import is_asked_for
from ..interpreter import Interpreter, Site, Value, Watcher, is_narrow, to_host, wide_params
from ._source_lines import (
    between_user_and_jax,
    flax_module,
    is_cast_for_low_precision,
    is_in_autocast,
    is_in_region,
    user_line,
)
from ._taint import contents_of_refs, has_nonfinite, is_inexact, makes_nan

_OUTSIDE_JAX = frozenset({"pure_callback", "io_callback", "ffi_call"})


class Verdict(enum.StrEnum):
    """What is to be done about a non-finite value; the `verdict` of `find_overflow`."""

    LOWER_SCALE = "lower_scale"
    """The loss scale alone made it: with a smaller one the same program is finite."""
    KEEP_FLOAT32 = "keep_float32"
    """16 bits made it: from the same operands, or from operands that were not rounded, float32 is finite."""
    MODEL = "model"
    """Non-finite in float32 too: log(0), division by zero, the derivative of a root at 0."""
    INPUT = "input"
    """An argument or a captured array held it."""
    UNKNOWN = "unknown"
    """It was made inside an operation that cannot be looked into, or that cannot run in float32."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Captured:
    """An equation as it ran: its site, operands and results."""

    site: Site
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


class _Stop(Exception):
    """Ends a run once the equation in question has run."""


class _Capture(Watcher):
    def __init__(self, number: int):
        self._left = number
        self.captured: Captured | None = None

    def watch(self, site: Site, inputs: Sequence[Value], outputs: Sequence[Any]) -> Sequence[Any]:
        self._left -= 1
        if not self._left:
            results = (*outputs, *contents_of_refs(inputs))
            self.captured = Captured(site, tuple(value.array for value in inputs), results)
            raise _Stop
        return super().watch(site, inputs, outputs)


def capture(interpreter: Interpreter, args: Sequence[Value], number: int) -> Captured | None:
    """Runs up to the equation of this number, counted from 1, and returns it; `None` if fewer run."""
    watcher = _Capture(number)
    try:
        interpreter.run(args, watcher)
    except _Stop:
        pass
    return watcher.captured


def diagnose(
    interpreter: Interpreter,
    args: Sequence[Value],
    number: int,
    found: Captured,
    narrowed_by_user: bool,
    scopes: Iterable[str],
) -> tuple[Verdict, str, str]:
    """Returns the verdict on an equation that no loss scale cures, why, and the cure.

    Args:
      interpreter, args: the run.
      number: of the equation, counted from 1.
      found: the same equation, as it ran.
      narrowed_by_user: whether the program itself, rather than autocast, computes it in 16 bits.
      scopes: of all equations.
    """
    if found.site.primitive in _OUTSIDE_JAX:
        why = f"{found.site.primitive} calls a function outside of JAX."
        return Verdict.UNKNOWN, why, "Look at what that function returns for these operands."
    if found.site.primitive in interpreter.not_entered():
        return Verdict.UNKNOWN, *_not_entered(found.site)
    narrow = next((x.dtype for x in (*found.results, *found.operands) if is_narrow(x)), None)
    wide = None if narrow is None else _in_float32(found)
    if narrow is not None and wide is not None and not any(map(has_nonfinite, wide)):
        largest = max(float(np.max(np.abs(to_host(x)))) for x in wide if is_inexact(x))
        why = f"{narrow.name} ends at {facts(narrow).max:.6g}; from the same operands float32 reaches {largest:.4g}."
        return Verdict.KEEP_FLOAT32, why, _cure_in_float32(found.site, narrowed_by_user, scopes)
    # The operands may be at fault: a divisor that was rounded to zero is zero in float32 too. Equations run in the same
    # order in float32, unless a branch or a loop's end depends on rounding.
    wide_run = capture(Interpreter(interpreter.jaxpr, wide=True), args, number)
    if wide_run is not None and _is_same(wide_run.site, found.site) and not any(map(has_nonfinite, wide_run.results)):
        why = "Its operands were rounded in 16 bits before, to zero or too far; in float32 throughout it is finite."
        return Verdict.KEEP_FLOAT32, why, _cure_in_float32(found.site, narrowed_by_user, scopes)
    if narrow == FLOAT16 and _infinities_meet(found):
        # What was given, or overflowed, is to blame itself: these are written in the program. A constant that float16
        # does not hold, such as the -1e9 of a mask, is infinite as soon as JAX records it.
        why = "Infinities meet here, and float16 numbers beyond 65504 are infinite, as the -1e9 of a mask is."
        return Verdict.KEEP_FLOAT32, why, "Mask with jnp.finfo(jnp.float16).min, or in float32."
    if narrow is not None and wide is None:
        why = f"{found.site.primitive} was written for {narrow.name} and cannot be run in float32, to compare."
        return Verdict.UNKNOWN, why, "Compute it in float32, or make its operands smaller."
    return Verdict.MODEL, *_cause_in_model(found, narrow)


def _not_entered(site: Site) -> tuple[str, str]:
    why, cure = f"{site.primitive} runs as one operation.", "Call find_overflow on what is inside."
    if site.primitive == "shard_map":
        why = "This shard_map runs as one operation: it holds another one, or a collective that is not known here."
        cure = (
            "Call find_overflow on jax.vmap(fn, axis_name=...) of the function inside, on what each device gets, "
            "stacked; or on the function inside alone."
        )
    return why, cure


def _is_same(a: Site, b: Site) -> bool:
    return a.node.eqn is b.node.eqn and a.loops == b.loops


def _in_float32(found: Captured) -> list[Any] | None:
    """The equation's results from the same operands in float32; `None` if it takes no such operands."""
    if any(isinstance(operand, jax.Ref) for operand in found.operands):
        return None  # it has been written to
    operands = [jnp.asarray(x, FLOAT32) if is_narrow(x) else x for x in found.operands]
    try:
        return found.site.bind(operands, **wide_params(found.site.node))
    except Exception:  # primitives reject dtypes they were not recorded with by exceptions of any type
        return None


def _cure_in_float32(site: Site, narrowed_by_user: bool, scopes: Iterable[str]) -> str:
    """The line to paste that keeps an equation in float32."""
    if site.collective_axes:
        return (
            "Reduce in float32: a policy with reduce_dtype=jnp.float32, or .astype(jnp.float32) before the collective."
        )
    line = user_line(site)
    where = f"{line.file}:{line.number}" if line else "this operation"
    in_autocast = is_in_autocast(site)
    if is_in_region(site) and not narrowed_by_user:  # in `full_precision` nothing else narrows
        return (
            f"{where} is inside a function marked low_precision, for which no rules hold: take the mark off it, or "
            f"wrap the function of this line: jmp.full_precision(fn)."
        )
    if is_cast_for_low_precision(site):
        return (
            f"{where} is inside a function that low_precision(fn, dtype=...) hands 16-bit operands: leave that out, or "
            f"give it the other 16-bit dtype; bfloat16 has the range of float32, float16 three bits more."
        )
    if narrowed_by_user or in_autocast is False:
        if site.primitive == "convert_element_type" and is_asked_for(site.node):
            if between_user_and_jax(site) is None:
                return "Leave out this cast, or divide the value by a constant before it."
            return (
                "A library casts this to the dtype of something stored, as updated parameters are: store that in "
                "float32 or bfloat16, or make the value smaller, by a smaller learning rate say."
            )
        module = f", or give the Flax module `{name}` dtype=jnp.float32" if (name := flax_module(site)) else ""
        return f"The program itself computes this in 16 bits: widen the operands with .astype(jnp.float32){module}."
    around, pattern = "", glob.escape(site.scope)
    if not _has_glob(site.scope) or any(scope != site.scope and glob_matches(pattern, scope) for scope in scopes):
        around = f"Put `with jax.named_scope('wide'):` around {where}, and pass "
        pattern = "wide"
    rules = f'rules=jmp.DEFAULT_RULES.with_scopes({{{json.dumps(pattern, ensure_ascii=False)}: "float32"}})'
    cure = f"{around or 'Pass '}{rules}; or wrap the function of this line: jmp.full_precision(fn)."
    if in_autocast is None:
        cure += " Without autocast, the program itself computes this in 16 bits: widen the operands with .astype."
    return cure


def _has_glob(scope: str) -> bool:
    """Whether a glob can name a scope: an empty one has no name, and globs lose spaces at their ends."""
    return bool(scope) and scope == scope.strip() and "." not in scope.split("/") and scope.isprintable()


_CLIPPED = "jnp.clip(x, -1, 1), or a little less than that if it is differentiated"
# By primitive: why it is non-finite in float32 too, and the cure.
_CAUSES = {
    "log": ("the logarithm of zero or of a negative number", "jnp.log(jnp.maximum(x, 1e-6)), or jax.nn.log_softmax"),
    "log1p": ("the logarithm of zero or of a negative number", "keep its operand above -1"),
    "div": ("a division by zero", "divide by jnp.where(d == 0, 1, d) and select afterwards"),
    "rem": ("a remainder by zero", "divide by jnp.where(d == 0, 1, d) and select afterwards"),
    "sqrt": ("the root of a negative number", "jnp.sqrt(jnp.maximum(x, 0))"),
    "rsqrt": ("the reciprocal root of zero or of a negative number", "add an epsilon inside the root"),
    "pow": ("a power of zero or of a negative number", "keep the base positive"),
    "integer_pow": ("a negative power of zero", "keep the base away from zero"),
    "exp": ("the exponential of a number that is too large", "subtract the maximum first, as jax.nn.softmax does"),
    "atanh": ("the inverse hyperbolic tangent of 1 or more", "keep its operand inside (-1, 1)"),
    "acos": ("the arc cosine of a number beyond 1", _CLIPPED),
    "asin": ("the arc sine of a number beyond 1", _CLIPPED),
    "acosh": ("the inverse hyperbolic cosine of a number below 1", "jnp.maximum(x, 1)"),
    "erf_inv": ("the inverse error function of 1 or more", "keep its operand inside (-1, 1)"),
    "cholesky": ("the factor of a matrix that is not positive definite", "add a multiple of the identity"),
    "lgamma": ("a pole of the function", "keep its operand positive"),
    "digamma": ("a pole of the function", "keep its operand positive"),
    "gather": ("an index out of bounds, for which jnp.take and nn.Embed give NaN", "keep indices inside the array"),
}


_POLES = {"div": 1, "pow": 0, "integer_pow": 0}
"""By primitive: the operand whose zeros are poles."""
_UNDEFINED = ("it is not defined for these operands, or infinities cancel inside it", "look at its operands")


def _cause_in_model(found: Captured, narrow: Any) -> tuple[str, str]:
    site = found.site
    is_double = any(getattr(x, "dtype", None) in (FLOAT64, np.complex128) for x in found.results)
    wide = "float64" if is_double else "float32"
    if _is_too_large(found):
        what, cure = f"the result exceeds {wide}", "make its operands smaller"
        if site.primitive == "div":
            cure = "keep the divisor away from zero"
        elif _adds_lowest(found):
            cure = "mask with a number such as -1e9, to which another can be added"
    else:
        what, cure = _CAUSES.get(site.primitive, _UNDEFINED)
        if _infinities_meet(found):
            what, cure = "infinities meet here", "a row that is masked everywhere needs a finite mask, such as -1e9"
            what += ": infinity minus infinity, or infinity times zero, is NaN"
        if (site.backward or site.derivative) and site.primitive in ("div", "pow", "rsqrt", "mul", "integer_pow"):
            what += ", in a derivative: that of a root, a norm or a quotient at 0"
            cure = "replace the operand first, jnp.where(x == 0, 1, x), and select the result afterwards; "
            cure += "or add an epsilon"
        if narrow is not None and site.primitive in ("div", "log", "rsqrt", "rem"):
            smallest = facts(narrow).smallest_subnormal / 2
            cure += f" (a constant of {smallest:.1g} or less is zero in {narrow.name})"
    return f"Non-finite in {wide} too: {what}.", f"It is the model's own: {cure}."


def _infinities_meet(found: Captured) -> bool:
    """Whether infinite operands gave NaN."""
    return makes_nan(found.operands, list(map(has_nonfinite, found.operands)), found.results)


def _adds_lowest(found: Captured) -> bool:
    """Whether the lowest number of a dtype, with which masks are often written, is added to something."""
    arrays = [to_host(x) for x in found.operands if is_inexact(x)]
    return found.site.primitive == "add" and any(np.any(x == -facts(x.dtype).max) for x in arrays)


def _is_too_large(found: Captured) -> bool:
    """Whether operands of which none is at a pole of the operation gave infinities, and not because infinities met."""
    primitive, operands = found.site.primitive, found.operands
    if _infinities_meet(found) or not any(np.any(np.isinf(to_host(x))) for x in found.results if is_inexact(x)):
        return False
    if primitive in _POLES:
        return bool(np.all(to_host(operands[_POLES[primitive]])))
    return primitive not in _CAUSES
