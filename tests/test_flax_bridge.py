"""Linen's training state: a skipped step leaves it unchanged, it is one pytree, bad arguments raise clear errors."""

# Optax types trees and states as one union, of which no attribute or index is known.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparisons import assert_same_bits, same_bits
from flax import core, serialization, struct
from flax import linen as nn
from flax.linen import fp8_ops
from flax.training import train_state
from flax_models import CNN, NO_SCALE, digits, linen_training, run, spoiled, trained

import jmp_train as jmp
from jmp_train import with_loss_scale
from jmp_train.flax_bridge import TrainState, module_dtypes

ADAM = optax.adam(1e-2)
DYNAMIC = jmp.DynamicLossScale(2.0**10)
# With these, a loss scale that is a power of two changes no bit; float16 gradients lose other bits at another scale.
ROWS = {
    "float32": ("float32", NO_SCALE),
    "bfloat16": ("mixed_bfloat16", DYNAMIC),
    "float16": ("mixed_float16", jmp.StaticLossScale(2.0**10)),
}


@pytest.mark.parametrize(
    "scale", [jmp.DynamicLossScale(2.0**10, growth_interval=5), jmp.StaticLossScale(8.0), NO_SCALE]
)
def test_flax_serialization_writes_and_reads_a_state(scale):
    params, grads = {"w": jnp.ones((2, 3))}, {"w": jnp.full((2, 3), jnp.nan)}
    start = train_state.TrainState.create(apply_fn=jnp.sum, params=params, tx=with_loss_scale(ADAM, scale))
    state = start.apply_gradients(grads=params).apply_gradients(grads=grads)
    restored = serialization.from_bytes(start, serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert_same_bits(restored, state)


def test_flax_serialization_of_another_loss_scale():
    data = serialization.to_bytes(with_loss_scale(ADAM, NO_SCALE).init(jnp.ones(2)))
    message = (
        "`target` has a DynamicLossScale, whose state is ['counter', 'hysteresis_left', 'loss_scale'], and what was "
        "saved is []. Restore with the loss scale that it was saved with."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        serialization.from_bytes(with_loss_scale(ADAM, DYNAMIC).init(jnp.ones(2)), data)


SLOW_ROWS = [pytest.param(row, marks=pytest.mark.slow) for row in ("float32", "float16")]


@pytest.mark.parametrize("row", ["bfloat16", *SLOW_ROWS])  # the only row whose scale backs off
def test_a_run_with_bad_batches_equals_one_that_never_saw_them(row):
    policy, scale = ROWS[row]
    batches = digits(3)
    start, step = linen_training(policy, with_loss_scale(ADAM, scale), ema_decay=0.9)
    clean, losses = run((start, step), batches)
    bad = [spoiled(batches[0]), batches[0], spoiled(batches[1]), spoiled(batches[2]), *batches[1:], spoiled(batches[0])]
    seen, _ = run((start, step), bad)
    assert_same_bits(trained(seen), trained(clean))
    assert (int(clean.step), int(seen.step), int(jmp.step_metrics(seen)["skipped_steps"])) == (3, 3, 4)
    assert step._cache_size() == 1
    assert losses[-1] < losses[0]
    # The run has changed every leaf but the keys, so that the comparison covers all of them.
    before, after = trained(start), trained(clean)
    assert [path for path in after if same_bits(before[path], after[path])] == ["rngs/dropout"]


def test_flax_train_state_works_with_the_wrapper_alone():
    """Parameters and moments are skipped; other state, which this library's training state would protect, is not."""
    model, (batch,) = CNN(), digits(1)
    init = jax.jit(model.init, static_argnames="train")
    variables = init(jax.random.key(0), np.zeros((1, 8, 8, 1), np.float32), train=False)

    class State(train_state.TrainState):
        batch_stats: object

    state = State.create(
        apply_fn=model.apply, params=variables["params"], tx=with_loss_scale(ADAM), batch_stats=variables["batch_stats"]
    )

    @jax.jit
    def step(state, images, labels):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            rngs = {"dropout": jax.random.key(state.step)}
            logits, updated = state.apply_fn(variables, images, train=True, mutable="batch_stats", rngs=rngs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updated

        grad_fn = jmp.value_and_grad(loss_fn, "mixed_float16", has_aux=True)
        (_, updated), grads = grad_fn(state.params, loss_scale=jmp.get_loss_scale(state.opt_state))
        return state.apply_gradients(grads=grads, **updated)

    after = step(state, *spoiled(batch))
    assert_same_bits(after.params, state.params)
    assert_same_bits(after.opt_state.inner_state, state.opt_state.inner_state)
    assert after.step == 1 and not jmp.all_finite(after.batch_stats)
    assert not same_bits(step(state, *batch).params, state.params)


def simple(tx=None, params=None, **fields):
    """A state with one vector as parameters, for gradients made by hand."""
    params = {"w": jnp.arange(3.0)} if params is None else params
    tx = with_loss_scale(optax.sgd(1.0)) if tx is None else tx
    return TrainState.create(apply_fn=lambda variables: variables, params=params, tx=tx, **fields)


GOOD, BAD = {"w": jnp.ones(3)}, {"w": jnp.array([1.0, jnp.nan, 1.0])}


def test_the_average_of_the_parameters():
    state, mean, w = simple(ema_decay=0.9), np.arange(3.0), np.arange(3.0)
    for grads in (GOOD, BAD, GOOD, GOOD):
        state = jax.jit(TrainState.apply_gradients)(state, grads=grads)
        if grads is GOOD:
            w = w - 1
            mean = 0.9 * mean + 0.1 * w
    np.testing.assert_allclose(state.ema_params["w"], mean, rtol=1e-6)
    assert simple().ema_params is None


def test_the_average_of_16_bit_parameters_is_float32():
    tx = with_loss_scale(jmp.with_master_weights(optax.sgd(2.0**-10)))
    state = simple(tx, {"w": jnp.ones(3, jnp.bfloat16)}, ema_decay=0.5)
    for _ in range(4):
        state = jax.jit(TrainState.apply_gradients)(state, grads=GOOD)
    assert state.params["w"].dtype == jnp.bfloat16 and state.ema_params["w"].dtype == jnp.float32


def test_keys_move_with_the_steps_that_are_applied():
    state = simple(rngs={"dropout": jax.random.key(3)})
    first = state.step_rngs
    assert_same_bits(state.apply_gradients(grads=BAD).step_rngs, first)
    after = state.apply_gradients(grads=GOOD)
    assert after.step.dtype == jnp.int32
    assert_same_bits(after.step_rngs, {"dropout": jax.random.fold_in(jax.random.key(3), 1)})
    assert same_bits(after.rngs, state.rngs) and not same_bits(after.step_rngs, first)


@pytest.mark.parametrize("carry", ["scan", "cond"])
def test_it_is_a_carry(carry):
    state = simple(with_loss_scale(optax.adam(0.1), jmp.DynamicLossScale(8.0, growth_interval=2)), ema_decay=0.5)
    grads = jax.tree.map(lambda a, b: jnp.stack([a, b, a, a]), GOOD, BAD)
    if carry == "scan":
        state, _ = jax.lax.scan(lambda s, g: (s.apply_gradients(grads=g), None), state, grads)
    else:
        for i in range(4):
            g = jax.tree.map(lambda x, i=i: x[i], grads)
            state = jax.lax.cond(True, lambda s, g=g: s.apply_gradients(grads=g), lambda s: s, state)
    assert int(state.step) == 3 and jmp.get_loss_scale(state).loss_scale == 8.0


def test_what_surrounds_the_wrapper_is_skipped_too():
    """For example a schedule's counter outside of `with_loss_scale`, and weight decay after it."""
    schedule = optax.exponential_decay(1.0, 1, 0.5)
    injected = optax.inject_hyperparams(lambda rate: with_loss_scale(optax.sgd(rate)))(rate=schedule)
    tx = optax.chain(injected, optax.add_decayed_weights(-0.1), optax.scale_by_schedule(schedule))
    state = simple(tx)
    seen = state
    for grads in (BAD, GOOD, BAD, GOOD):
        seen = seen.apply_gradients(grads=grads)
    for _ in range(2):
        state = state.apply_gradients(grads=GOOD)
    assert_same_bits(trained(seen), trained(state))
    assert seen.opt_state[0].count == 2 and seen.opt_state[2].count == 2


def test_a_field_of_a_subclass_is_skipped():
    class WithCarry(TrainState):
        carry: object = struct.field(default=None)

    state = WithCarry.create(apply_fn=print, params=GOOD, tx=with_loss_scale(ADAM), carry=jnp.zeros(2))
    for grads, expected in ((BAD, 0.0), (GOOD, 1.0)):
        after = state.apply_gradients(grads=grads, carry=jnp.ones(2))
        assert isinstance(after, WithCarry) and np.all(np.asarray(after.carry) == expected)


def test_collections_keep_their_dtype():
    """A layer in 16 bits returns 16-bit statistics, which must not make the step be traced again."""
    state = simple(model_state={"batch_stats": jnp.zeros(2)})
    after = state.apply_gradients(grads=GOOD, model_state={"batch_stats": jnp.ones(2, jnp.float16)})
    assert after.model_state["batch_stats"].dtype == jnp.float32 and after.model_state["batch_stats"][0] == 1


def test_collections_keep_their_weak_type():
    """Otherwise a compiled step would be traced again."""
    state = simple(model_state={"count": jnp.asarray(0.0)})
    after = state.apply_gradients(grads=GOOD, model_state={"count": state.model_state["count"] + 1})
    assert jax.typeof(after.model_state["count"]) == jax.typeof(state.model_state["count"])


def test_containers_are_those_of_the_state():
    """Otherwise a compiled step would be traced again."""
    state = simple(model_state={"batch_stats": jnp.zeros(2)})
    after = state.apply_gradients(grads=GOOD, model_state=core.freeze({"batch_stats": jnp.ones(2)}))
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_parameters_may_be_any_tree():
    @struct.dataclass
    class Weights:
        w: jax.Array

    after = simple(params=Weights(jnp.zeros(2))).apply_gradients(grads=Weights(jnp.ones(2)))
    assert isinstance(after.params, Weights) and after.params.w.tolist() == [-1, -1]


def test_what_is_left_out_is_empty():
    rngs = {"dropout": jax.random.key(3)}
    state = simple(rngs=rngs)
    rngs.clear()
    assert list(state.step_rngs) == ["dropout"] and simple().rngs == simple().model_state == {}


def test_an_average_that_keeps_nothing():
    state = simple(ema_decay=0).apply_gradients(grads=GOOD)
    assert same_bits(state.ema_params, state.params)


def test_extra_arguments_reach_the_optimizer():
    tx = with_loss_scale(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(patience=1, factor=0.5)))
    state = simple(tx)
    for _ in range(4):
        state = state.apply_gradients(grads=GOOD, extra_args={"value": 1.0})
    assert state.opt_state.inner_state[1].scale < 1


class TestFloat8:
    """Flax's fp8 layers have scales and histories of maxima in a collection whose gradient is its new value."""

    def training(self):
        model = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp)
        x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
        params = jax.jit(model.init)(jax.random.key(1), x)
        assert "_overwrite_with_gradient" in params
        tx = with_loss_scale(optax.adam(1e-2), jmp.StaticLossScale(64.0))
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx, ema_decay=0.5)

        @jax.jit
        def step(state, x):
            grad_fn = jmp.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2), "mixed_bfloat16")
            loss, grads = grad_fn(state.params, loss_scale=jmp.get_loss_scale(state))
            return state.apply_gradients(grads=grads), loss

        return state, step, x

    def test_statistics_are_replaced_and_skipped(self):
        state, step, x = self.training()
        clean, _ = run((state, step), [x, 2 * x])
        bad = np.where(np.arange(16)[:, None] == 0, np.float32(np.nan), x)
        seen, _ = run((state, step), [x, bad, 2 * x])
        assert_same_bits(trained(seen), trained(clean))
        statistics = clean.params["_overwrite_with_gradient"]
        assert not same_bits(statistics, state.params["_overwrite_with_gradient"])
        assert not same_bits(clean.params["params"]["kernel"], state.params["params"]["kernel"])
        (history,) = (v for k, v in statistics["Fp8DirectDotGeneralOp_0"].items() if k == "input_amax_history")
        assert np.isclose(np.max(history), np.max(np.abs(2 * x)), rtol=1e-2)
        assert same_bits(clean.ema_params["_overwrite_with_gradient"], statistics)  # not averaged

    @pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
    def test_scales_that_a_scan_shares(self, policy):
        """Their dtype in Flax says how they accumulate, and knows no size."""

        def loss(x, history, scale):
            history, scale = (jax.lax.convert_element_type(v, fp8_ops.fp32_max_grad) for v in (history, scale))
            body = lambda c, _: (fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, c, scale, history), None)  # noqa: E731
            return jax.lax.scan(body, jnp.array([x]), None, length=3)[0][0]

        args = jnp.float32(2), jnp.zeros(3), jnp.ones(1)
        want = jax.grad(loss, (0, 1, 2))(*args)
        assert_same_bits(jmp.autocast(jax.grad(loss, (0, 1, 2)), policy)(*args), want)
        assert jmp.explain(jax.grad(loss, (0, 1, 2)), policy)(*args).operations

    def test_what_else_is_among_the_parameters_stays(self):
        params = {"params": jnp.zeros(2), "_overwrite_with_gradient": jnp.zeros(3), "constants": jnp.ones(4)}
        state = simple(params=params).apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
        expected = {"params": -jnp.ones(2), "_overwrite_with_gradient": jnp.ones(3), "constants": jnp.ones(4)}
        assert_same_bits(state.params, expected)

    def test_the_optimizer_does_not_see_them(self):
        state, _, _ = self.training()
        assert set(state.opt_state.inner_state[0].mu) == {"kernel", "bias"}


