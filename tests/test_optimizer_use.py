"""with_loss_scale: its place among other transformations, finding its state, many devices, and its errors."""

# Optax types trees and states as one union, in which pyright knows no attribute or index.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits, assert_two_programs_agree, same_bits
from flax import nnx
from flax.core import freeze
from jax.sharding import Mesh, PartitionSpec
from optimizer_tools import GOOD, PARAMS, broken, run

import jmp_train as jmp
from jmp_train import DynamicLossScale, get_loss_scale, step_metrics, with_loss_scale


class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def scaled(inner=None):
    return with_loss_scale(optax.adam(0.1) if inner is None else inner, DynamicLossScale(4.0))


MOVING = ("loss_scale", "counter", "hysteresis_left")
NESTED = {
    "alone": lambda: scaled().init(PARAMS),
    "chain": lambda: optax.chain(scaled(), optax.scale(0.5)).init(PARAMS),
    "masked": lambda: optax.masked(scaled(), {"a": True, "b": False, "c": True}).init(PARAMS),
    "partition": lambda: optax.partition({"x": scaled(), "y": optax.sgd(0.1)}, {"a": "x", "b": "y", "c": "x"}).init(
        PARAMS
    ),
    "inject": lambda: optax.inject_hyperparams(lambda rate: scaled(optax.sgd(rate)))(rate=0.1).init(PARAMS),
    "multi_steps": lambda: optax.MultiSteps(scaled(), 2).init(PARAMS),
    "dict": lambda: {"generator": scaled().init(PARAMS), "other": optax.adam(0.1).init(PARAMS), "n": 3},
    "nnx optimizer": lambda: nnx.Optimizer(Net(), scaled(), wrt=nnx.Param),
    "nnx state": lambda: nnx.Optimizer(Net(), scaled(), wrt=nnx.Param).opt_state,
}


@pytest.mark.parametrize("name", NESTED)
def test_it_is_found_at_any_depth(name):
    state = NESTED[name]()
    assert get_loss_scale(state) == DynamicLossScale(4.0) and isinstance(get_loss_scale(state).loss_scale, jax.Array)
    assert step_metrics(state)["loss_scale"] == 4.0
    assert jax.jit(lambda s: get_loss_scale(s).scale(1.0))(state) == 4.0


def test_an_nnx_optimizer_skips_and_backs_off():
    model = Net()
    optimizer = nnx.Optimizer(model, scaled(), wrt=nnx.Param)
    before = jax.tree.map(jnp.array, nnx.state(model))
    grads = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), nnx.state(model, nnx.Param))
    optimizer.update(model, grads)
    assert same_bits(nnx.state(model), before) and get_loss_scale(optimizer).loss_scale == 2.0


class TestPlacement:
    """It works outermost; in other places the failures happen that its docstring names."""

    OVERFLOW = jnp.array([jnp.inf, 1.0])
    FINE = jnp.array([3.0, 4.0])

    def last(self, tx, steps):
        params = jnp.zeros(2)
        params, state = run(tx, steps, params=params)
        return params, state

    @pytest.mark.parametrize(
        "inner",
        [
            optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
            optax.chain(optax.trace(0.9), optax.sgd(0.1)),
            optax.chain(optax.sgd(0.1), optax.add_decayed_weights(0.1)),
            optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
        ],
        ids=["clip", "trace", "decay", "accumulate"],
    )
    def test_outermost_a_run_equals_one_that_never_saw_the_overflow(self, inner):
        with_it, state = self.last(with_loss_scale(inner), [self.FINE, self.OVERFLOW, self.FINE])
        without, clean = self.last(with_loss_scale(inner), [self.FINE, self.FINE])
        assert_same_bits((with_it, state.inner_state), (without, clean.inner_state))

    def test_clipping_before_the_check_hides_the_overflow(self):
        clip = optax.clip_by_global_norm(1.0)
        clipped, _ = clip.update(self.OVERFLOW, clip.init(jnp.zeros(2)))
        assert jnp.isnan(clipped[0]) and clipped[1] == 0

    def test_a_trace_before_it_keeps_the_infinity(self):
        tx = optax.chain(optax.trace(0.9), with_loss_scale(optax.sgd(0.1)))
        assert not jnp.all(jnp.isfinite(self.last(tx, [self.OVERFLOW, self.FINE])[1][0].trace))

    def test_weight_decay_after_it_moves_parameters_on_a_skip(self):
        tx = optax.chain(with_loss_scale(optax.sgd(0.1)), optax.add_decayed_weights(0.1))
        assert jnp.any(run(tx, [self.OVERFLOW], params=jnp.ones(2))[0] != 1)

    def test_multi_steps_around_it_keeps_the_nan(self):
        tx = optax.MultiSteps(with_loss_scale(optax.sgd(0.1)), 2)
        params, state = self.last(tx, [self.OVERFLOW, *[self.FINE] * 6])
        assert jnp.isnan(state.acc_grads[0]) and jnp.all(params == 0)  # no later step changes the parameters


