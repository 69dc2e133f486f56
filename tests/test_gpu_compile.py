"""The readers of compiled modules find every fault planted here, and nothing in correct code."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from gpu_report_tools import convolutions, dots, wide
from jax.sharding import PartitionSpec
from loop_carries import sixteen_bit_carries

from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train._diagnostics.gpu._findings import collectives, copies, sixteen_bit_sums
from jmp_train._diagnostics.gpu._kernels import kernels, traffic

HALVES = [jnp.float16, jnp.bfloat16]


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def raw_sum(x, dimensions=(0,)):
    """`jnp.sum` adds 16-bit numbers in float32; the transpose of a broadcast does not."""
    return jax.lax.reduce(x, x.dtype.type(0), jax.lax.add, dimensions)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
class TestSums:
    def test_reduce(self, dtype):
        assert len(sixteen_bit_sums(gpu_module(raw_sum, array(4096, 64, dtype=dtype)))) >= 1
        assert sixteen_bit_sums(gpu_module(lambda x: jnp.sum(x, 0), array(4096, 64, dtype=dtype))) == ()

    def test_bias_gradient(self, dtype):
        def loss(b, x):
            return jnp.sum(jnp.square((x + b).astype(jnp.float32)))

        text = gpu_module(jax.grad(loss), array(64, dtype=dtype), array(4096, 64, dtype=dtype))
        assert len(sixteen_bit_sums(text)) >= 1

    def test_reduce_window(self, dtype):
        def pool(x):
            return jax.lax.reduce_window(x, x.dtype.type(0), jax.lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

        x = array(8, 32, 32, 16, dtype=dtype)
        # XLA has no bfloat16 reduce-window: it widens the window, and rounds to bfloat16 after each of its additions.
        assert len(sixteen_bit_sums(gpu_module(pool, x))) == 1
        assert sixteen_bit_sums(gpu_module(lambda x: pool(x.astype(jnp.float32)), x)) == ()

    def test_maxima_are_exact(self, dtype):
        assert sixteen_bit_sums(gpu_module(lambda x: jnp.max(x, 0), array(4096, 64, dtype=dtype))) == ()

    def test_scatter_add(self, dtype):
        def embedding_gradient(table, ids, g):
            return table.at[ids].add(g)

        ids, g = array(512, dtype=jnp.int32), array(512, 64, dtype=dtype)
        assert len(sixteen_bit_sums(gpu_module(embedding_gradient, array(1000, 64, dtype=dtype), ids, g))) >= 1
        assert sixteen_bit_sums(gpu_module(embedding_gradient, array(1000, 64), ids, array(512, 64))) == ()

    def test_all_reduce(self, dtype):
        def mean_gradient(w, x):
            return jax.grad(lambda w: jnp.sum(jnp.square((x @ w).astype(jnp.float32))))(w)

        options = {"devices": 8, "in_shardings": (PartitionSpec(), PartitionSpec("data"))}
        text = gpu_module(mean_gradient, array(64, 64, dtype=dtype), array(512, 64, dtype=dtype), **options)
        (found,) = collectives(text)
        assert (found.operation, found.dtypes) == ("all-reduce", ("f16" if dtype == jnp.float16 else "bf16",))
        assert len(sixteen_bit_sums(text)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
class TestProducts:
    @pytest.mark.parametrize("shape", [(64, 512, 512), (4, 8, 4), (2048, 2048, 2048), (1, 512, 512)])
    def test_dots(self, dtype, shape):
        m, k, n = shape
        low = gpu_module(jnp.matmul, array(m, k, dtype=dtype), array(k, n, dtype=dtype))
        assert wide(dots(low)) == []
        high = gpu_module(jnp.matmul, array(m, k), array(k, n))
        # One row times a matrix is no dot for XLA, but a fused multiplication and sum, in float32 or 16 bits.
        assert len(wide(dots(high))) == len(dots(high)) == len(dots(low)) == (1 if m > 1 else 0)

    def test_a_widened_operand(self, dtype):
        def mixed(x, w):
            return jax.lax.dot(x.astype(jnp.float32), w)

        assert len(wide(dots(gpu_module(mixed, array(256, 512, dtype=dtype), array(512, 512))))) == 1

    @pytest.mark.parametrize("batch", [1, 8])
    def test_convolutions(self, dtype, batch):
        def conv(x, k, preferred):
            return jax.lax.conv_general_dilated(
                x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=preferred
            )

        x, k = array(batch, 32, 32, 16, dtype=dtype), array(3, 3, 16, 32, dtype=dtype)
        narrow = gpu_module(lambda x, k: conv(x, k, None), x, k)
        widened = gpu_module(lambda x, k: conv(x, k, jnp.float32), x, k)
        assert len(convolutions(narrow)) == len(convolutions(widened)) == 1
        assert wide(convolutions(narrow)) == []
        assert len(wide(convolutions(widened))) == 1


@pytest.mark.slow
class TestBytes:
    def test_elementwise_traffic_is_exact(self):
        text = gpu_module(lambda x, y: x + y, array(1000), array(1000))
        assert traffic(text) == 3 * 4000
        assert len(kernels(text)) == 1

    def test_donation(self):
        def swap(a, b):
            return b + 1, a + 1

        def keep(a, b):
            return a + 1, b + 1

        args = (array(100_000), array(100_000))
        assert copies(gpu_module(keep, *args, donate_argnums=(0, 1))) == ()
        assert len(copies(gpu_module(swap, *args, donate_argnums=(0, 1)))) >= 1

    @pytest.mark.parametrize("steps", [10, 100])
    def test_loops_are_multiplied_out(self, steps):
        def loop(x):
            return jax.lax.scan(lambda c, _: (jnp.sin(c @ c), ()), x, length=steps)[0]

        one, many = (traffic(gpu_module(fn, array(256, 256))) for fn in (lambda x: jnp.sin(x @ x), loop))
        assert steps <= many / one <= 1.1 * steps + 2


class TestCarries:
    @pytest.mark.parametrize("steps", [10, 100])
    @pytest.mark.parametrize("dtype", HALVES)
    def test_the_gradient_of_a_reused_weight(self, steps, dtype):
        def loss(w, xs):
            return jnp.sum(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), ()), jnp.zeros((4, 8), dtype), xs)[0])

        args = (array(8, 8, dtype=dtype), array(steps, 4, 8, dtype=dtype))
        assert len(sixteen_bit_carries(jax.grad(loss))(*args)) == 1
        assert sixteen_bit_carries(loss)(*args) == []

    @pytest.mark.parametrize("dtype", HALVES)
    def test_accumulated_gradients(self, dtype):
        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ w))

        def total(w, xs, accumulator):
            def add(i, total):
                return total + jax.grad(loss)(w, xs[i]).astype(total.dtype)

            return jax.lax.fori_loop(0, 10, add, jnp.zeros(w.shape, accumulator))

        def while_total(w, xs, accumulator):
            def body(carry):
                i, total = carry
                return i + 1, jax.jit(jnp.add)(total, jax.grad(loss)(w, xs[i]).astype(total.dtype))

            start = (0, jnp.zeros(w.shape, accumulator))
            return jax.lax.while_loop(lambda carry: carry[0] < len(xs), body, start)

        args = (array(8, 8, dtype=dtype), array(10, 4, 8, dtype=dtype))
        for fn in (total, while_total):
            assert len(sixteen_bit_carries(lambda w, xs, fn=fn: fn(w, xs, dtype))(*args)) == 1
            assert sixteen_bit_carries(lambda w, xs, fn=fn: fn(w, xs, jnp.float32))(*args) == []

    def test_rounding_a_float32_sum_at_every_step_is_a_16_bit_sum(self):
        def body(total, x):
            return (total.astype(jnp.float32) + x).astype(jnp.float16), ()

        xs = array(10, 4)
        assert len(sixteen_bit_carries(lambda xs: jax.lax.scan(body, jnp.zeros(4, jnp.float16), xs))(xs)) == 1

    def test_a_residual_stream_is_no_sum(self):
        def layers(h, ws):
            return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), ()), h, ws)[0]

        args = (array(4, 8, dtype=jnp.float16), array(12, 8, 8, dtype=jnp.float16))
        assert sixteen_bit_carries(layers)(*args) == []

    def test_a_sum_into_one_branch(self):
        def body(total, x):
            return jax.lax.cond(x > 0, lambda: total + x, lambda: total), ()

        xs = array(10, dtype=jnp.float16)
        assert len(sixteen_bit_carries(lambda xs: jax.lax.scan(body, jnp.float16(0), xs))(xs)) == 1


def test_a_bfloat16_window_of_ones_stops_growing():
    """Although XLA widens the window, its sum counts as a 16-bit sum."""
    total = jax.lax.reduce_window(jnp.ones(512, jnp.bfloat16), jnp.bfloat16(0), jax.lax.add, (512,), (512,), "VALID")
    assert float(total[0]) == 256


@pytest.mark.slow
def test_no_assembler_of_cuda_is_called(tmp_path):
    """Not even an installed one, because most machines without a GPU have none."""
    assembler, called = tmp_path / "ptxas", tmp_path / "called"
    assembler.write_text(f'#!/bin/sh\ntouch "{called}"\necho "Cuda compilation tools, release 13.0, V13.0.88"\n')
    assembler.chmod(0o755)
    program = """if True:
        import jax.numpy as jnp
        from jmp_train.diagnostics import gpu_report
        print(gpu_report(lambda x: jnp.tanh(x @ x))(jnp.ones((256, 256))).bytes)
    """
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert int(done.stdout) > 0, done.stderr
    assert not called.exists()
