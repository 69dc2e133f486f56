"""What `explain` reports as left out of its FLOP count: opaque calls, and products of unknown size or number."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.export import symbolic_shape
from jax.extend.core import Primitive

from jmp_train import explain, full_precision

W = jnp.full((8, 8), 0.5)
ONE = 2 * 8 * 8 * 8  # FLOPs of W @ W
SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def kernel(x, y, out):
    out[...] = x[...] @ y[...]


def multiply(x, y, flops=None):
    """`x @ y` as a kernel written for the dtype of `x`."""
    estimate = None if flops is None else pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=0)
    shape = jax.ShapeDtypeStruct((8, 8), x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True, cost_estimate=estimate)(x, y)


@custom_partitioning
def partitioned(x, y):
    return x @ y


partitioned.def_partition(
    partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule="i j, j k -> i k"
)


def fake(name):
    """A primitive that JAX makes on a GPU only, or that nobody knows."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda *avals, **_: avals[0])
    return primitive.bind


def found(fn, *args, policy="mixed_float16"):
    report = explain(fn, policy)(*(args or (W,)))
    assert json.loads(json.dumps(report.as_dict()))["uncounted"] == report.as_dict()["uncounted"]
    return report


def rows(report):
    return [(kind.primitive, kind.number, kind.dtype, kind.reason, kind.flops) for kind in report.uncounted]


KERNEL = "a kernel written for the dtypes it was given"


def test_nothing_is_named_where_all_is_counted():
    def loss(w):
        return jnp.mean(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), w, None, length=3)[0])

    report = found(jax.grad(loss))
    assert report.uncounted == () and report.kept_symbolic == 0 and "Not counted" not in str(report)


def test_a_kernel():
    report = found(lambda w: multiply(w @ w, w))
    assert rows(report) == [("pallas_call", 1, "float32", KERNEL, None)]
    assert report.flops == ONE and report.low_flop_share == 1  # of what is counted
    lines = str(report).splitlines()
    assert (
        lines[1].startswith("100.0% of ") and lines[2] == f"Not counted: 1 pallas_call on float32 operands ({KERNEL})"
    )
    assert report.as_dict()["uncounted"] == [
        {"primitive": "pallas_call", "number": 1, "dtype": "float32", "reason": KERNEL, "flops": None}
    ]


def test_a_kernel_alone():
    assert str(found(lambda w: multiply(w, w))).splitlines()[1].startswith("Not counted: 1 pallas_call")


def test_a_kernel_of_16_bit_operands_and_one_of_integers():
    low = found(lambda w: multiply(w.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), policy="mixed_bfloat16")
    assert rows(low) == [("pallas_call", 1, "bfloat16", KERNEL, None)]
    assert rows(found(lambda i: multiply(i, i), jnp.ones((8, 8), jnp.int32))) == []


def test_estimates_of_kernels_count_loops():
    def fn(w):
        return lax.scan(lambda c, _: (multiply(c, w, ONE), None), multiply(w, w, ONE), None, length=3)[0]

    report = found(fn)
    assert rows(report) == [("pallas_call", 2, "float32", KERNEL, 4 * ONE)]
    assert f"{KERNEL}; 4.1e-06 GFLOP by its own estimate" in str(report)
    # A sum with a part missing would pass for the whole.
    assert rows(found(lambda w: multiply(fn(w), w))) == [("pallas_call", 3, "float32", KERNEL, None)]


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_wherever_it_stands(policy):
    for inside in (full_precision, jax.jit, jax.checkpoint, jax.vmap):
        x = W[None] if inside is jax.vmap else W
        (row,) = rows(found(lambda w, x, inside=inside: inside(lambda x: multiply(x, x))(x), W, x, policy=policy))
        assert row[:2] == ("pallas_call", 1)


OPAQUE = {
    "pure_callback": (lambda w: jax.pure_callback(lambda x: x @ x, SHAPE, w), "calls the host"),
    "ffi_call": (lambda w: jax.ffi.ffi_call("multiply", SHAPE)(w, w), "compiled elsewhere"),
    "custom_partitioning": (lambda w: partitioned(w, w), "compiled elsewhere"),
    "mystery": (
        lambda w: fake("mystery")(w),
        "not in the table: a primitive of another library, or of a newer JAX",
    ),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_other_programs_that_are_no_jaxprs(name):
    fn, reason = OPAQUE[name]
    assert rows(found(fn)) == [(name, 1, "float32", reason, None)]


def test_an_operation_that_nobody_knows_of_complex_numbers():
    bind = fake("mystery")
    ((name, number, dtype, _, _),) = rows(found(lambda x: bind(x, x), W.astype(jnp.complex64)))
    assert (name, number, dtype) == ("mystery", 1, "complex64")


def test_one_floating_operand_is_enough():
    ((name, number, dtype, _, _),) = rows(found(lambda w: fake("mystery")(jnp.arange(8), w)))
    assert (name, number, dtype) == ("mystery", 1, "float32")


def test_an_exported_function():
    exported = jax.export.export(jax.jit(lambda w: w @ w))(W)
    assert rows(found(lambda w: exported.call(w @ w))) == [("call_exported", 1, "float32", "compiled elsewhere", None)]


def test_fused_attention_has_its_flops():
    q = jnp.ones((2, 16, 4, 8), jnp.bfloat16)
    bind = fake("dot_product_attention_fwd_wrapper")
    ((name, _, dtype, _, flops),) = rows(found(lambda q: bind(q, q, q, layout=0), q))
    assert (name, dtype, flops) == ("dot_product_attention_fwd_wrapper", "bfloat16", 2 * 2 * (2 * 4 * 16 * 16 * 8))


def test_fused_attention_of_symbolic_size():
    (length,) = symbolic_shape("t")
    bind = fake("dot_product_attention_fwd_wrapper")
    q = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.bfloat16)
    assert [flops for *_, flops in rows(found(lambda q: bind(q, q, q, layout=0), q))] == [None]


