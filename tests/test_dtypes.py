"""Names and properties of formats, and the leaves that a cast changes."""

import dataclasses
import importlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import pytest

from jmp_train import cast_floating, cast_to_full, cast_to_half
from jmp_train._dtypes import DTYPE_NAMES, did_you_mean, facts, is_floating, to_dtype, to_precision


@pytest.mark.parametrize(
    "same",
    [
        ["f16", "half", "float16", np.float16, jnp.float16, np.dtype("float16"), np.dtype(">f2"), "<f2"],
        ["bf16", "bfloat16", jnp.bfloat16, ml_dtypes.bfloat16, jnp.zeros((), jnp.bfloat16).dtype],
        ["f32", "full", "float32", np.float32, jnp.float32, np.dtype("f4")],
        ["f64", "float64", np.float64, np.dtype(float)],
        ["float8_e4m3fn", jnp.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)],
    ],
)
def test_every_spelling_of_a_dtype_is_one_value(same):
    assert len({to_dtype(spelling) for spelling in same}) == 1
    assert isinstance(to_dtype(same[0]), np.dtype)


def test_short_names_are_those_of_jmp():
    for name in ("f16", "float16", "bf16", "bfloat16", "full", "f32", "float32", "f64", "float64"):
        assert to_dtype(name) == np.dtype(jmp.get_policy(name).param_dtype)


@pytest.mark.parametrize(
    "dtype, error, message",
    [
        ("flaot16", ValueError, "`dtype`: unknown dtype 'flaot16' (did you mean 'float16'?); the floating dtypes are"),
        ("fp16", ValueError, "`dtype`: unknown dtype 'fp16' (did you mean 'f16'?); the floating dtypes are"),
        ("FLOAT16", ValueError, "`dtype`: unknown dtype 'FLOAT16' (did you mean 'float16'?); the floating dtypes are"),
        (
            "f8",
            ValueError,
            "`dtype`: 'f8' is NumPy's code for float64, while 'f16' and 'f32' count bits; write 'float64'.",
        ),
        ("e", ValueError, "'e' is NumPy's code for float16, while"),
        ("i4", ValueError, "got int32; leaves that are not real floating numbers are never cast."),
        ("nonsense", ValueError, "`dtype`: unknown dtype 'nonsense'; the floating dtypes are float16, bfloat16"),
        (
            jnp.int32,
            ValueError,
            "`dtype` must be a floating dtype such as 'float16', 'bfloat16' or 'float32', got int32; leaves that are "
            "not real floating numbers are never cast.",
        ),
        ("int8", ValueError, "got int8; leaves that are not real floating numbers are never cast."),
        (np.complex64, ValueError, "got complex64; leaves that are not real floating numbers are never cast."),
        (bool, ValueError, "got bool; leaves that are not real floating numbers are never cast."),
        (
            None,
            TypeError,
            "`dtype` must be a floating dtype such as 'float16' or jnp.float32, got None; name the width you want.",
        ),
        (float, TypeError, "got float; name the width you want."),
        *(
            (
                array,
                TypeError,
                "`dtype` must be a floating dtype such as 'float16' or jnp.float32, got an array; pass its dtype, "
                "'float32'.",
            )
            for array in (jnp.ones(2), np.ones(2, np.float32), np.float32(1))
        ),
        (
            {"w": 1},
            TypeError,
            "`dtype` must be a floating dtype such as 'float16' or jnp.float32, got {'w': 1} of type dict.",
        ),
        ({"names": ["w"]}, TypeError, "got {'names': ['w']} of type dict."),
        (
            3,
            TypeError,
            "`dtype` must be a floating dtype such as 'float16' or jnp.float32, got 3 of type int.",
        ),
    ],
)
def test_what_is_no_floating_dtype_is_refused(dtype, error, message):
    with pytest.raises(error, match=re.escape(message)):
        to_dtype(dtype)


@pytest.mark.parametrize("name", DTYPE_NAMES)
def test_facts_against_the_format_itself(name):
    dtype, limits = to_dtype(name), facts(name)
    assert limits.bits == ml_dtypes.finfo(dtype).bits
    held = np.array([limits.max, limits.smallest_normal, limits.smallest_subnormal], np.float64)
    np.testing.assert_array_equal(held.astype(dtype).astype(np.float64), held)
    if name != "float8_e8m0fnu":  # it has neither zero nor subnormal numbers
        assert np.float64(limits.smallest_subnormal / 2.0).astype(dtype).astype(np.float64) == 0.0


