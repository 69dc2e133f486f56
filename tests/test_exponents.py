"""exponent_histogram against NumPy's float64 and math.frexp: every format, every kind of leaf, every transformation."""

import contextlib
import dataclasses
import json
from collections import OrderedDict

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from float_tools import FP8, all_values, awkward, exponents_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_train as jmp
from jmp_train import diagnostics
from jmp_train._diagnostics.formats._bits import bincount, sum_uint64, to_int64


def check(histogram, values, leaf=0):
    """Compares one leaf of a histogram with the reference."""
    expected, special = exponents_of(values)
    row = histogram.as_dict()["leaves"][leaf]
    assert {int(e): n for e, n in row["exponents"].items()} == expected
    assert (row["zeros"], row["infinities"], row["nans"]) == special


@pytest.mark.parametrize("name", ["float16", "bfloat16", *FP8, "float8_e8m0fnu"])
def test_every_number_of_every_narrow_format(name):
    values = all_values(name)
    check(HISTOGRAM([values]), values)
    if name in ("float16", "float8_e4m3fn"):
        check(diagnostics.exponent_histogram([jnp.asarray(values)]), values)


def test_four_bits():
    """JAX has names for 6 bits, and no arrays."""
    values = np.array([0, 0.5, 1, -1.5, 2, -4, 6], np.float32).astype(jnp.float4_e2m1fn)
    check(diagnostics.exponent_histogram([values]), values)


@pytest.mark.parametrize("compile", [False, True])
def test_float32(compile):
    values = awkward(np.float32)
    histogram = (jax.jit(diagnostics.exponent_histogram) if compile else diagnostics.exponent_histogram)([values])
    check(histogram, values)
    assert histogram.lowest == -149 and histogram.exponents[0] == -149 and histogram.exponents[-1] == 127
    assert set(range(-149, 128)) <= {int(e) for e in histogram.as_dict()["total"]["exponents"]}


def test_float64_beside_float32():
    with jax.enable_x64(True):
        wide, single = awkward(np.float64), awkward(np.float32)
        for function in (diagnostics.exponent_histogram, jax.jit(diagnostics.exponent_histogram)):
            histogram = function({"a": wide, "b": single})
            assert histogram.lowest == -1074
            check(histogram, wide, 0)
            check(histogram, single, 1)
        check(HISTOGRAM(1e-310 * np.ones(3)), 1e-310 * np.ones(3))


def test_complex_numbers_count_twice():
    parts = awkward(np.float32)
    values = np.empty(parts.size // 2, np.complex64)
    values.real, values.imag = parts[0 : 2 * values.size : 2], parts[1 : 2 * values.size : 2]
    check(jax.jit(diagnostics.exponent_histogram)(values), parts[: 2 * values.size])


@settings(max_examples=15)
@given(st.lists(st.floats(width=32), min_size=40, max_size=40))
def test_any_float32(numbers):
    values = np.array(numbers, np.float32)
    check(HISTOGRAM(values), values)


HISTOGRAM = jax.jit(diagnostics.exponent_histogram)


def test_what_is_no_gradient_is_left_out():
    tree = {
        "w": np.ones(2, np.float32),
        "ids": np.arange(3),
        "mask": np.array([True]),
        "key": jax.random.key(0),
        "none": None,
        "float0": np.zeros(2, jax.dtypes.float0),
        "fp8": {"_overwrite_with_gradient": {"scale": np.ones(5, np.float32)}},
        "rate": 0.5,
        "name": "text",
    }
    histogram = diagnostics.exponent_histogram(tree)
    assert histogram.paths == ("rate", "w")
    assert [row["exponents"] for row in histogram.as_dict()["leaves"]] == [{"-1": 1}, {"0": 2}]
    empty = diagnostics.exponent_histogram({"ids": np.arange(3)})
    assert empty.paths == () and empty.as_dict()["total"]["exponents"] == {}
    assert "total" in str(empty)


def test_empty_and_scalar_leaves():
    histogram = diagnostics.exponent_histogram({"a": np.ones((0, 3), np.float32), "b": np.float32(-8)})
    assert histogram.values.sum(axis=1).tolist() == [0, 1] and histogram.total().as_dict()["total"]["zeros"] == 0


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.LayerNorm()(x))


