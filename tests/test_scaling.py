"""scale and unscale: for every kind of leaf, the dtype of the computation and the numbers."""

# Arguments of the wrong type are half of what some tests are about.
# pyright: reportArgumentType=false

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_train import DynamicLossScale, NoOpLossScale, StaticLossScale, all_finite, select_tree
from jmp_train._diagnostics.interpreter import Interpreter, Value, Watcher
from jmp_train._finite import leaves_finite
from jmp_train._scaling import _reciprocal

SCALES = [NoOpLossScale(), StaticLossScale(2.0**10), DynamicLossScale(2.0**10)]
NARROW = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2]
UNTOUCHED = {
    "int": jnp.arange(3),
    "int8": np.arange(3, dtype=np.int8),
    "bool": jnp.array([True, False]),
    "key": jax.random.key(0),
    "raw key": jax.random.PRNGKey(0),
    "float0": np.zeros((2,), jax.dtypes.float0),
    "python int": 3,
    "python bool": True,
    "string": "name",
    "object": object(),
    "none": None,
    "empty": {},
    "_overwrite_with_gradient": {"Dense_0": {"kernel_scale": jnp.float32(3.0), "amax": jnp.array([jnp.inf])}},
}


def identical(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("scale", SCALES)
def test_leaves_that_are_no_gradients_are_returned_themselves(scale):
    assert identical(scale.unscale(UNTOUCHED), UNTOUCHED)
    assert identical(scale.scale(UNTOUCHED), UNTOUCHED)
    assert bool(all_finite(UNTOUCHED))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [*NARROW, jnp.float32])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray, lambda x: x[()]])
def test_narrow_leaves_become_float32_and_come_back(scale, dtype, kind):
    leaf = kind(np.array(1.5, dtype))
    scaled = scale.scale(leaf)
    assert scaled.dtype == jnp.float32 and scaled == 1.5 * scale.loss_scale
    unscaled = scale.unscale(leaf)
    assert unscaled.dtype == jnp.float32 and unscaled == 1.5 / scale.loss_scale
    assert jax.eval_shape(scale.unscale, leaf).dtype == jnp.float32


@pytest.mark.parametrize("scale", SCALES)
def test_wide_and_complex_leaves_keep_their_dtype(scale):
    with jax.enable_x64(True):
        tree = {"f64": jnp.float64(1 / 3), "c64": jnp.complex64(3 + 4j), "c128": jnp.complex128(1 / 3 + 4j)}
        for result, factor in ((scale.scale(tree), scale.loss_scale), (scale.unscale(tree), 1 / scale.loss_scale)):
            assert jax.tree.map(lambda x: x.dtype, result) == jax.tree.map(lambda x: x.dtype, tree)
            for name in tree:
                assert complex(result[name]) == complex(tree[name]) * float(factor)


@pytest.mark.parametrize("scale", [1.5, 3.0, 1.25, 6.0 * 2.0**10])
def test_a_scale_with_a_mantissa_is_no_power_of_two(scale):
    assert float(StaticLossScale(scale).unscale(np.float32(1))) == pytest.approx(1 / scale, rel=2e-7)


def test_float64_is_divided_in_float64():
    with jax.enable_x64(True):
        assert float(StaticLossScale(3.0).unscale(jnp.float64(1.0))) == 1 / 3


def test_a_complex_leaf_with_one_infinite_part_keeps_the_other():
    result = StaticLossScale(4.0).unscale(jnp.complex64(complex(np.inf, 8.0)))
    assert result.real == np.inf and result.imag == 2.0


@pytest.mark.parametrize("scale", SCALES)
def test_python_scalars_are_float32(scale):
    result = scale.unscale({"loss": 2.5})["loss"]
    assert result.dtype == jnp.float32 and result == 2.5 / scale.loss_scale


@pytest.mark.parametrize("scale", SCALES)
def test_strict_promotion(scale):
    with jax.numpy_dtype_promotion("strict"):
        tree = {"f16": np.float16(1), "f32": np.float32(1), "c64": np.complex64(1)}
        jax.eval_shape(lambda finite, tree: scale.adjust(finite).unscale(scale.scale(tree)), jnp.bool_(True), tree)


def test_a_16_bit_loss_is_scaled_beyond_what_16_bits_hold():
    assert DynamicLossScale(2.0**16).scale(jnp.float16(4.0)) == 2.0**18


def test_float16_gradients_do_not_vanish_again():
    smallest = jnp.float16(2.0**-24)
    assert DynamicLossScale(2.0**24).unscale(smallest) == 2.0**-48


@jax.jit
def unscale_one(scale, gradient):
    return scale.unscale(gradient)


