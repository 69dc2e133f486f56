"""Policies: equality for every spelling, names, casts with overrides, and comparisons with jmp."""

import copy
import functools
import importlib
import pickle
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from jmp_train import Policy, get_policy
from jmp_train._policy import uses_float16


def keep_biases(path, leaf):
    return "float32" if path.endswith("bias") else None


# Equality


def test_equal_policies_are_one_dictionary_key():
    spellings = [
        Policy("float32", "float16", "f32"),
        Policy(np.float32, jnp.float16, np.dtype("float32"), reduce_dtype="full", overrides=[]),
        Policy(param_dtype="full", compute_dtype="half", output_dtype=jnp.float32, overrides={}),
        get_policy("p=f32,c=f16,o=f32"),
        get_policy("mixed_float16"),
        get_policy("O1"),
    ]
    assert len(set(spellings)) == 1
    assert len({hash(policy) for policy in spellings}) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"param_dtype": "bf16"},
        {"compute_dtype": "bf16"},
        {"output_dtype": "bf16"},
        {"reduce_dtype": "bf16"},
        {"matmul_precision": "highest"},
        {"overrides": {"a": "f32"}},
    ],
)
def test_every_field_counts(change):
    policy = get_policy("mixed_float16")
    assert policy.replace(**change) != policy
    assert str(policy.replace(**change)) != str(policy)
    assert repr(policy.replace(**change)) != repr(policy)


def test_a_policy_cannot_be_changed():
    with pytest.raises(AttributeError):
        get_policy("float32").param_dtype = np.dtype("float16")  # pyright: ignore[reportAttributeAccessIssue]


FULL = Policy(
    "bfloat16",
    "float16",
    "float64",
    reduce_dtype="float16",
    matmul_precision="tensorfloat32",
    overrides=[("BatchNorm*", "float32"), ("Block_?/head", "bfloat16"), keep_biases],
)


@pytest.mark.parametrize("again", [lambda p: pickle.loads(pickle.dumps(p)), copy.copy, copy.deepcopy, Policy.replace])
def test_copies_are_equal(again):
    assert again(FULL) == FULL and hash(again(FULL)) == hash(FULL)


def test_repr_is_the_call_that_builds_it():
    policy = FULL.replace(overrides=FULL.overrides[:2])
    assert eval(repr(policy)) == policy
    assert repr(get_policy("mixed_float16")) == "Policy('float32', 'float16', 'float32')"
    by_function = get_policy("mixed_float16").replace(overrides=len)
    assert repr(by_function) == "Policy('float32', 'float16', 'float32', overrides=(<built-in function len>,))"


def test_as_a_static_argument_of_jit():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def f(policy, x):
        traces.append(policy)
        return policy.cast_to_compute(x)

    assert f(get_policy("mixed_float16"), jnp.ones(2)).dtype == jnp.float16
    assert f(Policy(np.float32, np.float16, np.float32), jnp.ones(2)).dtype == jnp.float16
    assert len(traces) == 1
    assert f.lower(get_policy("mixed_bfloat16"), jnp.ones(2)).out_info.dtype == jnp.bfloat16
    assert len(traces) == 2


# Names


def assert_same_dtypes(ours, theirs):
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == np.dtype(getattr(theirs, field)), field


@pytest.mark.parametrize(
    "name, text",
    [
        ("float32", "params=float32,compute=float32,output=float32,matmul_precision=highest"),
        ("tensorfloat32", "params=float32,compute=float32,output=float32,matmul_precision=tensorfloat32"),
        ("mixed_float16", "params=float32,compute=float16,output=float32"),
        ("mixed_bfloat16", "params=float32,compute=bfloat16,output=float32"),
        ("float16", "params=float16,compute=float16,output=float16"),
        ("bfloat16", "params=bfloat16,compute=bfloat16,output=bfloat16"),
        ("float64", "params=float64,compute=float64,output=float64,reduce=float64"),
        ("O2", "params=float16,compute=float16,output=float32"),
    ],
)
def test_what_a_name_means(name, text):
    assert str(get_policy(name)) == text
    assert get_policy(text) == get_policy(name) == get_policy(f"  {name} ")


@pytest.mark.parametrize(
    "alias, name",
    [
        *dict(O0="float32", O1="mixed_float16", O3="float16", full="float32", f32="float32", half="float16").items(),
        *dict(f16="float16", bf16="bfloat16", f64="float64").items(),
    ],
)
def test_aliases(alias, name):
    assert get_policy(alias) == get_policy(name)


@pytest.mark.parametrize("name", ["half", "f16", "float16", "bf16", "bfloat16", "full", "f32", "float32", "f64"])
def test_a_dtype_as_a_policy_is_what_it_is_in_jmp(name):
    assert_same_dtypes(get_policy(name), jmp.get_policy(name))


def test_a_policy_is_its_own_name():
    assert get_policy(FULL) is FULL


# Casts


def some_params():
    return {
        "BatchNorm_0": {"scale": jnp.ones(2), "count": jnp.int32(3)},
        "Dense_0": {"kernel": jnp.ones(2), "bias": jnp.ones(2)},
        "head": {"kernel": jnp.ones(2)},
    }


def dtypes(tree):
    return {path: leaf.dtype.name for path, leaf in zip(PATHS, jax.tree.leaves(tree), strict=True)}


PATHS = ["BatchNorm_0/count", "BatchNorm_0/scale", "Dense_0/bias", "Dense_0/kernel", "head/kernel"]


