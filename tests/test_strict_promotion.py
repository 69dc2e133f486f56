"""Under `jax_numpy_dtype_promotion="strict"`, where JAX raises for operands of two dtypes, nothing here raises.

What optax itself does not do there is left out: `optax.adam` raises a float to an integer power.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_models import ROWS, SMALL
from battery_tools import abstract_example, gradient_function
from comparisons import assert_same_bits

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
    params = {"w": jnp.ones((2, 3), stored), "b": jnp.ones(3)}

    def steps(bad):
        grads = jax.tree.map(lambda p: jnp.ones(p.shape, dtype), params)
        state = tx.init(params)
        for value in (jnp.float32(1), jnp.float32(np.inf)):
            updates, state = tx.update({**grads, "b": grads["b"] * bad}, state, params, value=value)
        return updates, state

    for bad in (1, np.inf):
        with jax.numpy_dtype_promotion("strict"):
            strict = steps(bad)
        assert_same_bits(strict, steps(bad))


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
        try:
            jax.eval_shape(gradient_function(row, "float32"), *args)
        except jax.dtypes.TypePromotionError:
            assert row.name not in QUICK  # the model promotes
            return
        jax.eval_shape(gradient_function(row, "mixed_float16"), *args)