def test_float16_is_as_the_papers_say():
    limits = facts("float16")
    assert (limits.max, limits.smallest_normal, limits.smallest_subnormal, limits.eps) == (
        65504.0,
        2.0**-14,
        2.0**-24,
        2.0**-10,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    w: Any
    n: Any


@dataclasses.dataclass
class Unregistered:
    w: Any


def some_leaves() -> dict[str, Any]:
    return {
        "array": jnp.ones(2, jnp.float32),
        "numpy": np.ones(2, np.float64),
        "scalar": np.float32(1.5),
        "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
        "half": jnp.ones(2, jnp.bfloat16),
        "int": jnp.arange(2),
        "bool": jnp.array([True]),
        "key": jax.random.key(0),
        "raw_key": jax.random.PRNGKey(0),
        "complex": jnp.ones(2, jnp.complex64),
        "float0": np.zeros(2, jax.dtypes.float0),
        "none": None,
        "python": 1.5,
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "text": "abc",
        "objects": np.array([object()]),
        "unregistered": Unregistered(np.ones(2, np.float32)),
        "int_struct": jax.ShapeDtypeStruct((2,), jnp.int32),
    }


CAST = {"array", "numpy", "scalar", "struct", "half"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_only_floating_leaves_are_cast(dtype):
    before = some_leaves()
    after = cast_floating(before, dtype)
    for name, leaf in before.items():
        if name in CAST and leaf.dtype != dtype:
            assert after[name].dtype == to_dtype(dtype), name
            assert after[name].shape == leaf.shape, name
        else:
            assert after[name] is leaf, name


def test_a_cast_keeps_the_kind_of_array():
    after = cast_floating(some_leaves(), "float16")
    assert isinstance(after["array"], jax.Array) and not after["array"].weak_type
    assert type(after["numpy"]) is np.ndarray
    assert type(after["scalar"]) is np.float16
    assert isinstance(after["struct"], jax.ShapeDtypeStruct)


def test_a_leaf_of_the_dtype_is_returned_itself():
    for leaf in (np.ones(2, np.float16), np.float16(1), jnp.ones(2, jnp.float16), jax.ShapeDtypeStruct((), np.float16)):
        assert cast_to_half(leaf) is leaf


def test_a_cast_is_never_weakly_typed():
    assert not cast_to_half(jnp.asarray(1.0)).weak_type
    assert not cast_to_half(jax.ShapeDtypeStruct((), np.float32, weak_type=True)).weak_type


def test_values_are_rounded_to_nearest():
    exact = np.random.default_rng(0).normal(size=1000)
    for dtype in ("float16", "bfloat16", "float32"):
        expected = exact.astype(to_dtype(dtype))
        np.testing.assert_array_equal(cast_floating(exact, dtype), expected)
    np.testing.assert_array_equal(cast_to_half(jnp.float32(exact)), np.float32(exact).astype(np.float16))


def test_what_does_not_fit_becomes_infinite_without_a_warning():
    assert np.isinf(cast_to_half(np.array([1e5], np.float32))).all()
    assert np.isinf(cast_to_half(np.float32(1e5)))


@pytest.mark.parametrize("empty", [None, {}, (), [None, {}]])
def test_empty_trees(empty):
    assert cast_floating(empty, "float16") == empty


def test_dataclasses_and_named_structures_keep_their_type():
    after = cast_to_half(Registered(jnp.ones(2), jnp.arange(2)))
    assert type(after) is Registered and after.w.dtype == jnp.float16 and after.n.dtype == jnp.int32


def test_nnx_state_and_variables():
    nnx = importlib.import_module("flax.nnx")
    module = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    state = cast_to_half(nnx.state(module))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} == {"float16"}
    assert type(state["scale"]) is nnx.Param
    variable = cast_to_half(nnx.Param(jnp.ones(2)))
    assert type(variable) is nnx.Param and variable[...].dtype == jnp.float16


def test_float64_needs_64_bit_types():
    with pytest.raises(
        ValueError,
        match=re.escape(
            "cannot cast a JAX array to float64 while 64-bit types are disabled: JAX would return float32; "
            "call jax.config.update('jax_enable_x64', True) first, or choose float32."
        ),
    ):
        cast_floating(jnp.ones(2), "float64")
    assert cast_floating(np.ones(2, np.float32), "float64").dtype == np.float64
    with jax.enable_x64(True):
        assert cast_floating(jnp.ones(2, jnp.float32), "float64").dtype == np.float64
        assert cast_to_full(jnp.ones(2, jnp.float64)).dtype == np.float32


def test_8_bit_floats_are_storage_and_stay():
    stored = jnp.array([1.0, 448.0], jnp.float8_e4m3fn)
    assert is_floating(stored)
    assert cast_to_full({"w": stored})["w"] is stored
    # jmp casts them, without the scale they were stored with.
    assert jmp.cast_to_full(stored).dtype == jnp.float32


def test_peers_numpy_scalars_escape_jmp_and_widen_what_they_meet():
    assert (jmp.cast_to_half({"s": np.float32(2)})["s"] * jnp.ones(2, jnp.float16)).dtype == jnp.float32
    assert (cast_to_half({"s": np.float32(2)})["s"] * jnp.ones(2, jnp.float16)).dtype == jnp.float16


def test_casts_agree_with_jmp_where_jmp_works():
    tree = {"a": jnp.linspace(-3, 3, 7), "b": [np.linspace(0, 1, 5), jnp.arange(3)], "c": None, "k": jax.random.key(1)}
    for ours, theirs in ((cast_to_half, jmp.cast_to_half), (cast_to_full, jmp.cast_to_full)):
        for x, y in zip(jax.tree.leaves(ours(tree)), jax.tree.leaves(theirs(tree)), strict=True):
            assert x.dtype == y.dtype and (x == y).all()


def test_casting_inside_transformations():
    def f(tree):
        return cast_to_half(tree)["w"].sum().astype(jnp.float32)

    tree = {"w": jnp.ones(3)}
    assert jax.jit(jax.grad(f))(tree)["w"].dtype == jnp.float32
    assert jax.vmap(cast_to_half)(tree)["w"].dtype == jnp.float16
    assert jax.eval_shape(cast_to_half, tree)["w"].dtype == jnp.float16


def test_did_you_mean_ignores_case():
    assert did_you_mean("o1", ["O1", "float16"]) == " (did you mean 'O1'?)"
    assert did_you_mean("batchnorm", ["Dense", "BATCHNORM"]) == " (did you mean 'BATCHNORM'?)"


@pytest.mark.parametrize(
    "name", ["default", "high", "highest", "float32", "tensorfloat32", "bfloat16", "BF16_BF16_F32"]
)
def test_precisions_mean_to_jax_what_they_mean_here(name):
    def recorded(precision):
        with jax.default_matmul_precision(precision):
            return str(jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2))))

    assert recorded(to_precision(name)) == recorded(name)
    assert to_precision(to_precision(name)) == to_precision(name)


