"""`allow_int`: gradients by trees with integers, booleans and PRNG keys, as those of `jax.grad(allow_int=True)`."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

import jmp_train as jmp
from jmp_train import flax_bridge
from jmp_train._sharding import mean_gradients

SCALE = jmp.StaticLossScale(8.0)
LARGE = 2**24 + 1  # float32 cannot hold it
PARAMS = {
    "w": jnp.asarray(np.arange(1, 4, dtype=np.float32)),
    "ids": jnp.asarray(np.array([0, 1, LARGE], np.int32)),
    "count": 3,
    "small": np.int8(2),
    "on": True,
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(1), 2),
    "raw key": jax.random.PRNGKey(0),
    "none": None,
}
TRAINED = {name: PARAMS[name] for name in ("w", "ids")}


def loss_fn(params, *_):
    return jnp.sum(params["w"] ** 2) * params["count"] + 0 * jax.random.normal(params["key"])


def described(tree):
    return {path: (leaf.dtype, leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@functools.cache
def gradients_of_jax():
    return jax.jit(jax.grad(loss_fn, allow_int=True))(PARAMS)


@pytest.mark.parametrize(
    ("transform", "policy"),
    [
        *((jax.jit, policy) for policy in ("float32", "mixed_bfloat16", "mixed_float16", "float16")),
        (lambda fn: fn, "mixed_float16"),
    ],
)
@pytest.mark.parametrize("autocast", [True, False])
def test_gradients_are_those_of_jax(transform, autocast, policy):
    expected = gradients_of_jax()
    grad_fn = jmp.grad(loss_fn, policy, autocast=autocast, allow_int=True)
    grads = transform(lambda params: grad_fn(params, loss_scale=SCALE))(PARAMS)
    assert described(grads) == described(expected)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-2)
    assert sum(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(grads)) == 7


def test_several_arguments_and_aux():
    def loss(w, ids, *, factor):
        return jnp.sum(w) * factor, ids

    grad_fn = jmp.value_and_grad(loss, "mixed_float16", argnums=(0, 1), has_aux=True, allow_int=True)
    (loss_value, aux), (of_w, of_ids) = grad_fn(jnp.ones(3), jnp.arange(2), factor=2, loss_scale=SCALE)
    assert loss_value == 6 and aux.tolist() == [0, 1] and of_w.tolist() == [2, 2, 2]
    assert of_ids.dtype == jax.dtypes.float0 and of_ids.shape == (2,)


def test_under_vmap_and_scan():
    def gradient(w):
        return jmp.grad(loss_fn, "mixed_float16", allow_int=True)({**PARAMS, "w": w}, loss_scale=SCALE)

    stacked = jax.vmap(gradient)(jnp.ones((4, 3)))
    assert stacked["ids"].dtype == jax.dtypes.float0 and stacked["ids"].shape == (4, 3)
    _, scanned = jax.lax.scan(lambda c, w: (c, gradient(w)), 0, jnp.ones((4, 3)))
    assert described(scanned) == described(stacked)


class TestRefusals:
    @pytest.mark.parametrize("argnums", [0, -1])
    @pytest.mark.parametrize("transform", [jmp.grad, jmp.value_and_grad])
    def test_without_it(self, transform, argnums):
        message = (
            "a differentiated argument must hold floating or complex numbers only, got int32[3] for the leaf 'ids'; "
            "pass it as an argument that `argnums` does not name, or pass allow_int=True for a gradient of float0."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            transform(loss_fn, "mixed_bfloat16", argnums=argnums)(TRAINED)

    def test_what_is_no_number_with_it(self):
        message = (
            "a differentiated argument must hold numbers and keys only, got an object of type str for the leaf 'name'; "
            "pass it as an argument that `argnums` does not name."
        )
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            jmp.grad(loss_fn, "mixed_bfloat16", allow_int=True)({"name": "w", **TRAINED})


# Functions that accept gradients


def gradient(params=PARAMS):
    return jmp.grad(loss_fn, "mixed_bfloat16", allow_int=True)({"count": 1, "key": jax.random.key(0), **params})


@pytest.mark.parametrize("loss_scale", [jmp.NoOpLossScale(), SCALE, jmp.DynamicLossScale(8.0)])
def test_scaling_and_selection_leave_them_alone(loss_scale):
    grads = gradient()
    assert described(loss_scale.unscale(grads)) == described(loss_scale.scale(grads)) == described(grads)
    assert jmp.all_finite(grads) and not jmp.all_finite({**grads, "w": jnp.full(3, jnp.inf)})
    other = jax.tree.map(lambda leaf: leaf if leaf.dtype == jax.dtypes.float0 else leaf + 1, grads)
    for select in (jmp.select_tree, jax.jit(jmp.select_tree)):
        assert described(select(False, grads, other)) == described(grads)
        assert jnp.array_equal(select(False, grads, other)["w"], other["w"])


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1),
        optax.adam(0.1),
        optax.adamw(0.1, weight_decay=0.5),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        optax.chain(optax.add_noise(0.1, 0.1, key=0), optax.sgd(0.1)),
        jmp.with_master_weights(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
    ],
)
def test_a_step_leaves_integers_as_they_are(inner):
    """Weight decay does not apply to integers; and 2^24 + 1 plus a float32 zero would be 2^24."""
    grads = {name: gradient()[name] for name in TRAINED}
    tx = jmp.with_loss_scale(inner)
    for step in (tx.update, jax.jit(tx.update)):
        updates, state = step(grads, tx.init(TRAINED), TRAINED)
        params = optax.apply_updates(TRAINED, updates)
        assert params["ids"].tolist() == [0, 1, LARGE] and params["ids"].dtype == jnp.int32
        assert jnp.all(params["w"] < TRAINED["w"]) and state.grads_finite
        assert described(state) == described(tx.init(TRAINED))
    updates, state = tx.update({**grads, "w": jnp.full(3, jnp.nan)}, state, TRAINED)
    assert not jnp.any(updates["ids"]) and not state.grads_finite
    assert state.last_overflow.tolist() == [False, True]  # ids, w


@pytest.mark.parametrize("name", ["key", "keys"])
def test_an_optimizer_cannot_add_to_keys(name):
    params = {**TRAINED, "drop": {name: PARAMS[name]}}
    message = (
        f"`params`: 'drop/{name}' is a PRNG key (key<fry>), to which no update can be added. Give the optimizer "
        "parameters and gradients without keys, and hand keys to the loss function in another argument."
    )
    for inner in (optax.sgd(0.1), optax.adam(0.1)):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            jmp.with_loss_scale(inner).init(params)


@pytest.mark.parametrize("integer", [np.zeros((), jax.dtypes.float0), jnp.int32(0)], ids=["float0", "zero"])
def test_moments_of_integers_stay_and_counts_become_fractions(integer):
    count = optax.GradientTransformation(  # one count for all parameters, and one for each
        lambda params: (jnp.zeros((), jnp.int32), jax.tree.map(lambda _: jnp.zeros((), jnp.int32), params)),
        lambda u, s, params=None: (u, jax.tree.map(lambda x: x + 0.25, s)),
    )
    tx = jmp.with_loss_scale(optax.chain(optax.trace(0.9), count))
    params, grads = {"a": jnp.ones(3), "n": jnp.int32(3)}, {"a": jnp.ones(3), "n": integer}
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(grads, state, params)
    trace, (total, of_each) = state.inner_state
    assert total == of_each["a"] == 0.75 and of_each["n"].dtype == jnp.int32
    assert trace.trace["n"].dtype == jnp.int32
    moments = jmp.with_loss_scale(optax.adam(0.1))
    jax.lax.scan(lambda s, _: (moments.update(grads, s, params)[1], None), moments.init(params), None, length=3)


def test_a_narrow_count_stays_as_narrow_as_it_is():
    count = optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int8), lambda u, s, params=None: (u, s + jnp.int32(1))
    )
    tx = jmp.with_loss_scale(count)
    state = tx.update({"a": jnp.ones(3)}, tx.init({"a": jnp.ones(3)}))[1]
    assert state.inner_state == 1 and state.inner_state.dtype == jnp.int8


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_on_many_devices(autocast, check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    params = {name: PARAMS[name] for name in ("w", "ids", "key")}

    def loss(params, x):
        return jnp.sum(params["w"]) * jnp.mean(x) + 0 * jax.random.normal(params["key"])

    def step(params, x):
        return jmp.grad(loss, "mixed_float16", axis_name="data", autocast=autocast, allow_int=True)(
            params, x, loss_scale=SCALE
        )

    specs = PartitionSpec(), PartitionSpec("data")
    grads = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=check_vma))(
        params, jnp.arange(4.0)
    )
    assert described(grads) == described(jax.grad(loss, allow_int=True)(params, jnp.arange(4.0)))
    assert grads["w"].tolist() == [1.5] * 3


def test_the_mean_leaves_them_alone():
    grads = gradient()
    means = jax.vmap(lambda x: mean_gradients({**grads, "w": x}, PARAMS, ("i",), "float32"), axis_name="i")(
        jnp.arange(6.0).reshape(2, 3)
    )
    assert means["w"].tolist() == [[1.5, 2.5, 3.5]] * 2 and means["ids"].dtype == jax.dtypes.float0


class Counting(nnx.Module):
    def __init__(self):
        self.w, self.ids = nnx.Param(TRAINED["w"]), nnx.Param(TRAINED["ids"])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self):
        self.calls[...] += 1
        return jnp.sum(self.w[...] ** 2)


@pytest.mark.parametrize("autocast", [True, False])
class TestModules:
    def gradient(self, model, autocast):
        grad_fn = flax_bridge.value_and_grad(lambda model: model(), "mixed_float16", autocast=autocast, allow_int=True)
        return grad_fn(model, loss_scale=SCALE)

    def test_gradients_are_those_of_nnx(self, autocast):
        expected = nnx.value_and_grad(lambda model: model(), allow_int=True)(Counting())[1]
        assert described(self.gradient(Counting(), autocast)[1]) == described(expected)

    def test_an_update_in_place(self, autocast):
        model = Counting()
        optimizer = nnx.Optimizer(model, jmp.with_loss_scale(optax.adamw(0.1)), wrt=nnx.Param)
        _, grads, model_state = self.gradient(model, autocast)
        flax_bridge.update_module(model, optimizer, grads, model_state)
        assert model.ids[...].tolist() == [0, 1, LARGE] and model.calls[...] == 1 and optimizer.step[...] == 1

    def test_a_state(self, autocast):
        state = flax_bridge.NNXTrainState.create(
            model=Counting(), tx=jmp.with_loss_scale(optax.adam(0.1)), ema_decay=0.9
        )
        _, grads, model_state = self.gradient(state.model, autocast)
        state = state.apply_gradients(grads=grads, model_state=model_state)
        assert state.model.ids[...].tolist() == state.ema_model.ids[...].tolist() == [0, 1, LARGE]
        assert state.step == 1 and jnp.all(state.model.w[...] < TRAINED["w"])


def test_explain_names_the_dtype():
    outputs = jmp.explain(jax.grad(loss_fn, allow_int=True), "mixed_float16")(PARAMS).outputs
    assert {output.path: output.dtype for output in outputs}["ids"] == "float0"