@settings(max_examples=200)
@given(st.integers(-126, 126), st.floats(width=32, allow_nan=False, allow_subnormal=False))
def test_a_power_of_two_scales_exactly(exponent, gradient):
    scale = DynamicLossScale(2.0**exponent, min_loss_scale=2.0**-126, max_loss_scale=2.0**126)
    got = np.asarray(unscale_one(scale, np.float32(gradient)))
    with np.errstate(over="ignore", under="ignore"):
        expected = np.ldexp(np.float32(gradient), -exponent)
    if abs(expected) >= np.finfo(np.float32).tiny or expected == 0:  # subnormals may be flushed
        assert got == expected


@pytest.mark.parametrize(
    ("sizes", "kernels"), [([4] * 32, 1), ([4] * 33, 2), ([4] * 65, 3), ([2**16] * 2, 1), ([2**16 + 1] * 2, 2)]
)
def test_small_leaves_are_checked_32_at_a_time(sizes, kernels):
    tree = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
    assert str(jax.make_jaxpr(leaves_finite)(tree)).count(" reduce[") == kernels


class _WithoutQuotients(Watcher):
    """Makes NaN of every quotient: on a GPU they are approximations."""

    def before(self, site, inputs):
        return [inputs[0]._replace(array=jnp.float32(jnp.nan)), inputs[1]] if site.primitive == "div" else inputs


@pytest.mark.parametrize("exponent", [-126, -1, 0, 7, 126])
def test_the_reciprocal_of_a_power_of_two_is_no_quotient(exponent):
    program = Interpreter(jax.make_jaxpr(_reciprocal)(jnp.float32(1)))
    power = np.ldexp(np.float32(1), exponent)
    (found,) = program.run([Value(power)], _WithoutQuotients())
    assert found.array == 1 / power
    (found,) = program.run([Value(np.nextafter(power, np.float32(np.inf)))], _WithoutQuotients())
    assert np.isnan(found.array)


def test_float32_gradients_are_multiplied():
    program = str(jax.make_jaxpr(DynamicLossScale(8.0).unscale)(jnp.ones(7)))
    assert "f32[7] = mul" in program and "f32[7] = div" not in program


def test_the_reciprocal_is_exact_for_every_traced_power_of_two():
    exponents = np.arange(-126, 127)
    scale = DynamicLossScale(1.0, min_loss_scale=2.0**-126, max_loss_scale=2.0**126)

    def unscale_by(power):
        return dataclasses.replace(scale, loss_scale=power).unscale(jnp.float32(1))

    got = jax.jit(jax.vmap(unscale_by))(np.ldexp(np.float32(1), exponents))
    np.testing.assert_array_equal(got, np.ldexp(np.float32(1), -exponents))


@settings(max_examples=100)
@given(
    st.floats(2.0**-20, 2.0**20, width=32),
    st.floats(-1e6, 1e6, width=32, allow_subnormal=False),  # which CPUs may flush to zero
)
def test_any_other_scale_is_off_by_at_most_an_ulp_and_a_half(scale, gradient):
    got = float(StaticLossScale(scale).unscale(np.float32(gradient)))
    exact = float(np.float32(gradient)) / float(np.float32(scale))
    assert abs(got - exact) <= 1.5 * np.spacing(np.float32(abs(exact))) + np.finfo(np.float32).tiny


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # which JAX does not catch
@pytest.mark.parametrize("enabled", [False, True])
def test_numpy_float64_is_float32_while_64_bits_are_disabled(enabled):
    """As for an optimizer, which would add an infinity to the parameter."""
    with jax.enable_x64(enabled):
        assert all_finite(np.array([1e300])) == enabled


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [*NARROW, jnp.float32, jnp.complex64])
def test_each_kind_of_non_finite_number_is_seen(bad, dtype):
    leaf = np.ones((3, 5), dtype)
    assert bool(all_finite({"a": leaf, "b": 1.0}))
    if dtype == jnp.float8_e4m3fn and not np.isnan(bad):
        bad = jnp.nan  # the format has no infinity
    leaf[2, 4] = bad
    assert not bool(all_finite({"a": leaf, "b": 1.0}))
    assert not bool(jax.jit(all_finite)(leaf))
    if dtype == jnp.complex64:
        assert not bool(all_finite(jnp.complex64(complex(0, float(bad)))))


def test_all_finite_of_scalars_and_of_nothing():
    assert not bool(all_finite([1.0, float("nan")])) and not bool(all_finite(complex(0, float("inf"))))
    assert not bool(all_finite(np.float16(np.inf)))
    for nothing in ({}, None, [], {"a": None, "b": jnp.zeros((0, 3))}):
        assert bool(all_finite(nothing)) and all_finite(nothing).shape == ()


SHAPES = [(), (1,), (7,), (4, 3), (3, 4), (2, 3, 2), (0,), (70_000,)]