def test_precisions_from_the_enumeration():
    assert [to_precision(member) for member in jax.lax.Precision] == ["default", "tensorfloat32", "highest"]
    assert to_precision(None) is None
    assert to_precision("bfloat16") == to_precision("default")


def test_unknown_precisions():
    with pytest.raises(ValueError, match=re.escape("got 'DEFAULT' (did you mean 'default'?).")):
        to_precision("DEFAULT")  # the preset's name, which is no second spelling
    message = "got 'highst' (did you mean 'highest'?)."
    with pytest.raises(ValueError, match=re.escape(message)):
        to_precision("highst")
    with pytest.raises(TypeError, match=re.escape("must be a name such as 'highest' or None, got 3.")):
        to_precision(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.integration
def test_nothing_touches_a_backend():
    # jax_num_cpu_devices can be set only while no backend exists.
    program = """
import jax, numpy as np, jmp_train
from jmp_train import Policy, get_policy, cast_floating, value_and_grad, grad
from jmp_train._dtypes import facts, DTYPE_NAMES
for name in DTYPE_NAMES: facts(name)
policy = get_policy("params=float32,compute=float16,output=f32,@BatchNorm*=f32")
str(policy), repr(policy), hash(policy), Policy(np.float32, jax.numpy.bfloat16, "f32")
value_and_grad(lambda p: p, policy), grad(lambda p: p, "float32")
policy.cast_to_compute({"BatchNorm_0": np.ones(2, np.float32), "s": jax.ShapeDtypeStruct((2,), np.float32)})
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