class NNXNet(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def test_linen_and_nnx():
    linen = HISTOGRAM(jax.jit(Net().init)(jax.random.key(0), np.ones((2, 4))))
    assert linen.paths == tuple(
        f"params/{name}" for name in ("Dense_0/bias", "Dense_0/kernel", "LayerNorm_0/bias", "LayerNorm_0/scale")
    )
    model = NNXNet()
    for tree in (model, nnx.state(model, nnx.Param)):
        histogram = diagnostics.exponent_histogram(tree)
        assert {"linear/bias", "linear/kernel", "norm/scale"} <= set(histogram.paths)
        assert histogram.zeros[histogram.paths.index("linear/bias")] == 3


def test_vmap_and_scan_return_stacks():
    values = awkward(np.float32)[:300].reshape(3, 100)

    @jax.jit
    def stacks(values):
        scan = jax.lax.scan(lambda carry, x: (carry, diagnostics.exponent_histogram({"x": x})), 0, values)
        return jax.vmap(diagnostics.exponent_histogram)({"x": values}), scan[1]

    stack, scanned = stacks(values)
    for i in range(3):
        for stacked in (stack, scanned):
            check(jax.tree.map(lambda x, i=i: np.asarray(x)[i], stacked), values[i])
    with pytest.raises(ValueError) as error:
        stack.as_dict()
    assert str(error.value) == (
        "this is a stack of histograms, of shape (3,), as vmap and scan return; "
        "take one with jax.tree.map(lambda x: x[0], histogram)."
    )


def test_histograms_add_up_over_steps_in_a_scan_carry():
    values = awkward(np.float32)[:400].reshape(4, 100)

    def step(histogram, x):
        return histogram + diagnostics.exponent_histogram({"x": x, "y": -2 * jnp.ones(3)}), None

    @jax.jit
    def added_up(values):
        start = diagnostics.exponent_histogram({"x": values[0], "y": 4 * jnp.ones(3)})
        return jax.lax.scan(step, start, values[1:])[0]

    summed = added_up(values)
    check(summed, values)
    assert summed.as_dict()["leaves"][1]["exponents"] == {"1": 9, "2": 3}
    whole = jax.jit(lambda histogram: histogram.total())(summed)
    assert whole.paths == ("total",) and whole.as_dict()["leaves"] == [summed.as_dict()["total"]]
    assert summed.as_dict()["total"]["exponents"]["2"] == 3 + exponents_of(values)[0].get(2, 0)


def test_counts_beyond_32_bits():
    one = histogram = diagnostics.exponent_histogram(np.ones((2, 3), np.float32))
    for _ in range(40):
        histogram = histogram + histogram
    assert histogram.values.sum() == 6 * 2**40
    assert (histogram + one).as_dict()["total"]["exponents"] == {"0": 6 * 2**40 + 6}
    assert str(6 * 2**40) in str(histogram)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 2**48), min_size=1, max_size=20))
def test_the_sum_of_counts(numbers):
    counts = np.zeros((20, 2), np.uint32)  # one size for all, so that there is one program
    counts[: len(numbers)] = [[n % 2**32, n >> 32] for n in numbers]
    assert to_int64(sum_uint64(jnp.asarray(counts), 0)) == sum(numbers)


def test_large_arrays_are_counted_in_rows():
    index = np.random.default_rng(0).integers(0, 7, (300, 50, 10))
    expected = np.bincount(index.ravel(), minlength=9)
    counts = jax.jit(bincount, static_argnums=1)(index.astype(np.int32), 9)
    np.testing.assert_array_equal(to_int64(counts), expected)


def test_what_cannot_be_added():
    numbers = np.ones(2, np.float32)
    one, other = (diagnostics.exponent_histogram({name: numbers}) for name in ("a", "b"))
    with pytest.raises(ValueError) as error:
        print(one + other)
    assert str(error.value) == (
        "histograms add up only for trees of the same leaves, these differ in ['a', 'b']; "
        "add what total() returns, or cast float64 leaves."
    )
    here, there = (diagnostics.exponent_histogram(OrderedDict.fromkeys(names, numbers)) for names in ("ab", "ba"))
    with pytest.raises(ValueError, match="differ in their order; add"):
        print(here + there)
    with pytest.raises(TypeError):
        print(one + 3)
    with jax.enable_x64(True):
        wide = diagnostics.exponent_histogram({"a": jnp.ones(2, jnp.float64)})
    with pytest.raises(ValueError, match=r"differ in bins from 2\^-149 and 2\^-1074; add"):
        print(one + wide)


def test_float64_without_64_bit_types_is_an_error():
    with pytest.raises(ValueError) as error:
        diagnostics.exponent_histogram({"w": np.ones(2)})
    assert str(error.value) == (
        "`exponent_histogram`: the leaf 'w' is float64 while 64-bit types are disabled, and JAX would round it to 32 "
        "bits; call jax.config.update('jax_enable_x64', True) first, or cast it yourself."
    )