def test_a_scan_of_symbolic_length_that_multiplies_nothing_is_not_named():
    x = jax.ShapeDtypeStruct(symbolic_shape("t, 8"), jnp.float32)
    assert rows(found(lambda x: lax.scan(lambda c, row: (c + row, c * 2), jnp.ones(8), x), x)) == []


def test_what_multiplies_nothing_is_not_named():
    def fn(w):
        jax.debug.print("{}", w)
        io_callback(lambda _: None, None, w)
        return lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c / 2, jnp.linalg.cholesky(w @ w))

    assert rows(found(fn)) == []


def test_loops_of_unknown_length():
    def counted(w):
        return lax.fori_loop(0, jnp.int32(w[0, 0]), lambda _, c: c @ w, w)

    def converging(w):
        return lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: multiply(c, w), w)

    report = found(lambda w: counted(w) + converging(w))
    once = "counted as one iteration"
    assert rows(report) == [("while", 2, None, once, None), ("pallas_call", 1, "float32", KERNEL, None)]
    assert report.flops == ONE and f"2 while ({once})" in str(report)
    (row, _) = rows(found(lambda w: lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: fake("mystery")(c), w)))
    assert row == ("while", 1, None, once, None)


def test_solvers():
    report = found(lambda w: lax.custom_linear_solve(lambda v: w @ v, w[0], lambda matvec, b: matvec(matvec(b))))
    assert ("custom_linear_solve", 1, None, "each of its functions counted once", None) in rows(report)


class TestSymbolic:
    def test_products_and_what_is_kept(self):
        def loss(w, x):
            return jnp.mean(jnp.exp(x @ w) @ (w @ w))

        x = jax.ShapeDtypeStruct(symbolic_shape("b, 8"), jnp.float32)
        report = found(jax.grad(loss), W, x)
        assert rows(report) == [("dot_general", 5, "float16", "symbolic dimensions", None)]
        assert report.flops == 3 * ONE and report.low_flop_share == 1  # w @ w and its two gradients
        assert dict(report.kept_bytes) == {"float16": 2 * 8 * 8, "float32": 4}  # w @ w, and what the mean divides by
        assert report.kept_symbolic == 1
        text = "The backward pass reads from the forward pass: 128 B float16, 4 B float32, 1 array of symbolic size"
        assert text in str(report)
        assert report.table() and not report.diff(report)

    def test_nothing_that_is_kept_has_a_known_size(self):
        x = jax.ShapeDtypeStruct(symbolic_shape("b"), jnp.float32)
        report = found(jax.grad(lambda x: jnp.sum(jnp.sin(x))), x)
        assert report.kept_bytes == () and report.kept_symbolic == 1
        assert "The backward pass reads from the forward pass: 1 array of symbolic size" in str(report)

    def test_a_convolution(self):
        x = jax.ShapeDtypeStruct(symbolic_shape("b, 2*h, 2*h, 8"), jnp.float32)
        numbers = ("NHWC", "HWIO", "NHWC")

        def loss(w, x):
            return jnp.mean(lax.conv_general_dilated(x, w[None, None], (1, 1), "SAME", dimension_numbers=numbers) ** 2)

        assert rows(found(jax.grad(loss), W, x)) == [
            ("conv_general_dilated", 2, "float16", "symbolic dimensions", None)
        ]

    def test_a_loop(self):
        def fn(w, x):
            return lax.scan(lambda c, row: (c @ w + row, None), w, x)[0]

        x = jax.ShapeDtypeStruct(symbolic_shape("n, 8, 8"), jnp.float32)
        report = found(fn, W, x)
        assert rows(report) == [("scan", 1, None, "counted as one iteration: symbolic length", None)]
        assert report.flops == ONE

    def test_outputs(self):
        (output,) = found(lambda x: x @ W, jax.ShapeDtypeStruct(symbolic_shape("b, 8"), jnp.float32)).outputs
        assert output.shape == ("b", 8) and output.computed_in == "float16"

    def test_the_plan_does_not_depend_on_it(self):
        def loss(w, x):
            return jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ w) @ w))

        def plan(x):
            # The size of a symbolic batch is computed, as an integer.
            operations = [op for op in found(jax.grad(loss), W, x).operations if op.recorded == "float32"]
            return [(op.primitive, op.dtype, op.result) for op in operations]

        assert plan(jax.ShapeDtypeStruct(symbolic_shape("b, 8"), jnp.float32)) == plan(jnp.ones((5, 8)))
