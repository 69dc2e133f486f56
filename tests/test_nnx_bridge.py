"""NNX: gradients do not change the module, and a skipped step leaves all of it unchanged, in place and as a pytree."""

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
from comparisons import assert_same_bits, same_bits
from flax import linen as nn
from flax import nnx, struct
from flax_models import NNXCNN, digits, nnx_loss, nnx_training, run, spoiled, trained

import jmp_train as jmp
from jmp_train import flax_bridge, with_loss_scale
from jmp_train._paths import leaf_paths
from jmp_train.flax_bridge import NNXTrainState, update_module

ADAM = optax.adam(1e-2)
STATIC = jmp.StaticLossScale(2.0**10)


def arrays(node):
    """Every array of a module or state by its path."""
    state = nnx.state(node) if isinstance(node, nnx.Module | nnx.Optimizer) else node
    return dict(zip(leaf_paths(state), jax.tree.leaves(state), strict=True))


def numbers(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@functools.cache
def float16_training():
    return nnx_training("mixed_float16", with_loss_scale(ADAM, STATIC), ema_decay=0.9)


def make_in_place(policy="mixed_float16", scale=STATIC):
    """A step that changes a module and its optimizer in place, as nnx.jit allows."""
    grad_fn = flax_bridge.value_and_grad(nnx_loss, policy)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads, model_state = grad_fn(model, batch, loss_scale=jmp.get_loss_scale(optimizer))
        update_module(model, optimizer, grads, model_state)
        return loss

    def start():
        model = NNXCNN(nnx.Rngs(0))
        return model, nnx.Optimizer(model, with_loss_scale(ADAM, scale), wrt=nnx.Param)

    return start, train_step


def test_gradients_and_state_are_those_of_nnx():
    """In float32, compared with nnx.value_and_grad; the module itself is not changed."""
    (batch,) = digits(1)
    model, theirs = NNXCNN(nnx.Rngs(0)), NNXCNN(nnx.Rngs(0))
    before = arrays(model)
    grad_fn = nnx.jit(flax_bridge.value_and_grad(nnx_loss, "p=f32,c=f32"))
    loss, grads, model_state = grad_fn(model, batch)
    their_loss, their_grads = nnx.jit(nnx.value_and_grad(nnx_loss))(theirs, batch)
    assert_same_bits(arrays(model), before)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, their_grads)
    changed = {path: x for path, x in arrays(theirs).items() if not same_bits(x, before[path])}
    assert set(changed) == {"norm/mean", "norm/var", "dropout/rngs/count"}
    for path, x in changed.items():
        np.testing.assert_allclose(arrays(model_state)[path], x, rtol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)])
def test_gradients_are_float32_and_near_float32s(policy):
    (batch,) = digits(1)
    model = NNXCNN(nnx.Rngs(0))
    _, exact = nnx.jit(nnx.value_and_grad(nnx_loss))(NNXCNN(nnx.Rngs(0)), batch)
    _, grads, state = nnx.jit(flax_bridge.value_and_grad(nnx_loss, policy))(model, batch, loss_scale=STATIC)
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    assert state["norm"]["mean"].dtype == jnp.float32
    norm = jax.jit(optax.tree.norm)
    error, size = norm(jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), grads, exact)), norm(exact)
    assert 0 < error < 0.02 * size


def test_in_place_a_run_with_a_bad_batch_equals_one_without():
    batches = digits(2)
    start, train_step = make_in_place()
    (model, optimizer), (other, other_optimizer) = start(), start()
    for batch in batches:
        train_step(model, optimizer, batch)
    for batch in (spoiled(batches[1]), batches[0], spoiled(batches[0]), batches[1]):
        train_step(other, other_optimizer, batch)
    assert_same_bits(arrays(model), arrays(other))
    moments = [trained(nnx.as_pure(o.opt_state)) for o in (optimizer, other_optimizer)]
    assert same_bits(*moments) and int(optimizer.step[...]) == int(other_optimizer.step[...]) == 2
    assert jmp.step_metrics(other_optimizer)["skipped_steps"] == 2
    assert not same_bits(arrays(model), arrays(start()[0]))
    # And the same steps are those of the functional state.
    state, _ = run(float16_training(), batches)
    ours, theirs = arrays(nnx.state(state.model)), arrays(model)
    for path in ours:
        np.testing.assert_allclose(*map(numbers, (ours[path], theirs[path])), rtol=1e-5, atol=1e-6)


def bfloat16_training():
    return nnx_training("mixed_bfloat16", with_loss_scale(ADAM, jmp.DynamicLossScale(8.0)), ema_decay=0.9)