def test_casts_without_overrides_are_those_of_jmp():
    for name in ("c=f16", "p=bf16,c=f16,o=f32", "full", "half"):
        ours, theirs = get_policy(name), jmp.get_policy(name)
        for method in ("cast_to_param", "cast_to_compute", "cast_to_output"):
            assert dtypes(getattr(ours, method)(some_params())) == dtypes(getattr(theirs, method)(some_params()))


def test_overrides_apply_where_parameters_are_stored_and_used():
    policy = Policy("float16", "float16", "float16", overrides={"BatchNorm*": "float32", "head": "bfloat16"})
    expected = dict(zip(PATHS, ["int32", "float32", "float16", "float16", "bfloat16"], strict=True))
    assert dtypes(policy.cast_to_param(some_params())) == expected
    assert dtypes(policy.cast_to_compute(some_params())) == expected
    assert policy.cast_to_output(jnp.ones(2)).dtype == jnp.float16


def test_an_override_never_narrows_what_is_stored():
    policy = get_policy("mixed_float16").replace(overrides={"head": "bfloat16"})
    assert set(dtypes(policy.cast_to_param(some_params())).values()) == {"float32", "int32"}
    assert dtypes(policy.cast_to_compute(some_params()))["head/kernel"] == "bfloat16"


def test_overrides_under_jit_and_for_shapes():
    policy = get_policy("mixed_float16").replace(overrides=keep_biases)
    expected = dtypes(policy.cast_to_compute(some_params()))
    assert expected["Dense_0/bias"] == "float32" and expected["Dense_0/kernel"] == "float16"
    assert dtypes(jax.jit(policy.cast_to_compute)(some_params())) == expected
    assert dtypes(policy.cast_to_compute(jax.eval_shape(some_params))) == expected


def test_a_batch_is_not_where_overrides_look():
    policy = get_policy("c=f16,@BatchNorm*=f32")
    with pytest.raises(ValueError, match=re.escape("`overrides`: the glob 'BatchNorm*' matches none of the tree's")):
        policy.cast_to_compute({"image": jnp.ones(2)})
    assert policy.replace(overrides=()).cast_to_compute({"image": jnp.ones(2)})["image"].dtype == jnp.float16


def test_fp8_statistics_are_nobodys_to_cast():
    statistics = {"_overwrite_with_gradient": {"Dense_0": {"scale": jnp.ones(1)}}}
    tree = {"params": {"w": jnp.ones(2), "not_overwrite_with_gradient": jnp.ones(2)}, "state": statistics, **statistics}
    for method in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        after = getattr(get_policy("float16"), method)(tree)
        assert after["params"]["w"].dtype == jnp.float16
        assert after["params"]["not_overwrite_with_gradient"].dtype == jnp.float16
        for kept in (after, after["state"]):
            assert kept["_overwrite_with_gradient"]["Dense_0"]["scale"].dtype == jnp.float32


def test_nnx_state():
    nnx = importlib.import_module("flax.nnx")
    state = nnx.state(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), nnx.Param)
    after = get_policy("mixed_float16").replace(overrides={"scale": "float32"}).cast_to_compute(state)
    assert (after["bias"][...].dtype, after["scale"][...].dtype) == (jnp.float16, jnp.float32)


def test_with_output_dtype_is_that_of_jmp():
    ours, theirs = get_policy("c=bf16"), jmp.get_policy("c=bf16")
    assert_same_dtypes(ours.with_output_dtype(jnp.float32), theirs.with_output_dtype(jnp.float32))
    assert str(FULL.with_output_dtype("f16")) == str(FULL).replace("output=float64", "output=float16")


WITHOUT = ["float32", "tensorfloat32", "mixed_bfloat16", "bfloat16", "float64", "O0", "c=f32,o=bf16,@head=f32"]
WITH = ["mixed_float16", "O1", "O2", "O3", "c=f32,o=f16", "p=f16,c=f32", "c=bf16,o=f32,r=f16", "c=bf16,@head=f16"]


def test_which_policies_need_a_loss_scale():
    assert [name for name in WITHOUT + WITH if uses_float16(get_policy(name))] == WITH
    of_functions = [get_policy(name).replace(overrides=keep_biases) for name in ("mixed_bfloat16", "mixed_float16")]
    assert list(map(uses_float16, of_functions)) == [False, True]


# Bugs in jmp that this library does not have


def test_peers_equal_policies_have_unequal_hashes_in_jmp():
    class_, dtype = jmp.Policy(*[jnp.float32] * 3), jmp.Policy(*[np.dtype("float32")] * 3)
    assert class_ == dtype and len({class_, dtype}) == 2
    assert len({Policy(*[jnp.float32] * 3), Policy(*[np.dtype("float32")] * 3)}) == 1


def test_peers_text_of_a_policy_is_a_key_error_in_jmp():
    arguments = [np.dtype("float32"), np.dtype("float16"), np.dtype("float32")]
    with pytest.raises(KeyError):
        str(jmp.Policy(*arguments))
    assert str(Policy(*arguments)) == "params=float32,compute=float16,output=float32"


def test_peers_jmp_lets_the_last_of_two_keys_win_and_casts_to_integers():
    assert jmp.get_policy("c=f16,c=bf16").compute_dtype == jnp.bfloat16
    assert jmp.Policy(*[jnp.int8] * 3).cast_to_compute(jnp.ones(2)).dtype == jnp.int8
    with pytest.raises(ValueError, match="must be a floating dtype"):
        Policy(*[jnp.int8] * 3)