@pytest.mark.parametrize(("shape", "dtype"), [((2**16, 2**16), jnp.float16), ((2**16, 2**15), jnp.complex64)])
def test_a_leaf_too_large_to_count(shape, dtype):
    with pytest.raises(ValueError) as error:
        jax.eval_shape(diagnostics.exponent_histogram, {"w": jax.ShapeDtypeStruct(shape, dtype)})
    assert str(error.value) == (
        "`exponent_histogram`: the leaf 'w' has 4294967296 values, and one leaf may have 2**32 - 1; "
        "pass it in pieces, as a list."
    )


def test_values_before_text():
    histogram = diagnostics.exponent_histogram({"w": np.array([0.75, 3.0, 0.0, np.nan, 2.0**-140, 1.0], np.float32)})
    assert json.loads(json.dumps(histogram.as_dict())) == histogram.as_dict()
    median = str(diagnostics.exponent_histogram(np.array([1.0, 2.0, 4.0], np.float32))).splitlines()[-1].split()[4]
    assert median == "2^1"
    assert str(histogram).splitlines() == [
        "leaf   values  zero  smallest  median  largest  infinite  NaN",
        "w      6       1     2^-140    2^-1    2^1      0         1",
        "total  6       1     2^-140    2^-1    2^1      0         1",
    ]


def test_through_flatten_with_every_leaf_replaced():
    histogram = diagnostics.exponent_histogram({"w": np.ones(3, np.float32)})
    again = jax.tree.unflatten(jax.tree.structure(histogram), jax.tree.leaves(histogram))
    assert (again.paths, again.lowest) == (histogram.paths, histogram.lowest) and again.as_dict() == histogram.as_dict()
    assert jax.tree.map(lambda x: None, histogram).paths == ("w",)
    check(jax.device_get(histogram) + histogram, np.ones(6))


def test_in_a_training_step_with_an_injected_infinity():
    """The step returns a histogram of its gradients, the infinity of the skipped step included; it is traced once."""
    tx = jmp.with_loss_scale(optax.sgd(0.1))
    grad_fn = jmp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_float16")

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(w, opt_state, histogram, x):
        _, grads = grad_fn(w, x, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, histogram + diagnostics.exponent_histogram(grads), grads

    w, x = np.ones((4, 2), np.float32), np.random.default_rng(0).standard_normal((8, 4), np.float32)
    bad = np.where(np.arange(8)[:, None] == 0, np.float32(np.inf), x)
    opt_state, histogram = jax.jit(tx.init)(w), diagnostics.exponent_histogram(np.zeros_like(w))
    seen = [np.zeros((4, 2), np.float32)]
    for batch in (x, bad, 2 * x):
        w, opt_state, histogram, grads = step(w, opt_state, histogram, batch)
        seen.append(np.asarray(grads))
    check(histogram, np.stack(seen))
    assert histogram.infinities + histogram.nans > 0 and opt_state.skipped_steps == 1


def test_sharded_arrays_and_shard_map():
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    values = awkward(np.float32)[:256].reshape(8, 32)
    check(HISTOGRAM(jax.device_put(values, NamedSharding(mesh, PartitionSpec("data")))), values)

    def of_mine(x):
        mine = diagnostics.exponent_histogram(x)
        return jax.tree.map(lambda counts: counts[None], mine), mine.psum("data")

    for check_vma in (True, False):
        specs = PartitionSpec("data"), PartitionSpec()
        inside = jax.shard_map(of_mine, mesh=mesh, in_specs=specs[0], out_specs=specs, check_vma=check_vma)
        each, together = jax.jit(inside)(values)
        check(together, values)
        for device, part in enumerate(values):
            check(jax.tree.map(lambda counts, i=device: np.asarray(counts)[i], each), part)


@pytest.mark.parametrize("within", [jax.set_mesh, lambda mesh: contextlib.nullcontext()])
def test_arrays_over_a_mesh_with_explicit_axes(within):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    values = np.random.default_rng(0).standard_normal((8, 64), np.float32)
    with within(mesh):
        for spec in (PartitionSpec(), PartitionSpec("data", "model")):
            split = jax.device_put(values, NamedSharding(mesh, spec))
            check(HISTOGRAM(split), values)
            check(diagnostics.exponent_histogram(split), values)


def test_the_sum_over_devices_carries():
    most = np.full(8, 2**32 - 1, np.uint32)
    histogram = diagnostics.exponent_histogram(np.ones(3, np.float32))
    counts = np.zeros((8, *histogram.counts.shape), np.uint32)
    counts[:, 0, 149, 0], counts[:, 0, 149, 1] = most, 3
    stacked = dataclasses.replace(histogram, counts=counts)
    total = jax.pmap(lambda each: each.psum("i"), axis_name="i")(stacked)
    assert int(jax.tree.map(lambda x: np.asarray(x)[5], total).values[0, 149]) == 8 * (2**32 - 1 + (3 << 32))
