"""Computing float32 values again on the far side of a dot, instead of keeping them.

What lies inside a GELU, a softmax or a normalisation is float32 and a function of values stored in 16 bits. The
backward pass reads it: kept, it would cost what mixed precision saves; rounded, it would cost accuracy and, in float16,
range. These operations fuse with their readers, so computing them again from the stored values costs no memory traffic
and changes no bit (Chen et al., "Training deep nets with sublinear memory cost", 2016, for whole layers).

Decides which values may be computed again, and which steps nobody needs any more. Does not decide who reads which copy;
see `_plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ._flow import Kind
from ._steps import Plan, Step
from ._table import Rule
from ._wide_product import Cause, WideProduct

_COSTLY = frozenset(
    "exp exp2 expm1 log log1p log2 logistic tanh erf erfc erf_inv pow sin cos tan sqrt rsqrt cbrt".split()
)
_CHEAP = frozenset(
    "add sub mul div max min neg abs sign select_n clamp integer_pow square one_minus_square "
    "broadcast_in_dim reshape squeeze convert_element_type add_any copy".split()
)
# What functions that JAX writes out, such as erfc's derivative, are made of besides.
_BITS = frozenset({"and", "or", "bitcast_convert_type", "polynomial"})
_COMPARISONS = frozenset("lt le gt ge".split())  # equal is what no rounding may come between
_EXPONENTIALS = frozenset({"exp", "exp2", "expm1"})
_RULES = (Rule.HIGH, Rule.WIDEST, Rule.FOLLOW, Rule.SHAPE)


def is_repeatable(step: Step) -> bool:
    """Whether a step is elementwise, so that a compiler fuses it with whatever reads it."""
    if step.node.name == "custom_jvp_call" and len(step.node.outs) == 1:
        return all(inner.node.name in _COSTLY | _CHEAP | _BITS for inner in step.bodies[0].steps)
    return step.entry.rule in _RULES and step.node.name in _COSTLY | _CHEAP


def is_elementwise(step: Step) -> bool:
    """Whether a step as planned, whatever rule it follows, fuses with whatever reads it."""
    return step.run is None and step.node.name in _COSTLY | _CHEAP | _COMPARISONS


def is_costly(step: Step) -> bool:
    """Whether a compiler would rather store the result than compute it twice."""
    inside = (inner for body in step.bodies for inner in body.steps) if step.node.name == "custom_jvp_call" else ()
    return step.node.name in _COSTLY or any(inner.node.name in _COSTLY for inner in inside)


def sources(plan: Plan, number: int, far: bool, seen: set[int]) -> Iterator[int]:
    """The values that reading `number` needs: itself, or what it is computed again from, but for what was `seen`."""
    pending = [number]
    while pending:
        current = pending.pop()
        if not far or current not in plan.again:
            yield current
            continue
        more = [operand for operand in plan.again[current].node.ins if operand not in seen]
        seen.update(more)
        pending.extend(more)


def operands_to_read_again(again: Mapping[int, Step], roots: frozenset[int]) -> frozenset[int]:
    """What products that are computed again read that is neither stored for far readers nor computed again itself."""
    products = (step for step in again.values() if is_short_product(step))
    return frozenset(n for step in products for n in step.node.ins if n not in roots and n not in again)


def is_short_product(step: Step) -> bool:
    """Whether a step is a product written as a few multiplications and additions, which fuse with what reads it."""
    return isinstance(step.entry, WideProduct) and step.entry.cause is Cause.SHORT and not step.entry.of_derivative


def computed_from(plan: Plan, number: int) -> set[int]:
    """All that computing a value again reads, stored or computed again itself."""
    pending, seen = [number], {number}
    while pending:
        step = plan.again.get(pending.pop())
        more = [operand for operand in step.node.ins if operand not in seen] if step else []
        seen.update(more)
        pending.extend(more)
    return seen


def roots_of_exponents(plan: Plan) -> frozenset[int]:
    """The values in the compute dtype from which the far side of a dot computes an exponential again.

    A compiler may drop a rounding that it sees undone, as the near side undoes it. Near and far would then start from
    different bits: to an exponential an absolute error is a relative one, and a softmax and its gradient would no
    longer belong together. So readers round these explicitly, which fuses and costs no memory traffic; reading the
    stored copy instead would make both sides one expression, and have the exponential stored in float32.
    """
    exponentials = [number for number, step in plan.again.items() if step.node.name in _EXPONENTIALS]
    found = {source for number in exponentials for source in computed_from(plan, number)}
    rounded = found & (plan.roots | plan.again.keys())
    return frozenset(number for number in rounded if plan.kinds[number] is Kind.LOW)


def squared_operands(plan: Plan) -> frozenset[int]:
    """The values in the compute dtype that a product, here or in a body, multiplies with themselves.

    What else is computed from them is often subtracted from that, as a squared distance is: it has to read the numbers
    that the product reads.
    """
    read: set[int] = set()
    for step in plan.steps:
        if isinstance(step.entry, WideProduct) and step.entry.cause is Cause.SQUARE:
            read.update(step.node.ins)
        # The last operands of a node are its bodies' arguments; a `while` and a `cond` have others before them.
        for body in step.bodies if step.node.name != "while" else step.bodies[:1]:
            operands = zip(reversed(step.node.ins), reversed(body.program.inputs), strict=False)
            read.update(number for number, inside in operands if inside in body.squared)
    return frozenset(number for number in _moved_from(plan, read) if plan.kinds[number] is Kind.LOW)


def _moved_from(plan: Plan, numbers: set[int]) -> set[int]:
    """The values that some are moved from, and these."""
    found = set(numbers)
    for step in reversed(plan.steps) if found else ():
        if step.entry.rule is Rule.SHAPE and not found.isdisjoint(step.node.outs):
            found.update(step.node.ins)
    return found


def rounded_before_exponentials(steps: Sequence[Step], kinds: Sequence[Kind]) -> frozenset[int]:
    """The values in the compute dtype from which `steps` compute an exponential."""
    found: set[int] = set()
    for step in reversed(steps):
        if step.node.name in _EXPONENTIALS or not found.isdisjoint(step.node.outs):
            found.update(step.node.ins)
    return frozenset(number for number in found if kinds[number] is Kind.LOW)


def mark_unread(plan: Plan) -> set[int]:
    """Marks the steps whose results are only read as computed again, or not at all; returns what else is needed."""
    needed, seen = set(plan.program.outputs), set()
    for step in reversed(plan.steps):
        step.unread = not step.node.eqn.effects and needed.isdisjoint(step.node.outs)
        if not step.unread:
            for number, far in zip(step.node.ins, step.far, strict=True):
                needed.update(sources(plan, number, far, seen))
    return needed
