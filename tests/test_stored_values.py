"""Residuals other than operands of dots, and values that a loop reads in every iteration.

Bytes are those of `explain`, dtypes are read from the emitted program, and numbers are compared with float64 or with
JAX's own operation. `test_gpu_stored_values.py` tests the compiled modules.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jmp_train import autocast, explain
from jmp_train._jaxpr import scan_counts

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def kept(loss, *args):
    """Bytes saved for the backward pass, by dtype, under float16."""
    return dict(explain(jax.grad(loss), "mixed_float16")(*args).kept_bytes)


def test_the_derivative_of_a_variance_is_computed_again():
    """The derivative is twice the difference from the mean, which can overflow where the value itself does not."""

    def loss(params, x):
        for w in params:
            h = x @ w
            x = h / jnp.sqrt(jnp.mean(h**2, 0) + 1e-5)
        return jnp.sum((x @ params[0]) ** 2)

    rows, width = 64, 32
    params, x = [normal(width, width) for _ in range(3)], normal(rows, width)
    found = kept(loss, params, x)
    # Saved: of each layer the product and the operand of the next, and the last product.
    assert found["float16"] <= 7 * rows * width * 2
    large = autocast(jax.grad(lambda h: jnp.sqrt(jnp.mean((h @ jnp.eye(2)) ** 2))), "mixed_float16")(
        jnp.full((1, 2), 4e4)
    )
    np.testing.assert_allclose(large, 0.5, rtol=1e-3)


def test_the_inside_of_an_exact_gelu_is_computed_again():
    def loss(params, x):
        for w, b in params:
            x = jax.nn.gelu(x @ w + b, approximate=False)
        return jnp.sum((x @ params[0][0]) ** 2)

    rows, width = 64, 32
    params = [(normal(width, width) / 6, normal(width)) for _ in range(3)]
    found = kept(loss, params, normal(rows, width))
    # Saved: of each layer the product and the GELU, and the last product for the loss.
    assert found == {"float16": 6 * rows * width * 2, "float32": rows * width * 4}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_picking_one_element_a_row_is_differentiated_without_a_scatter(axis, mode):
    logits, index = normal(4, 5, 6), RNG.integers(-7, 9, np.delete([4, 5, 6], axis))
    index = index.clip(0, logits.shape[axis] - 1) if mode == "promise_in_bounds" else index
    index = np.expand_dims(index, axis).astype(np.int32)

    def loss(logits):
        picked = jnp.take_along_axis(logits, index, axis, mode=mode, fill_value=0.0)
        return jnp.sum(picked * jnp.arange(picked.size).reshape(picked.shape))

    cast = autocast(jax.grad(loss), "mixed_float16")
    assert "scatter" not in str(jax.make_jaxpr(cast)(logits))
    np.testing.assert_array_equal(jax.jit(cast)(logits), jax.jit(jax.grad(loss))(logits))


def test_picking_more_than_one_element_a_row_stays_a_sum():
    index = np.array([[1, 1, 2], [0, 0, 0]])

    def loss(logits):
        return jnp.sum(jnp.take_along_axis(logits, index, 1) ** 3)

    logits = normal(2, 4)
    gradient = autocast(jax.grad(loss), "mixed_float16")
    assert "scatter-add" in str(jax.make_jaxpr(gradient)(logits))
    np.testing.assert_allclose(gradient(logits), jax.grad(loss)(logits), rtol=2e-3)


def test_a_cross_entropy_has_no_scatter_of_its_logits():
    w, x, labels = normal(8, 32), normal(16, 8), RNG.integers(0, 32, 16)

    def loss(w, x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    emitted = jax.make_jaxpr(autocast(jax.grad(loss), "mixed_float16"))(w, x)
    assert not [
        eqn for eqn in all_equations(emitted) if "scatter" in eqn.primitive.name and eqn.outvars[0].aval.size > 16
    ]


def all_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from all_equations(inner)


STEPS, WIDTH = 512, 16


def recurrent(w, xs):
    def cell(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.mean(lax.scan(cell, jnp.zeros((4, WIDTH), xs.dtype), xs)[1] ** 2)


def scans(jaxpr):
    return [eqn for eqn in all_equations(jaxpr) if eqn.primitive.name == "scan"]


def casts_of_weights(jaxpr):
    """The casts of arrays with the weight's shape to 16 bits in the bodies of a program's scans."""
    bodies = [getattr(scan.params["jaxpr"], "jaxpr", scan.params["jaxpr"]) for scan in scans(jaxpr)]
    found = [eqn for body in bodies for eqn in all_equations(body) if eqn.primitive.name == "convert_element_type"]
    return [
        eqn for eqn in found if eqn.outvars[0].aval.shape == (WIDTH, WIDTH) and eqn.outvars[0].aval.dtype != np.float32
    ]


def test_a_loop_casts_its_weights_once():
    w, xs = normal(WIDTH, WIDTH) / 4, normal(STEPS, 4, WIDTH) / 2
    program = jax.make_jaxpr(autocast(jax.value_and_grad(recurrent), "mixed_float16"))(w, xs)
    assert len(scans(program)) == 2 and not casts_of_weights(program)


def test_a_loop_that_is_differentiated_accumulates_the_gradient_of_its_weights_in_float32():
    w, xs = normal(WIDTH, WIDTH) / 4, normal(STEPS, 4, WIDTH) / 2
    gradient = jax.grad(autocast(recurrent, "mixed_float16"))
    program = jax.make_jaxpr(gradient)(w, xs)
    for scan in scans(program):
        consts, carry = scan_counts(scan)
        for var in scan.invars[consts : consts + carry]:
            assert var.aval.shape != w.shape or var.aval.dtype == np.float32
    with jax.enable_x64():
        truth = np.asarray(jax.grad(recurrent)(w.astype(np.float64), xs.astype(np.float64)))
    error = np.linalg.norm(np.asarray(gradient(w, xs)) - truth) / np.linalg.norm(truth)
    assert error < 1e-3


INDEX = np.array([[0, 1], [2, 3], [4, 0]])
# Sums of one number a row of zeros, `[3, 2, size]`, each at an index of its own: the size, the indices, which of their
# axes the rows are, the mode, and whether the sum is written as a selection.
ADDED = {
    "of the rows' order": (5, INDEX, (0, 1), "promise_in_bounds", True),
    "of another order": (5, INDEX.T, (1, 0), "promise_in_bounds", False),
    "of a byte": (300, 60 * INDEX.astype(np.uint8), (0, 1), "clip", True),
    "of two bytes": (40_000, 8000 * INDEX.astype(np.int16), (0, 1), "promise_in_bounds", True),
    "of two bytes, clipped": (40_000, 8000 * INDEX.astype(np.int16), (0, 1), "clip", True),
}


@pytest.mark.parametrize("name", ADDED)
def test_adding_one_number_a_row_at_an_index(name):
    """JAX's own scatter loses numbers where the size of a row exceeds the range of the index's dtype."""
    size, index, batching, mode, expected = ADDED[name]
    dims = lax.ScatterDimensionNumbers(
        (), (2,), (2,), operand_batching_dims=(0, 1), scatter_indices_batching_dims=batching
    )
    numbers, x = np.arange(1.0, 7.0, dtype=np.float32).reshape(index.shape), np.zeros((3, 2, size), np.float32)
    cast = autocast(lambda x: lax.scatter_add(x, index[..., None], numbers, dims, mode=mode), "mixed_float16")
    assert ("scatter" not in str(jax.make_jaxpr(cast)(x))) == expected
    want = x.copy()
    np.put_along_axis(want, index.transpose(batching)[..., None], numbers.transpose(batching)[..., None], -1)
    np.testing.assert_array_equal(cast(x), want)