class TestDevices:
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize("replicated", [False, True])
    def test_an_infinity_on_one_device_makes_all_skip(self, check_vma, replicated):
        mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
        tx = with_loss_scale(optax.sgd(1.0, momentum=0.9), DynamicLossScale(8.0), axis_name="data")
        params = {"w": jnp.zeros((4, 2)), "b": jnp.zeros((4, 2))}
        spec = PartitionSpec(None if replicated else "data")
        scalar = PartitionSpec()
        specs = jax.tree.map(lambda x: spec if x.ndim > 1 else scalar, tx.init(params))

        @jax.jit
        @partial(jax.shard_map, mesh=mesh, in_specs=(spec, specs, spec), out_specs=(spec, specs), check_vma=check_vma)
        def step(grads, state, params):
            return tx.update(grads, state, params)

        grads = {"w": jnp.ones((4, 2)), "b": jnp.ones((4, 2)).at[2, 1].set(jnp.inf)}
        updates, state = step(grads, tx.init(params), params)
        assert not any(jnp.any(u) for u in updates.values())
        for shard in state.loss_scale.loss_scale.addressable_shards:
            assert shard.data == 4.0
        assert state.last_overflow.tolist() == [True, False]  # dictionaries are sorted by key
        updates, state = step(jax.tree.map(jnp.ones_like, grads), state, params)
        assert all(jnp.all(u == -1) for u in updates.values()) and state.loss_scale.loss_scale == 4.0

    def test_pmap(self):
        tx = with_loss_scale(optax.sgd(1.0), DynamicLossScale(8.0), axis_name="data")
        params = jnp.zeros((2, 3))
        grads = jnp.ones((2, 3)).at[1, 0].set(jnp.nan)
        updates, state = jax.pmap(tx.update, axis_name="data")(grads, jax.pmap(tx.init)(params), params)
        assert not jnp.any(updates) and state.loss_scale.loss_scale.tolist() == [4.0, 4.0]

    def test_jit_over_a_sharded_mesh_needs_no_axis(self):
        mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
        sharded = jax.NamedSharding(mesh, PartitionSpec("data"))
        tx = with_loss_scale(optax.adam(0.1), DynamicLossScale(8.0))
        leaves = {f"{i}": jnp.ones((8, 4)) for i in range(6)} | {"bias": jnp.ones(5)}
        place = {name: sharded if name in "024" else jax.NamedSharding(mesh, PartitionSpec()) for name in leaves}
        grads = dict(leaves, **{"2": leaves["2"].at[7, 0].set(jnp.inf)})
        for g, skipped in ((leaves, 0), (grads, 1)):
            state = jax.jit(tx.init)(jax.device_put(leaves, place))
            updates, state = jax.jit(tx.update)(jax.device_put(g, place), state, jax.device_put(leaves, place))
            plain, _ = run(tx, [g], params=leaves)
            assert int(state.skipped_steps) == skipped
            assert_two_programs_agree(optax.apply_updates(leaves, jax.device_get(updates)), plain)
            assert all(updates[name].sharding.is_equivalent_to(place[name], updates[name].ndim) for name in leaves)