def test_many_leaves_are_checked_each_for_itself():
    """Leaves of one shape share a reduction: an infinity in one must not be reported for another."""
    rng = np.random.default_rng(0)
    tree = {f"{i:03}": np.ones(SHAPES[i % len(SHAPES)], np.float32) for i in range(50)}
    tree["flag"] = np.array(True)
    for _ in range(20):
        bad = rng.random(len(tree)) < 0.2
        expected = []
        for is_bad, (name, leaf) in zip(bad, tree.items(), strict=True):
            is_bad = bool(is_bad) and leaf.size > 0 and name != "flag"
            if name != "flag":
                leaf.fill(1)
            if is_bad:
                leaf.reshape(-1)[rng.integers(leaf.size)] = rng.choice([np.inf, -np.inf, np.nan])
            expected.append(not is_bad)
        np.testing.assert_array_equal(jax.jit(leaves_finite)(tree), expected)


def test_the_check_in_vmap():
    leaves = {"a": jnp.ones((3, 4)), "b": jnp.ones((3, 4)).at[1, 2].set(jnp.inf), "c": jnp.ones((3, 2))}
    np.testing.assert_array_equal(jax.vmap(all_finite)(leaves), [True, False, True])


def test_select_tree_keeps_bits_of_every_kind_of_leaf():
    one = {
        "nan": jnp.array([jnp.nan, -0.0]),
        "f16": jnp.float16(6e-8),
        "int": jnp.int8(-3),
        "key": jax.random.key(1),
        "raw": jax.random.PRNGKey(1),
        "c": jnp.complex64(1j),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "none": None,
    }
    two = jax.tree.map(lambda x: x if x.dtype == jax.dtypes.float0 else jnp.zeros_like(x), one | {"key": None})
    two["key"] = jax.random.key(2)
    for pred, expected in ((True, one), (np.False_, two), (jnp.bool_(True), one)):
        got = select_tree(pred, one, two)
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, expected)
        assert bits(got) == bits(expected)


def bits(tree):
    def of(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    return jax.tree.map(of, tree)


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("a", ""), ("", "b")])
def test_select_tree_names_what_only_one_tree_has(one, other):
    message = (
        f"`on_true` and `on_false` must have the same structure: only in `on_true` are {[*one]}, only in `on_false` "
        f"{[*other]}."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        select_tree(True, dict.fromkeys(one + "c", 1.0), dict.fromkeys(other + "c", 1.0))


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ([1.0], (1.0,), "a list and a tuple at 'a'"),
        ({"b": {}}, {"b": None}, "a dict and a NoneType at 'a/b'"),
        ({"b": {}}, {"c": {}}, "two of type dict with other keys or static fields at 'a'"),
    ],
)
def test_select_tree_names_nodes_that_differ(one, other, found):
    message = f"`on_true` and `on_false` must have the same structure: {found}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        select_tree(True, {"a": one, "w": 1.0}, {"a": other, "w": 1.0})


@pytest.mark.parametrize("leaf", ["relu", "float32", len])
def test_select_tree_takes_arrays(leaf):
    for argument, trees in (("on_true", (leaf, 1.0)), ("on_false", (1.0, leaf))):
        message = (
            f"`{argument}` must be a tree of arrays, got {leaf!r} at 'act'. Select between the arrays, and put "
            "functions and names back afterwards."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            select_tree(True, *({"act": x} for x in trees))


def test_select_tree_takes_one_boolean():
    with pytest.raises(ValueError, match=r"^`pred` must be one boolean, got int32 of shape \(\)\. Pass the result of"):
        select_tree(1, 2, 3)
    shape_alone = types.SimpleNamespace(shape=())
    for flag, name in (
        ({"w": True}, "dict"),
        (None, "NoneType"),
        (jnp.bool_, "_ScalarMeta"),
        (shape_alone, "SimpleNamespace"),
    ):
        with pytest.raises(ValueError, match=rf"^`pred` must be one boolean, got {name}\. Pass the result of"):
            select_tree(flag, 2, 3)
        with pytest.raises(ValueError, match=rf"^`grads_finite` must be one boolean, got {name}\. Pass"):
            DynamicLossScale().adjust(flag)


@pytest.mark.parametrize("other", [jnp.ones(1), jnp.ones((2, 3)), jnp.ones(3, jnp.float16), jnp.ones(3, jnp.int32)])
def test_select_tree_broadcasts_and_promotes_nothing(other):
    message = r"^`on_true` and `on_false` must have the same shapes and dtypes, got \(\(3,\), dtype\('float32'\)\) and "
    with pytest.raises(ValueError, match=message + r".* at 'w/0'\.$"):
        select_tree(True, {"w": [jnp.ones(3)]}, {"w": [other]})
