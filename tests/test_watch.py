"""The interpreter that watches every operation: its results equal the program's, and it locates each one."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_models import BY_NAME
from battery_tools import example
from comparisons import assert_same_bits, assert_two_programs_agree
from jax import lax

import jmp_train as jmp
from jmp_train._autocast.ir import TOP
from jmp_train._diagnostics.interpreter._interpreter import Interpreter, find_backward_only
from jmp_train._diagnostics.interpreter._site import Value, Watcher
from jmp_train._jaxpr import flatten, trace

X = np.linspace(0.5, 2.0, 12, dtype=np.float32).reshape(3, 4)
W = np.eye(4, dtype=np.float32) + 0.1


class Recorder(Watcher):
    """Records every operation that it is told of."""

    def __init__(self):
        self.sites, self.shown = [], []

    def watch(self, site, inputs, outputs):
        self.sites.append(site)
        self.shown.append(([value.array for value in inputs], outputs))
        return super().watch(site, inputs, outputs)

    def of(self, primitive):
        return [site for site in self.sites if site.primitive == primitive]


def run(fn, *args, wide=False, watcher=None):
    interpreter = Interpreter(trace(fn, *args)[0], wide)
    values = interpreter.run([Value(leaf) for leaf in jax.tree.leaves(args)], watcher or Recorder())
    return [value.array for value in values]


def body(c, x):
    return jnp.tanh(c @ W + x), (c, jnp.sum(x))


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvps(lambda t, out, x: 3 * t * jnp.cos(x))


@jax.custom_batching.custom_vmap
def own_vmap(x):
    return jnp.exp(x)


@own_vmap.def_vmap
def own_vmap_rule(size, batched, x):
    return 2 * jnp.exp(x), batched[0]


def newton(x):
    return lax.while_loop(lambda c: jnp.abs(c * c - x) > 1e-3, lambda c: 0.5 * (c + x / c), x)


def drop(x, key):
    def step(carry, key):
        return carry * jax.random.bernoulli(key, 0.5, carry.shape), jax.random.fold_in(key, 1)

    return lax.scan(step, x, jax.random.split(key, 3))


MESH = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDING = jax.NamedSharding(MESH, jax.sharding.PartitionSpec())
PROGRAMS = {
    "scan": lambda x: lax.scan(body, x[0], x),
    "scan backwards": lambda x: lax.scan(body, x[0], x, reverse=True),
    "scan of nothing": lambda x: lax.scan(body, x[0], x[:0]),
    "scan without rows": lambda x: lax.scan(lambda c, _: (c + 1, None), x, None, length=3),
    "scan unrolled": lambda x: lax.scan(body, x[0], x, unroll=2),
    "grad of a scan": jax.grad(lambda x: jnp.sum(lax.scan(body, x[0], x)[0])),
    "fori": lambda x: lax.fori_loop(0, 4, lambda i, c: c * i + 1, x),
    "while": lambda x: newton(x[0, 0]),
    "while under vmap": jax.vmap(jax.vmap(newton)),
    "cond": lambda x: [lax.cond(x[0, 0] > limit, jnp.sin, jnp.cos, x) for limit in (0, 1)],
    "switch": lambda x: [lax.switch(i + 0 * x[0, 0].astype(int), [jnp.sin, jnp.cos, jnp.exp], x) for i in (-1, 1, 5)],
    "cond under vmap": jax.vmap(lambda x: lax.cond(x[0] > 1, jnp.sin, jnp.cos, x)),
    "remat": jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))(x))),
    "remat under a policy": jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ W), policy=jax.checkpoint_policies.dots_saveable)(x))
    ),
    "custom_vjp": lambda x: (own_vjp(x), jax.grad(lambda x: jnp.sum(own_vjp(x)))(x)),
    "custom_jvp": lambda x: (own_jvp(x), jax.grad(lambda x: jnp.sum(own_jvp(x)))(x)),
    "custom_vmap": lambda x: (own_vmap(x), jax.vmap(own_vmap)(x)),
    "jit with shardings": jax.jit(lambda x: x @ W, in_shardings=SHARDING, out_shardings=SHARDING),
    "a marked region": jmp.full_precision(lambda x: x @ W),
    "sorting": lambda x: (jnp.sort(x, axis=None), jnp.argsort(x, axis=None), lax.top_k(x, 2)),
    "integers and booleans": lambda x: (x > 1, (x * 10).astype(int) % 3, jnp.cumsum(x, 1), jnp.arange(3)),
    "complex": lambda x: jnp.abs(jnp.fft.fft(x)),
    "linear algebra": lambda x: jnp.linalg.solve(W, x.T),
    "scatter": lambda x: jnp.zeros(4).at[jnp.array([0, 0, 1])].add(x[:, 0]),
    "autocast": jmp.autocast(jax.grad(lambda x: jnp.mean(jnp.tanh(x @ W) ** 2)), "mixed_float16"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_results_are_the_programs(name):
    expected = jax.tree.leaves(jax.jit(PROGRAMS[name])(X))
    results = run(PROGRAMS[name], X)
    assert [r.dtype for r in results] == [e.dtype for e in expected]
    for result, reference in zip(results, expected, strict=True):
        # A compiler may keep in 32 bits what autocast rounds.
        np.testing.assert_allclose(result, reference, rtol=2e-3 if name == "autocast" else 1e-5, atol=1e-6)


def test_random_keys():
    expected, keys = jax.jit(drop)(X, jax.random.key(1))
    result, ran = run(drop, X, jax.random.key(1))
    assert_two_programs_agree(result, expected)
    assert_same_bits(ran, keys)


SLOW = ["nnx_mlp", "optax_ctc", "equilibrium", "transformer_scan_remat", "shared_weight", "gan_gradient_penalty"]


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_models_of_the_battery(name):
    params, batch = example(BY_NAME[name])
    grad_fn = jmp.value_and_grad(BY_NAME[name].loss(), "float32")
    results, references = run(grad_fn, params, batch), jax.tree.leaves(jax.jit(grad_fn)(params, batch))
    # The gradient of attention's key bias is rounding noise.
    whole = max(float(np.max(np.abs(reference))) for reference in references[1:])
    for result, reference in zip(results, references, strict=True):
        scale = 1e-4 * whole + float(np.max(np.abs(reference)))
        np.testing.assert_allclose(result, reference, rtol=0, atol=2e-3 * scale)


def test_what_is_shown_is_what_was_computed():
    seen = Recorder()
    run(lambda x: jnp.exp(x) + 1, X, watcher=seen)
    assert [site.primitive for site in seen.sites] == ["exp", "add"]
    (exponent, sum_) = seen.shown
    assert np.array_equal(exponent[0][0], X) and np.allclose(exponent[1][0], np.exp(X))
    assert np.allclose(sum_[1][0], np.exp(X) + 1)


def test_sites():
    def loss(x):
        def step(c, row):
            with jax.named_scope("Cell"):
                return lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c), c + row), None

        with jax.named_scope("Net"):
            return jnp.sum(lax.scan(step, x[0], x)[0])

    seen = Recorder()
    run(jax.grad(loss), X, watcher=seen)
    forward = [site for site in seen.of("tanh") if not site.backward]
    assert [tuple(loop.iteration for loop in site.loops) for site in forward] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip
    assert {site.scope for site in forward} == {"Net/Cell"}
    assert [(loop.primitive, loop.length) for loop in forward[0].loops] == [("scan", 3), ("scan", 2)]
    backward = [site for site in seen.sites if site.backward and site.loops]
    assert [site.loops[0].iteration for site in backward] == sorted(
        (s.loops[0].iteration for s in backward), reverse=True
    )
    assert "Net/Cell" in {site.scope for site in backward}


def test_a_while_counts_from_nought():
    seen = Recorder()
    run(lambda x: lax.while_loop(lambda c: c < 10, lambda c: c * 2, x), np.float32(1), watcher=seen)
    assert [site.loops[0] for site in seen.of("mul")] == [("while", i, None) for i in range(4)]


def derivative_primitives(fn, *args):
    seen = Recorder()
    run(fn, *args, watcher=seen)
    return [site.primitive for site in seen.sites if site.derivative]


def test_what_only_the_backward_pass_reads():
    assert derivative_primitives(jax.grad(lambda x: jnp.sum(jnp.sqrt(x))), X) == ["div"]
    assert derivative_primitives(jax.grad(lambda x: jnp.sum(jnp.sin(x))), X) == ["cos"]
    assert derivative_primitives(jax.grad(lambda x: jnp.sum(jnp.exp(x))), X) == []
    assert derivative_primitives(lambda x: jnp.cos(x), X) == []
    # In the body of a scan, and not what the next iteration reads.
    scanned = jax.grad(lambda x: jnp.sum(lax.scan(lambda c, row: (jnp.sin(c) + row, None), x[0], x)[0]))
    assert derivative_primitives(scanned, X) == ["cos"] * 3
    program = flatten(trace(jnp.sin, X)[0])
    assert find_backward_only(program, TOP, frozenset({0})).nodes == {0}


def test_a_watcher_may_change_the_operands():
    class Doubles(Watcher):
        def before(self, site, inputs):
            return [Value(2 * inputs[0].array)] if site.primitive == "exp" else inputs

    assert np.allclose(run(lambda x: jnp.exp(x), X, watcher=Doubles())[0], np.exp(2 * X))


def test_values_are_dropped_after_their_last_reader():
    class Handle:
        """A tag lives as long as its value."""

    class Counter(Watcher):
        def __init__(self):
            self.alive, self.most = weakref.WeakSet(), 0

        def watch(self, site, inputs, outputs):
            handles = [Handle() for _ in outputs]
            self.alive.update(handles)
            self.most = max(self.most, len(self.alive))
            return handles

    def chain(x):
        for _ in range(50):
            x = jnp.sin(x)
        return x

    counter = Counter()
    run(chain, X, watcher=counter)
    assert counter.most <= 2


def test_thousands_of_operations():
    def loss(w, x):
        return jnp.mean(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=500)[0])

    seen = Recorder()
    run(jax.grad(loss), W, X, watcher=seen)
    assert len(seen.sites) > 3000


# In float32


def test_a_wide_machine_computes_16_bits_in_float32():
    def fn(x):
        h = (x.astype(jnp.float16) @ W.astype(jnp.float16)) * jnp.float16(300)
        total = lax.dot(h, h.T, preferred_element_type=jnp.float16)
        noise = jnp.zeros((3, 3), jnp.bfloat16).at[0, 0].add(1)
        return lax.scan(lambda c, row: (c + row, row), jnp.zeros(3, jnp.float16), total), noise

    h = 300 * np.float64(X) @ W
    (carry, rows, noise) = run(fn, X, wide=True)
    assert {carry.dtype, rows.dtype, noise.dtype} == {np.dtype(np.float32)}
    np.testing.assert_allclose(rows, h @ h.T, rtol=1e-3)  # the literals were rounded when they were traced
    assert np.all(np.isinf(run(fn, X)[1]))


def test_what_cannot_widen_runs_as_recorded():
    def fn(x):
        bits = lax.bitcast_convert_type(x.astype(jnp.float16), jnp.int16)
        host = jax.pure_callback(
            lambda x: np.asarray(x), jax.ShapeDtypeStruct((3, 4), jnp.float16), x.astype(jnp.float16)
        )
        return bits, host + 1, lax.reduce_precision(x, 5, 2)

    bits, host, rounded = run(fn, X, wide=True)
    assert np.array_equal(bits, X.astype(np.float16).view(np.int16)) and host.dtype == np.float32
    assert np.array_equal(rounded, X)


def test_a_transformation_of_a_training_step():
    tx = jmp.with_loss_scale(optax.adam(1e-2))

    def step(params, state, x):
        loss, grads = jmp.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), "mixed_float16")(
            params, x, loss_scale=jmp.get_loss_scale(state)
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    args = (jnp.asarray(W), tx.init(W), X)
    results = run(step, *args)
    for result, reference in zip(results, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(result, reference, rtol=1e-3, atol=1e-5)