def test_module_dtypes():
    assert module_dtypes("mixed_float16") == {"dtype": np.float16, "param_dtype": np.float32}
    layer = nn.Dense(4, **module_dtypes("bfloat16"))
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 2)))
    assert variables["params"]["kernel"].dtype == jnp.bfloat16


@pytest.mark.integration
def test_the_package_does_not_import_flax():
    code = "import sys, jmp_train; assert not [m for m in sys.modules if m.split('.')[0] in ('flax', 'orbax')]"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestErrors:
    def check(self, kind, message, fn, *args, **kwargs):
        with pytest.raises(kind, match=f"^{re.escape(message)}$"):
            fn(*args, **kwargs)

    def test_no_loss_scale(self):
        message = (
            "`tx` must hold exactly one with_loss_scale, which decides for the whole state whether a step is skipped: "
            "`opt_state` has no loss scale. Build the optimizer as with_loss_scale(optax.adam(1e-3)) and pass the "
            "state that its `init` or `update` returned. Where no loss scale is needed, with_loss_scale(tx, "
            "NoOpLossScale()) skips without scaling."
        )
        self.check(ValueError, message, simple, optax.adam(1e-3))
        state = simple(with_loss_scale(optax.adam(1e-3), NO_SCALE))
        assert_same_bits(state.apply_gradients(grads=BAD).params, state.params)

    def test_accumulation_around(self):
        message = (
            "`tx` has optax.MultiSteps around with_loss_scale, where a non-finite gradient is accumulated before it is "
            "checked. Turn them round: with_loss_scale(optax.MultiSteps(optimizer, steps))."
        )
        around = optax.MultiSteps(with_loss_scale(ADAM), 2)
        self.check(ValueError, message, simple, around)
        self.check(ValueError, message, simple, optax.chain(optax.trace(0.9), around))
        simple(with_loss_scale(optax.MultiSteps(ADAM, 2)))

    def test_no_transformation(self):
        message = (
            "`inner` must be an optax transformation, got float. "
            "Pass an optimizer, as in with_loss_scale(optax.adam(1e-3))."
        )
        self.check(TypeError, message, simple, 1e-3)

    def test_rngs(self):
        message = (
            "`rngs` must map the names that the model draws from to keys, got list; pass "
            "rngs={'dropout': jax.random.key(0)}."
        )
        self.check(TypeError, message, simple, rngs=[jax.random.key(0)])

    def test_a_module_where_parameters_belong(self):
        message = (
            "a differentiated argument must hold floating or complex numbers only, got an object of type Dense for the "
            "argument; pass it as an argument that `argnums` does not name."
        )
        self.check(TypeError, message, jmp.grad(lambda model, x: jnp.mean(x), "float32"), nn.Dense(2), jnp.ones(2))

    @pytest.mark.parametrize("decay", [1.0, -0.1, 2, "0.9", [0.9], np.ones(())])
    def test_decay(self, decay):
        message = (
            f"`ema_decay` must be a number in [0, 1), got {decay!r}: it is the share that an average keeps at each "
            "step. Pass a number such as 0.999, or None for no average."
        )
        self.check(ValueError, message, simple, ema_decay=decay)

    def test_structure(self):
        state = simple(model_state={"batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)}})
        message = (
            "`model_state` must have the structure that the state holds: missing ['batch_stats/var'], not in the state "
            "['intermediates/h']. Return every collection that the state was created with, and take out what a step "
            "adds (nnx.pop)."
        )
        new = {"batch_stats": {"mean": jnp.zeros(2)}, "intermediates": {"h": jnp.ones(2)}}
        self.check(ValueError, message, state.apply_gradients, grads=GOOD, model_state=new)

    def test_shape(self):
        state = simple(model_state={"batch_stats": {"mean": jnp.zeros(2)}})
        message = "`model_state`: 'batch_stats/mean' has the shape (3,), and the state's is (2,)."
        new = {"batch_stats": {"mean": jnp.zeros(3)}}
        self.check(ValueError, message, state.apply_gradients, grads=GOOD, model_state=new)

    @pytest.mark.parametrize(
        "names", [["batch_stats"], ["batch_stats", "ema_params", "opt_state", "params", "step"], ["apply_fn"]]
    )
    def test_no_such_field(self, names):
        message = (
            f"`apply_gradients` cannot change {names}; it changes ['model_state', 'rngs'], and the rest by itself. "
            "Static fields are for `state.replace`, and keywords of the optimizer's update go into `extra_args`."
        )
        changes = dict.fromkeys(reversed(names), jnp.zeros(2))
        self.check(TypeError, message, simple().apply_gradients, grads=GOOD, **changes)
