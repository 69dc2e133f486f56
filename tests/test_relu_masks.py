"""The mask of a relu's derivative is computed from the 16-bit result that a dot reads, and equals the recorded one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_autocast import equations

from jmp_train import autocast
from jmp_train._autocast.analysis.relus import is_positive, relu_operand
from jmp_train._jaxpr import flatten

RNG = np.random.default_rng(0)
W, X = (RNG.standard_normal((8, 8)).astype(np.float32) for _ in range(2))


def stack(w, x):
    return jax.lax.scan(lambda h, _: (h + jax.nn.relu(h @ w) @ w, None), x, length=3)[0]


def normed(w, x):
    h = x @ w
    h = h - h.mean(0)
    return jax.nn.relu(h * jax.lax.rsqrt(jnp.mean(h**2, 0) + 1e-3)) @ w


def written_out(w, x):
    h = x @ w
    r = jnp.maximum(0.0, h)
    return (r @ w) * (h > 0)


KEPT = ("optimization_barrier", "scan")  # primitives that read a value from memory
RELUS = {
    "of a dot": lambda w, x: jax.nn.relu(x @ w) @ w,
    "of what is computed again": normed,
    "written out": written_out,
    "read by others too": lambda w, x: (lambda h: h @ w + h)(jax.nn.relu(x @ w)),
    "rematerialised": lambda w, x: jax.checkpoint(lambda h: jax.nn.relu(h @ w) @ w)(x @ w),
    "in a scan": stack,
}


@pytest.mark.parametrize("name", RELUS)
def test_the_mask_is_read_off_the_result_and_not_kept(name):
    def loss(w, x):
        return jnp.mean(RELUS[name](w, x) ** 2)

    found = equations(autocast(jax.grad(loss), "mixed_float16"), W, X)
    compared = {dtypes[0].name for name, dtypes, _ in found if name == "gt"}
    kept = [
        name for name, dtypes, out in found if name in ("optimization_barrier", "scan") and np.dtype(bool) in dtypes
    ]
    assert compared == {"float16"} and not kept
    got, exact = (jax.jit(fn)(W, X) for fn in (autocast(jax.grad(loss), "mixed_float16"), jax.grad(loss)))
    assert np.linalg.norm(got - exact) < 2e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_mask_is_that_of_the_number_where_it_does_not_round_to_zero(dtype):
    x = np.array([np.nan, np.inf, 7e4, 1.0, 1e-5, 4e-8, 2e-8, 1e-30, 0.0, -0.0, -4e-8, -1.0, -7e4, -np.inf], np.float32)

    def slope(x):
        return jnp.sum(jax.nn.relu(x)[None] @ np.ones((14, 1), np.float32))

    with np.errstate(over="ignore"):
        positive = np.asarray(x.astype(dtype), np.float32) > 0
    gradient = autocast(jax.value_and_grad(slope), f"mixed_{dtype}")(x)[1]
    decided = positive == (x > 0)  # otherwise it is the compiler's, which may drop the rounding
    np.testing.assert_array_equal(gradient[decided], positive[decided])
    np.testing.assert_array_equal(decided, (dtype == "bfloat16") | (x <= 0) | (x > 2.0**-25) | np.isnan(x))


@jax.custom_jvp
def cosine(x):
    return jnp.cos(x)


@cosine.defjvp
def _(primals, tangents):
    return cosine(primals[0]), -jnp.sin(primals[0]) * tangents[0]


OTHERS = {
    "another bound": lambda h: (jnp.maximum(h, 0.5), h > 0),
    "another comparison": lambda h: (jax.nn.relu(h), h > 0.5),
    "of the result": lambda h: (lambda r: (r, r > 0.5))(jax.nn.relu(h)),
    "the smaller number": lambda h: (jnp.minimum(h, 0.0), h > 0),
    "another function": lambda h: (cosine(h), h > 0),
    "of another number": lambda h: (jax.nn.relu(h), h - 1 > 0),
    "negative": lambda h: (jax.nn.relu(h), h < 0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_comparisons_are_those_recorded(name):
    def loss(w, x):
        r, mask = OTHERS[name](x @ w)
        return jnp.mean(((r @ w) * jnp.where(mask, x, 1.0)) ** 2)

    cast = autocast(jax.grad(loss), "mixed_float16")
    got, exact = cast(W, X), jax.jit(jax.grad(loss))(W, X)
    assert np.linalg.norm(got - exact) < 2e-3 * np.linalg.norm(exact)
    # Their operand is in memory anyway if the backward pass also reads it for something else.
    barriers = [dtypes for name, dtypes, _ in equations(cast, W, X) if name == "optimization_barrier"]
    assert ([np.dtype(bool)] in barriers) == (name not in ("of the result", "another function"))


@jax.custom_jvp
def passed(x):
    return np.float32(-1.0), jnp.maximum(x, 0.0)


@passed.defjvp
def _(primals, tangents):
    return passed(primals[0]), (np.float32(0.0), jnp.where(primals[0] > 0, tangents[0], 0.0))


def test_the_second_of_two_results_is_not_taken_for_the_first():
    def loss(w, x):
        return jnp.sum(passed(x @ w)[1] @ w)

    np.testing.assert_allclose(
        autocast(jax.grad(loss), "mixed_float16")(W, X), jax.grad(loss)(W, X), rtol=0.02, atol=0.05
    )


def test_masks_keep_their_shape_and_their_operand():
    zero = jnp.zeros((1,))

    def fn(w, x):
        total, first = jnp.sum(x @ w), (x @ w)[0, :1]
        return jnp.maximum(total, zero), total > 0, jnp.maximum(first, zero), zero > 0

    cast = autocast(fn, "mixed_float16")(W, X)
    assert [each.shape for each in cast] == [(1,), (), (1,), (1,)] and not cast[3]


@pytest.mark.parametrize("number", [0.0, 0.1])
def test_a_bound_that_is_an_array_of_the_device(number):
    """Under `jit` an operation on it would be traced, and have no value while the program is planned."""
    bound = jnp.float32(number)

    def loss(w, x):
        return jnp.sum(jnp.maximum(x @ w, bound) @ w) + jnp.sum(jnp.pad(x @ w, 1, constant_values=bound))

    got = jax.jit(autocast(jax.grad(loss), "mixed_float16"))(W, X)
    np.testing.assert_allclose(got, jax.grad(loss)(W, X), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [(lambda x: x > 0, True), (lambda x: x >= 0, False), (lambda x: x > 1, False), (lambda x: 0 > x, False)],
)
def test_which_comparisons_say_that_a_number_is_positive(fn, expected):
    program = flatten(jax.make_jaxpr(fn)(np.ones(3, np.float32)))
    assert is_positive(program.nodes[-1], program) == expected


def test_an_identity_with_a_derivative_of_its_own_is_no_relu():
    same = jax.custom_jvp(lambda x: x)
    same.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))
    program = flatten(jax.make_jaxpr(same)(X))
    assert relu_operand(program.nodes[0], program) is None
