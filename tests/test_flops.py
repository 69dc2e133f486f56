"""FLOPs of dots, convolutions and attention equal counts by hand, in loops, in branches and across devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from product_tools import CONVOLUTIONS, array, convolution, product, products

from jmp_train._flops import attention_flops
from jmp_train.diagnostics import tensor_core_report


def test_matrix_products():
    assert product(jnp.matmul, array(32, 64), array(64, 128)).flops == 2 * 32 * 64 * 128
    batched = product(lambda a, b: jnp.einsum("bhij,bhkj->bhik", a, b), array(2, 4, 16, 8), array(2, 4, 32, 8))
    assert (batched.batch, batched.m, batched.n, batched.k) == (8, 16, 32, 8)
    assert batched.flops == 2 * 8 * 16 * 32 * 8
    dense = product(lambda x, w: x @ w, array(4, 16, 64), array(64, 8))
    assert (dense.batch, dense.m, dense.n, dense.k) == (1, 4 * 16, 8, 64)


def test_ragged_dots():
    sizes = jnp.array([8, 24], jnp.int32)
    found = product(lambda x, w: lax.ragged_dot(x, w, sizes), array(32, 64), array(2, 64, 16))
    assert (found.m, found.n, found.k) == (32, 16, 64)
    assert found.flops == 2 * 32 * 64 * 16

    def loss(x, w):
        return jnp.sum(jnp.sin(lax.ragged_dot(x, w, sizes).astype(jnp.float32)))

    grads = products(jax.grad(loss, (0, 1)), array(32, 64), array(2, 64, 16))  # that of `w` contracts rows, by groups
    assert [each.flops for each in grads] == [2 * 32 * 64 * 16] * 3


# Every element of a convolution of ones is the number of products that were not with an inserted zero.
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions(options):
    fn, x, kernel = convolution(options)
    ones = fn(np.ones(x, np.float32), np.ones(kernel, np.float32))
    assert product(fn, array(*x), array(*kernel)).flops == 2 * np.sum(np.asarray(ones, np.float64))


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if name != "batch groups"])
def test_the_gradients_of_a_convolution_have_its_flops(name):
    fn, x, kernel = convolution(CONVOLUTIONS[name])
    forward = product(fn, array(*x), array(*kernel)).flops
    grads = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(fn(x, kernel).astype(jnp.float32))), (0, 1))
    assert [each.flops for each in products(grads, array(*x), array(*kernel))] == [forward] * 3


def test_attention():
    batch, length, heads, size = 2, 32, 4, 16
    q = array(batch, length, heads, size)
    one = 2 * batch * heads * length * length * size
    assert sum(each.flops for each in products(jax.nn.dot_product_attention, q, q, q)) == 2 * one
    grads = jax.grad(lambda q, k, v: jnp.sum(jax.nn.dot_product_attention(q, k, v).astype(jnp.float32)), (0, 1, 2))
    assert sum(each.flops for each in products(grads, q, q, q)) == (2 + 4) * one


def test_attention_of_cudnn_is_counted_where_it_is_traced():
    """A call of cuDNN cannot be traced here, because that needs cuDNN; its shapes are given."""
    shapes, transposed = [(2, 32, 4, 16), (2, 64, 4, 16)], [(2, 4, 32, 16), (2, 4, 64, 16)]
    one = 2 * 2 * 4 * 32 * 64 * 16
    for layout, given in ((0, shapes), (1, transposed)):
        assert attention_flops("dot_product_attention_fwd_wrapper", given, {"layout": layout}) == 2 * one
        assert attention_flops("dot_product_attention_bwd_wrapper", given, {"layout": layout}) == 5 * one
    assert attention_flops("dot_general", shapes, {}) == 0


@pytest.mark.parametrize("steps", [10, 100])
def test_loops_are_multiplied_out(steps):
    def layers(w, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0].astype(jnp.float32))

    once = 2 * 8 * 64 * 64
    args = array(steps, 64, 64), array(8, 64)
    assert tensor_core_report(layers)(*args).flops == steps * once
    assert tensor_core_report(jax.grad(layers, (0, 1)))(*args).flops == 3 * steps * once
    assert tensor_core_report(jax.jit(lambda w, x: lax.fori_loop(0, steps, lambda i, h: h @ w, x)))(
        array(64, 64), array(8, 64)
    ).flops == (steps * once)


def test_branches_and_loops_of_unknown_length():
    def fn(w, x, n):
        x = lax.cond(n > 1, lambda: x @ w, lambda: jnp.tanh(x @ w))
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ w), (0, x))

    report = tensor_core_report(fn)(array(64, 64), array(8, 64), array(dtype=jnp.int32))
    assert len(report.products) == 3 and report.uncounted_loops == 1
    assert "Counted as one iteration: 1 while loop of unknown length" in str(report)


def test_a_loop_with_a_product_in_its_condition_alone():
    report = tensor_core_report(lambda w: lax.while_loop(lambda x: jnp.sum(x @ w) > 0, lambda x: x - 1, w))
    assert report(array(64, 64)).uncounted_loops == 1


def test_shard_map_counts_all_devices():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (PartitionSpec("d"), PartitionSpec())
    fn = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("d"))
    report = tensor_core_report(fn)(array(64, 64), array(64, 32))
    assert report.flops == 2 * 64 * 64 * 32 and report.products[0].times == 8
