"""The rule of each equation before dtypes are assigned: for small programs, that of one primitive, and its reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import SingleDeviceSharding
from pass_tools import add_any

from jmp_train import DEFAULT_RULES, full_precision, low_precision
from jmp_train._autocast.analysis.entries import entries_of
from jmp_train._autocast.ir import TOP
from jmp_train._autocast.passes.rewrites import REWRITES
from jmp_train._autocast.primitives import TABLE, Rule
from jmp_train._jaxpr import flatten

X = np.ones((8, 8), np.float32)
HALF, DOUBLE, COMPLEX = X.astype(np.float16), jax.ShapeDtypeStruct((8, 8), np.float64), X.astype(np.complex64)
IN_SCOPE = DEFAULT_RULES.with_scopes({"wide": "float32", "narrow": "float16"})


def entry(name, fn, *args, rules=DEFAULT_RULES, place=TOP):
    """The entry of the last equation of a primitive."""
    program = flatten(jax.make_jaxpr(fn)(*args))
    entries = entries_of(program, rules, place, REWRITES)
    return next(e for node, e in reversed(list(zip(program.nodes, entries, strict=True))) if node.name == name)


def scoped(name, fn):
    def run(*args):
        with jax.named_scope(name):
            return fn(*args)

    return run


def strong(x):
    return lax.convert_element_type_p.bind(x, new_dtype=np.dtype(np.float32), weak_type=False, sharding=None)


def padded(x, before, after):
    return lax.pad(x, np.float32(0), [(before, after, 0), (0, 0, 0)])


def on_one_device():
    return SingleDeviceSharding(jax.devices()[0])


def dot(x, y, dtype=None):
    return lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=dtype)


# Cases with another rule than the table's row: (primitive, program, its rule, a part of the reason).
REFINED = {
    "a square": ("mul", lambda x: x * x, Rule.HIGH, "square"),
    "a tree of sums": ("add", lambda x: x[:4] + x[4:], Rule.HIGH, "parts of one value"),
    "a gradient's tree of sums": ("add_any", lambda x: add_any(x[:4], x[4:]), Rule.HIGH, "parts of one value"),
    "a product of another dtype": (
        "mul",
        lambda x: lax.mul(x, x.T, out_dtype=np.float32),
        Rule.RECORDED,
        "asked for this dtype",
    ),
    "a cast of a weak type": (
        "convert_element_type",
        lambda x: strong(jnp.sin(1.0) * x[0, 0]),
        Rule.SHAPE,
        "no change",
    ),
    "a sum of one number": ("reduce_sum", lambda x: jnp.sum(x[:1], 0), Rule.SHAPE, "one number"),
    "a function in a scatter": ("scatter", lambda x: x.at[0].apply(jnp.sin), Rule.RECORDED, "user's function"),
    "integers": ("add", lambda x: x.astype(int) + 1, Rule.RECORDED, "not recorded in float32"),
    "full precision": ("jit", full_precision(lambda x: x @ x), Rule.RECORDED, "full_precision"),
    "low precision": ("exp", low_precision(jnp.exp), Rule.LOW, "low_precision"),
    "a wide scope": ("dot_general", scoped("wide", lambda x: x @ x), Rule.RECORDED, "with_scopes"),
    "a narrow scope": ("exp", scoped("narrow", jnp.exp), Rule.LOW, "with_scopes"),
    "a narrow region in a wide scope": ("exp", scoped("wide", low_precision(jnp.exp)), Rule.LOW, "low_precision"),
}
# Cases with the rule of the table's row: (primitive, program).
AS_IN_TABLE = {
    "a factor of two": ("add", lambda x: (half := x[:4]) + half),
    "two values": ("add", lambda x: x + jnp.sin(x)),
    "parts of two values": ("add", lambda x: x[:4] + jnp.sin(x)[4:]),
    "disjoint parts": ("add", lambda x: padded(x[:4], 0, 4) + padded(x[4:], 4, 0)),
    "a difference of parts": ("sub", lambda x: x[:4] - x[4:]),
    "a product of two values": ("mul", lambda x: x * x.T),
    "a cast to 16 bits": ("convert_element_type", lambda x: x.astype(np.float16)),
    "a sum of several numbers": ("reduce_sum", lambda x: jnp.sum(x[:2], 0)),
    "a scatter of numbers": ("scatter", lambda x: x.at[0].set(1.0)),
    "a sum in a narrow scope": ("reduce_sum", scoped("narrow", jnp.sum)),
    "a sum in a narrow region": ("reduce_sum", low_precision(jnp.sum)),
    "a call with shardings": ("jit", lambda x: jax.jit(jnp.sin, out_shardings=on_one_device())(x)),
    "a loop in a wide scope": ("scan", scoped("wide", lambda x: lax.scan(lambda c, r: (c + r, c), x[0], x)[0])),
}
# Operands that are not float32: (primitive, program, operand, a part of the reason, or `None` for the table's row).
OF_DTYPES = {
    "a sum of integers": ("reduce_sum", jnp.sum, np.ones(8, np.int32), "not recorded in float32"),
    "a sum in 16 bits": ("reduce_sum", lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), HALF, None),
    "an exponential in 16 bits": ("exp", jnp.exp, HALF, "not recorded in float32"),
    "a dot of doubles": ("dot_general", lambda d: dot(X, d), DOUBLE, "float64"),
    "a dot of complex numbers": ("dot_general", lambda c: c @ c, COMPLEX, "not recorded"),
    "a dot that makes complex numbers": ("dot_general", lambda c: dot(X, c), COMPLEX, "complex64"),
    "a dot that makes doubles": ("dot_general", lambda x: dot(x, x, np.float64), X, "float64"),
}


@pytest.mark.parametrize("case", REFINED)
def test_what_a_program_says_beside_the_table(case):
    name, fn, rule, reason = REFINED[case]
    found = entry(name, fn, X, rules=IN_SCOPE)
    assert found.rule is rule
    assert reason in found.reason


@pytest.mark.parametrize("case", AS_IN_TABLE)
def test_otherwise_the_tables_row_holds(case):
    name, fn = AS_IN_TABLE[case]
    assert entry(name, fn, X, rules=IN_SCOPE) is TABLE[name]


@pytest.mark.parametrize("case", OF_DTYPES)
def test_what_is_not_recorded_in_float32_runs_as_recorded_unless_it_would_sum_in_16_bits(case):
    name, fn, operand, reason = OF_DTYPES[case]
    with jax.enable_x64(True):
        found = entry(name, fn, operand)
    if reason is None:
        assert found is TABLE[name]
    else:
        assert found.rule is Rule.RECORDED
        assert reason in found.reason


def test_an_edit_is_stronger_than_a_rewrite_and_weaker_than_a_scope():
    edited = IN_SCOPE.replace({"reduce_sum": "high", "exp": "high"})
    assert entry("reduce_sum", lambda x: jnp.sum(x[:1], 0), X, rules=edited).rule is Rule.HIGH
    assert entry("exp", scoped("narrow", jnp.exp), X, rules=edited).rule is Rule.LOW


@pytest.mark.parametrize("rule", [Rule.FOLLOW, Rule.WIDEST])
@pytest.mark.parametrize("name, fn", [("add", lambda x: x[:4] + x[4:]), ("mul", lambda x: x * x)])
def test_an_edit_holds_for_trees_and_squares(name, fn, rule):
    assert entry(name, fn, X, rules=DEFAULT_RULES.replace({name: rule})).rule is rule


def test_a_body_inside_a_region_is_in_it():
    assert entry("exp", jnp.exp, X, place=TOP._replace(low_region=True)).rule is Rule.LOW