@pytest.mark.parametrize("training", [float16_training, pytest.param(bfloat16_training, marks=pytest.mark.slow)])
def test_as_one_pytree_a_run_with_bad_batches_equals_one_without(training):
    batches = digits(3)
    start, step = training()
    clean, losses = run((start, step), batches)
    bad = [spoiled(batches[0]), batches[0], spoiled(batches[1]), *batches[1:], spoiled(batches[2])]
    seen, _ = run((start, step), bad)
    assert_same_bits(trained(seen), trained(clean))
    assert (int(clean.step), int(seen.step), int(jmp.step_metrics(seen)["skipped_steps"])) == (3, 3, 3)
    assert step._cache_size() == 1 and losses[-1] < losses[0]
    before, after = trained(start), trained(clean)
    assert [path for path in after if same_bits(before[path], after[path])] == ["model_state/dropout/rngs/key"]


def test_nnx_optimizer_works_with_the_wrapper_alone():
    """nnx.Optimizer.update skips parameters and moments; the caller must restore the module's other state."""
    (batch,) = digits(1)
    start, _ = make_in_place()
    model, optimizer = start()
    before, moments = arrays(model), trained(nnx.as_pure(optimizer.opt_state))
    _, grads = nnx.jit(nnx.value_and_grad(nnx_loss))(model, spoiled(batch))
    nnx.jit(lambda optimizer, model, grads: optimizer.update(model, grads))(optimizer, model, grads)
    params = set(leaf_paths(nnx.state(model, nnx.Param)))
    assert all(same_bits(arrays(model)[path], before[path]) for path in params)
    assert_same_bits(trained(nnx.as_pure(optimizer.opt_state)), moments)
    assert not jmp.all_finite(model.norm.mean[...]) and optimizer.step[...] == 1


