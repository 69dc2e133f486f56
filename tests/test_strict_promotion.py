"""Under `jax_numpy_dtype_promotion="strict"`, where JAX raises for operands of two dtypes, the library does not raise.

Optimizers that optax itself cannot run there are left out: `optax.adam` raises a float to an integer power.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_models import ROWS, SMALL
from battery_tools import abstract_example, gradient_function

import jmp_train as jmp

WRAPPERS = {
    "loss scale": lambda tx: tx,
    "masters": jmp.with_master_weights,
    "stochastic rounding": jmp.with_stochastic_rounding,
    "low precision state": jmp.with_low_precision_state,
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.filterwarnings("ignore:with_low_precision_state")  # of sgd's state some is no candidate
def test_a_step(name, dtype):
    tx = jmp.with_loss_scale(WRAPPERS[name](optax.trace(0.9)))
    stored = "bfloat16" if name in ("masters", "stochastic rounding") else "float32"
    params = {"w": np.ones((2, 3), jnp.dtype(stored)), "b": np.ones(3, np.float32)}
    grads = jax.tree.map(lambda p: np.ones(p.shape, jnp.dtype(dtype)), params)

    def steps(params, grads, value):
        _, state = tx.update(grads, tx.init(params), params, value=value)
        return tx.update(grads, state, params, value=value)

    args = params, grads, np.float32(1)
    with jax.numpy_dtype_promotion("strict"):
        strict = jax.make_jaxpr(steps)(*args)
    assert str(strict) == str(jax.make_jaxpr(steps)(*args))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": 2}])
def test_attention(options):
    def loss(q, k, v, mask):
        return jnp.sum(jmp.dot_product_attention(q, k, v, mask=mask, **options))

    operands = [jnp.ones((2, 16, 4, 8))] * 3
    with jax.numpy_dtype_promotion("strict"):
        for mask in (None, jnp.ones((2, 1, 16, 16), bool)):
            for fn in (jax.grad(loss), jmp.grad(loss, "mixed_bfloat16")):
                assert jax.eval_shape(fn, *operands, mask).dtype == np.float32


QUICK = {"mlp", "resnet", "optax_integer_labels", "lstm", "transformer", "branches"}


@pytest.mark.parametrize("row", [pytest.param(r, marks=[pytest.mark.slow] * (r.name not in QUICK)) for r in ROWS])
def test_what_is_differentiated_there_can_be_autocast(row):
    args = abstract_example(row, SMALL)
    with jax.numpy_dtype_promotion("strict"):
        if row.name not in QUICK:
            try:
                jax.eval_shape(gradient_function(row, "float32"), *args)
            except jax.dtypes.TypePromotionError:
                return  # the model promotes
        jax.eval_shape(gradient_function(row, "mixed_float16"), *args)