class TestErrors:
    def check(self, kind, message, fn, *args, **kwargs):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            fn(*args, **kwargs)

    def test_no_loss_scale(self):
        message = (
            "`opt_state` has no loss scale. Build the optimizer as with_loss_scale(optax.adam(1e-3)) and pass the "
            "state that its `init` or `update` returned."
        )
        for find in (get_loss_scale, step_metrics):
            self.check(ValueError, message, find, optax.adam(0.1).init(PARAMS))
        assert get_loss_scale(with_loss_scale(optax.adam(1e-3)).init(PARAMS)) == DynamicLossScale()

    def test_two_loss_scales(self):
        states = {"g": scaled().init(PARAMS), "d": scaled().init(PARAMS)}
        message = "`opt_state` has 2 loss scales, at ['d'], ['g']. Pass the part that belongs to one loss."
        self.check(ValueError, message, get_loss_scale, states)
        get_loss_scale(states["g"])

    def test_applied_twice(self):
        message = "`inner` already has a loss scale. Apply with_loss_scale once, outermost."
        self.check(ValueError, message, with_loss_scale(optax.chain(scaled())).init, PARAMS)

    @pytest.mark.parametrize(
        "inner, name", [(1e-3, "float"), (DynamicLossScale(), "DynamicLossScale"), (None, "NoneType")]
    )
    def test_no_transformation(self, inner, name):
        message = (
            f"`inner` must be an optax transformation, got {name}. "
            "Pass an optimizer, as in with_loss_scale(optax.adam(1e-3))."
        )
        self.check(TypeError, message, with_loss_scale, inner)

    @pytest.mark.parametrize("other", [2.0**15, jmp.get_policy("mixed_float16"), DynamicLossScale, "dynamic"])
    def test_no_scale(self, other):
        message = (
            f"`loss_scale` must be a DynamicLossScale, StaticLossScale or NoOpLossScale, got {other!r}. "
            "Wrap a number, as in StaticLossScale(2.0**15); a policy goes to value_and_grad."
        )
        self.check(TypeError, message, with_loss_scale, optax.adam(1e-3), other)

    def test_a_class_of_loss_scale_that_is_no_pytree(self):
        class Capped(DynamicLossScale):
            pass

        message = (
            "`loss_scale` is a Capped, a class that is not registered as a pytree. Call "
            "jax.tree_util.register_pytree_node for it, with the numbers that change (such as loss_scale, counter and "
            "hysteresis_left) as children; its constructor checks values, so rebuild it without calling that."
        )
        self.check(TypeError, message, with_loss_scale, optax.adam(0.1), Capped(4.0))

        def rebuilt(names, values):
            new = object.__new__(Capped)
            vars(new).update(zip(names, values, strict=True), **static)
            return new

        static = {name: value for name, value in vars(Capped(4.0)).items() if name not in MOVING}
        jax.tree_util.register_pytree_node(Capped, lambda x: ([getattr(x, name) for name in MOVING], MOVING), rebuilt)
        _, state = run(with_loss_scale(optax.adam(0.1), Capped(4.0)), [broken("a")])
        assert type(get_loss_scale(state)) is Capped and get_loss_scale(state).loss_scale == 2.0

    def test_gradients_of_another_structure(self):
        grads = {"a": GOOD["a"], "b": GOOD["b"], "z": GOOD["c"]}
        message = (
            "`grads` must have the structure of `params`: missing ['c'], not in `params` ['z']. "
            "Differentiate with respect to the parameters that the optimizer holds."
        )
        tx = scaled()
        self.check(ValueError, message, tx.update, grads, tx.init(PARAMS), PARAMS)

    def test_gradients_of_what_is_no_parameter(self):
        message = (
            "`grads` must have the structure of `params`: missing [], not in `params` ['z']. "
            "Differentiate with respect to the parameters that the optimizer holds."
        )
        tx = scaled()
        self.check(ValueError, message, tx.update, {**GOOD, "z": GOOD["c"]}, tx.init(PARAMS), PARAMS)

    def test_errors_of_the_inner_transformation_are_its_own(self):
        def update(updates, state, params=None):
            raise ValueError("no parameters")

        tx = with_loss_scale(optax.GradientTransformation(lambda _: optax.EmptyState(), update))
        self.check(ValueError, "no parameters", tx.update, GOOD, tx.init(PARAMS))

    def test_a_class_among_the_parameters_is_no_key(self):
        with_loss_scale(optax.identity()).init({"w": GOOD["a"], "dtype": np.float32})

    def test_gradients_of_another_type_of_node(self):
        message = (
            "`grads` must have the structure of `params`: a dict and a FrozenDict at ''. "
            "Differentiate with respect to the parameters that the optimizer holds."
        )
        tx, params = scaled(), freeze(PARAMS)
        self.check(ValueError, message, tx.update, GOOD, tx.init(params), params)

    @pytest.mark.parametrize("bad, found", [(jnp.ones((4, 2)), (4, 2)), (jnp.ones((1, 4, 3)), (1, 4, 3))])
    def test_gradients_of_another_shape(self, bad, found):
        params = {"a": {"w": jnp.ones((4, 3))}, "b": jnp.ones(3)}
        message = (
            f"`grads` must have the shapes of `params`: 'a/w' has the shape {found}, and the parameter (4, 3). "
            "Differentiate the mean over the batch with respect to the parameters given."
        )
        tx = scaled()
        grads = {"a": {"w": bad}, "b": jnp.ones(3)}
        self.check(ValueError, message, tx.update, grads, tx.init(params), params)

    def test_gradients_of_each_example(self):
        """`optax.contrib.dpsgd` takes the mean itself; for all others it is missing."""
        private = optax.stateless(lambda updates, _: jax.tree.map(lambda x: -0.5 * jnp.mean(x, 0), updates))
        params, grads = {"w": jnp.ones(3)}, {"w": jnp.stack([jnp.zeros(3), jnp.ones(3)])}
        tx = with_loss_scale(private)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert updates["w"].tolist() == [-0.25] * 3
        tx = with_loss_scale(optax.sgd(0.5))
        message = (
            "the updates of `inner` must have the shapes of `params`: 'w' has the shape (2, 3), and the parameter "
            "(3,). Differentiate the mean over the batch with respect to the parameters given."
        )
        self.check(ValueError, message, tx.update, grads, tx.init(params), params)

    def test_gradients_of_examples_of_another_shape(self):
        message = (
            "`grads` must have the shapes of `params`: 'w' has the shape (4, 8, 3), and the parameter (8, 2). "
            "Differentiate the mean over the batch with respect to the parameters given."
        )
        tx, params = with_loss_scale(optax.add_decayed_weights(0.1)), {"w": jnp.ones((8, 2))}
        self.check(ValueError, message, tx.update, {"w": jnp.ones((4, 8, 3))}, tx.init(params), params)

    def test_gradients_that_the_inner_transformation_reduces(self):
        """Some per example and some averaged, and whole ones for parameters of which each device has a part."""
        params = {"a": jnp.ones(4), "b": jnp.ones(())}
        mean = optax.stateless(lambda updates, _: jax.tree.map(lambda x: -jnp.mean(x, 0), updates))
        tx = with_loss_scale(optax.partition({"mean": mean, "sgd": optax.sgd(1.0)}, {"a": "mean", "b": "sgd"}))
        updates, _ = tx.update({"a": jnp.ones((2, 4)), "b": jnp.ones(())}, tx.init(params), params)
        assert updates["a"].tolist() == [-1.0] * 4 and updates["b"] == -1
        shards = optax.stateless(lambda updates, _: jax.tree.map(lambda x: x[:2], updates))
        tx = scaled(optax.chain(shards, optax.sgd(1.0, momentum=0.9)))
        part = {"a": jnp.ones(2)}
        updates, _ = tx.update({"a": jnp.ones(4)}, tx.init(part), part)
        assert updates["a"].tolist() == [-1.0] * 2

    def test_gradients_that_would_be_stretched(self):
        """Momentum adds them to its trace without an error."""
        message = (
            "`grads` must have the shapes of `params`: '' has the shape (1,), and the parameter (3,). "
            "Differentiate the mean over the batch with respect to the parameters given."
        )
        tx, params = scaled(optax.sgd(0.1, momentum=0.9)), jnp.ones(3)
        self.check(ValueError, message, tx.update, jnp.ones(1), tx.init(params), params)

    def test_gradients_of_integers_for_each_example(self):
        params = {"ids": jnp.arange(3), "w": jnp.ones(2)}
        tx = with_loss_scale(optax.stateless(lambda updates, _: jax.tree.map(lambda x: -jnp.mean(x, 0), updates)))
        grads = {"ids": np.zeros((4, 3), jax.dtypes.float0), "w": jnp.ones((4, 2))}
        updates, _ = tx.update(grads, tx.init(params), params)
        assert optax.apply_updates(params, updates)["ids"].tolist() == [0, 1, 2]

    def test_gradients_for_other_parameters(self):
        message = (
            "`grads` has 1 leaves, and `init` saw parameters with 3. "
            "Call `init` with the parameters that you differentiate with respect to."
        )
        tx = scaled()
        self.check(ValueError, message, tx.update, {"a": GOOD["a"]}, tx.init(PARAMS))

    def test_a_number_for_the_loss_scale_of_a_state(self):
        message = (
            "`loss_scale` must be a DynamicLossScale, StaticLossScale or NoOpLossScale, got 8.0. Wrap a number, as in "
            "StaticLossScale(2.0**15); a policy goes to value_and_grad."
        )
        tx = scaled()
        self.check(TypeError, message, tx.update, GOOD, tx.init(PARAMS)._replace(loss_scale=8.0), PARAMS)

    def test_part_of_the_state(self):
        message = (
            "`state` must be the LossScaleState that `init` or `update` returned, got tuple. "
            "Pass the whole state, not a part of it."
        )
        tx = scaled()
        self.check(TypeError, message, tx.update, GOOD, tx.init(PARAMS).inner_state, PARAMS)