class Scaled(nnx.Module):
    """A module for counts by hand: a weight, a frozen weight, and a count of calls."""

    def __init__(self):
        self.w = nnx.Param(jnp.float32(3))
        self.frozen = nnx.Variable(jnp.float32(2))
        self.calls = nnx.BatchStat(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.w * self.frozen * x


class TestSemantics:
    def test_split_and_merge(self):
        """The functional form of a module, inside jax.jit."""
        graphdef, state = nnx.split(Scaled())
        grad_fn = flax_bridge.value_and_grad(lambda model, x: model(x), "mixed_bfloat16")

        @jax.jit
        def step(state, x):
            model = nnx.merge(graphdef, state)
            loss, grads, model_state = grad_fn(model, x)
            nnx.update(model, model_state)
            return loss, grads, nnx.state(model)

        loss, grads, state = step(state, jnp.float32(5))
        assert (loss, grads["w"][...], state["calls"][...], state["w"][...]) == (30, 10, 1, 3)

    def test_aux_and_keywords(self):
        def loss_fn(model, x, *, train):
            assert train is True  # a flag stays a flag
            y = model(x)
            return y, {"twice": 2 * y}

        grad_fn = flax_bridge.value_and_grad(loss_fn, "mixed_bfloat16", has_aux=True)
        (loss, aux), grads, model_state = grad_fn(Scaled(), jnp.float32(5), train=True)
        assert (loss, aux["twice"], grads["w"][...], model_state["calls"][...]) == (30, 60, 10, 1)

    def test_other_variables_can_be_differentiated(self):
        grad_fn = flax_bridge.value_and_grad(lambda m, x: m(x), "float32", wrt=nnx.PathContains("frozen"))
        _, grads, model_state = grad_fn(Scaled(), jnp.float32(5))
        assert leaf_paths(grads) == ["frozen"] and grads["frozen"][...] == 15
        assert leaf_paths(model_state) == ["calls", "w"]

    def test_a_variable_that_is_a_value_of_an_enclosing_jit(self):
        w = nnx.Param(jnp.full((4, 4), 0.5), hijax=True)

        @jax.jit
        def step(w, x):
            return jmp.grad(lambda x: jnp.sum(x @ w[...]), "mixed_bfloat16")(x)

        assert step(w, jnp.ones((2, 4))).tolist() == [[2.0] * 4] * 2

    @pytest.mark.parametrize("autocast", [True, False])
    def test_the_core_keywords_are_passed_on(self, autocast):
        seen = []

        def loss_fn(model, x):
            seen.append(model.w.dtype)
            return jnp.asarray(model(x), jnp.float32)

        grad_fn = flax_bridge.value_and_grad(loss_fn, "mixed_bfloat16", autocast=autocast)
        _, grads, model_state = grad_fn(Scaled(), jnp.float32(5))
        assert seen[0] == (jnp.float32 if autocast else jnp.bfloat16)
        assert grads["w"][...] == 10 and grads["w"].dtype == jnp.float32 and model_state["calls"][...] == 1

    def test_a_module_out_of_the_state_is_a_copy(self):
        model = Scaled()
        state = NNXTrainState.create(model=model, tx=with_loss_scale(ADAM))
        model(1.0)
        state.model(1.0)
        assert state.model_state["calls"][...] == 0
        model.w[...] = jnp.float32(7)
        assert state.params["w"][...] == 3

    def test_a_step_may_leave_the_other_variables(self):
        state = NNXTrainState.create(model=Scaled(), tx=with_loss_scale(optax.sgd(1.0)))
        after = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
        assert after.params["w"][...] == 2
        assert_same_bits(after.model_state, state.model_state)

    def test_a_field_of_a_subclass(self):
        class WithCarry(NNXTrainState):
            carry: object = struct.field(default=None)

        state = WithCarry.create(model=Scaled(), tx=with_loss_scale(ADAM), carry=jnp.zeros(2))
        grads = jax.tree.map(jnp.ones_like, state.params)
        assert state.apply_gradients(grads=grads, carry=jnp.ones(2)).carry.tolist() == [1, 1]

    def test_a_module_with_the_average_is_a_copy(self):
        state = NNXTrainState.create(model=Scaled(), tx=with_loss_scale(ADAM), ema_decay=0.5)
        model = state.ema_model
        model(1.0)
        model.w[...] = jnp.float32(7)
        assert state.model_state["calls"][...] == 0 and state.ema_params["w"][...] == 3

    def test_an_update_of_other_variables(self):
        model, wrt = Scaled(), nnx.PathContains("frozen")
        optimizer = nnx.Optimizer(model, with_loss_scale(optax.sgd(0.125)), wrt=wrt)
        _, grads, model_state = flax_bridge.value_and_grad(lambda m, x: m(x), "float32", wrt=wrt)(model, jnp.float32(8))
        update_module(model, optimizer, grads, model_state)
        assert (model.frozen[...], model.w[...], model.calls[...]) == (-1, 3, 1)

    def test_average(self):
        model = Scaled()
        state = NNXTrainState.create(model=model, tx=with_loss_scale(optax.sgd(0.1)), ema_decay=0.5)
        _, grads, model_state = flax_bridge.value_and_grad(lambda m, x: m(x), "float32")(state.model, 5.0)
        state = state.apply_gradients(grads=grads, model_state=model_state)
        assert state.model.w[...] == 2 and state.ema_model.w[...] == 2.5 and state.ema_model.calls[...] == 1


class TestErrors:
    def check(self, kind, message, fn, *args, **kwargs):
        with pytest.raises(kind, match=f"^{re.escape(message)}(\n-+\n|$)"):  # JAX adds a note on its own frames
            fn(*args, **kwargs)

    def test_no_module(self):
        message = (
            "the first argument must be an NNX module, got dict; for trees of parameters use jmp_train.value_and_grad."
        )
        self.check(TypeError, message, flax_bridge.value_and_grad(lambda m: m, "float32"), {"w": jnp.ones(2)})

    def test_argnums(self):
        message = (
            "`argnums` is not for modules: the first argument is differentiated, and `wrt` chooses among its variables."
        )
        self.check(TypeError, message, flax_bridge.value_and_grad, nnx_loss, "float32", argnums=1)

    def test_an_argument_loss_scale_of_the_loss_function(self):
        message = (
            "`loss_scale=` scales the gradients and is not handed to `loss_fn`, which has an argument of this name; "
            "rename that argument, or remove it if all it did was scale the loss: that is done here."
        )
        grad_fn = flax_bridge.value_and_grad(lambda m, loss_scale: m(1.0) * loss_scale, "float32")
        self.check(TypeError, message, grad_fn, Scaled(), loss_scale=jmp.NoOpLossScale())
        assert grad_fn(Scaled(), 2.0, loss_scale=jmp.NoOpLossScale())[0] == 2 * Scaled()(1.0)

    def test_a_filter_that_chooses_nothing(self):
        message = (
            "`wrt` (=LoRAParam) chooses no variable of Scaled, which has ['BatchStat', 'Param', 'Variable']; pass a "
            "type of variable or another filter of nnx."
        )
        grad_fn = flax_bridge.value_and_grad(lambda m: m(1.0), "float32", wrt=nnx.LoRAParam)
        self.check(ValueError, message, grad_fn, Scaled())
        self.check(
            ValueError, message, NNXTrainState.create, model=Scaled(), tx=with_loss_scale(ADAM), wrt=nnx.LoRAParam
        )

    def test_no_module_for_a_state(self):
        message = "`model` must be an NNX module, got Dense; for Linen there is TrainState."
        self.check(TypeError, message, NNXTrainState.create, model=nn.Dense(2), tx=with_loss_scale(ADAM))

    def test_a_second_module(self):
        message = (
            "an argument is or holds the NNX module Scaled: updates that the loss function makes to it, such as "
            "BatchNorm's statistics, would be lost; flax_bridge.value_and_grad (from jmp_train import flax_bridge) "
            "takes a module as its first argument and returns them. A module that does not change can be closed over."
        )
        grad_fn = flax_bridge.value_and_grad(lambda m, teacher: m(1.0), "float32")
        self.check(TypeError, message, grad_fn, Scaled(), Scaled())

    def test_a_closed_over_module_cannot_lose_updates(self):
        """Flax itself raises an error; a module that does not change is a constant."""
        teacher, linear = Scaled(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        with pytest.raises(Exception, match="Cannot mutate BatchStat from a different trace level"):
            jmp.grad(lambda w: w * teacher(1.0), "float32")(jnp.float32(1))
        assert jmp.grad(lambda w: jnp.sum(linear(w)), "mixed_bfloat16")(jnp.ones((1, 2))).shape == (1, 2)

    def test_sown_values(self):
        def loss_fn(model, pop):
            model.h = nnx.Intermediate((jnp.ones(2),))
            sown = nnx.pop(model, nnx.Intermediate) if pop else None
            return model(1.0), sown

        message = (
            "`loss_fn` added the variables ['h/0'] to the module; take them out before it returns, as in "
            "nnx.pop(model, nnx.Intermediate), and return them as aux."
        )
        grad_fn = flax_bridge.value_and_grad(loss_fn, "float32", has_aux=True)
        self.check(ValueError, message, grad_fn, Scaled(), False)
        (_, sown), _, _ = grad_fn(Scaled(), True)
        assert leaf_paths(sown) == ["h/0"]

    def test_added_parameters(self):
        def loss_fn(model):
            for name in "dcab":
                setattr(model, name, nnx.Param(jnp.ones(2)))
            return model(1.0)

        message = (
            "`loss_fn` added the variables ['a', 'b', 'c', 'd'] to the module; take them out before it returns, "
            "as in nnx.pop(model, nnx.Intermediate), and return them as aux."
        )
        self.check(ValueError, message, flax_bridge.value_and_grad(loss_fn, "float32"), Scaled())

    def test_no_loss_scale(self):
        model = Scaled()
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        message = (
            "`opt_state` has no loss scale. Build the optimizer as with_loss_scale(optax.adam(1e-3)) and pass the "
            "state that its `init` or `update` returned."
        )
        state = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
        self.check(ValueError, message, update_module, model, optimizer, *state)
        # Before the optimizer is asked, which misses its own keywords.
        optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
        self.check(ValueError, message, update_module, model, optimizer, *state)

    def test_another_state(self):
        model = Scaled()
        optimizer = nnx.Optimizer(model, with_loss_scale(ADAM), wrt=nnx.Param)
        message = (
            "`model_state` must have the structure that the state holds: missing ['frozen'], not in the state []. "
            "Return every collection that the state was created with, and take out what a step adds (nnx.pop)."
        )
        state = nnx.state(model, nnx.Param), nnx.state(model, nnx.BatchStat)
        self.check(ValueError, message, update_module, model, optimizer, *state)
        assert model.w[...] == 3 and optimizer.step[...] == 0

    def test_no_function(self):
        message = "`loss_fn` must be callable, got None; pass the function to differentiate."
        self.check(TypeError, message, flax_bridge.value_and_grad, None, "float32")

    def test_a_module_of_another_size(self):
        model, other = (nnx.Linear(4, size, rngs=nnx.Rngs(0)) for size in (3, 5))
        optimizer = nnx.Optimizer(model, with_loss_scale(ADAM), wrt=nnx.Param)
        grad_fn = flax_bridge.value_and_grad(lambda model, x: jnp.mean(model(x)), "float32")
        _, grads, model_state = grad_fn(model, jnp.ones((2, 4)))
        message = (
            "`grads` must have the shapes of `params`: 'bias' has the shape (3,), and the parameter (5,). "
            "Differentiate the mean over the batch with respect to the parameters given."
        )
        self.check(ValueError, message, update_module, other, optimizer, grads, model_state)

    def test_no_average(self):
        state = NNXTrainState.create(model=Scaled(), tx=with_loss_scale(ADAM))
        message = "there is no average of the parameters; create the state with ema_decay=0.999."
        self.check(ValueError, message, lambda: state.ema_model)
