"""Parameters that a program itself updates step by step, as in meta-learning: no update is lost to 16-bit rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hand_tools import relative_error

import jmp_train as jmp
from jmp_train import autocast
from jmp_train._autocast.analysis.whole_program.updates import GRADIENT, STEP, UPDATE

RNG = np.random.default_rng(0)
PARAMS = {"in": (32, 48), "hidden": (48, 48), "bias": (48,), "out": (48, 4)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) / 6 for name, shape in PARAMS.items()}
X, Y = (RNG.normal(size=shape).astype(np.float32) for shape in ((64, 32), (64, 4)))
STEPS, RATE = 3, 1e-3  # the fewest steps that show the loss in 16 bits


def loss(p, x, y):
    h = jnp.tanh(x @ p["in"])
    return jnp.mean((jnp.tanh(h @ p["hidden"] + p["bias"]) @ p["out"] - y) ** 2)


def descent(p, x, y, steps=STEPS, wrap=lambda step: step):
    def step(p):
        return jax.tree.map(lambda a, g: a - RATE * g, p, jax.grad(loss)(p, x, y))

    for _ in range(steps):
        p = wrap(step)(p)
    return p


def with_optax(p, x, y, steps=STEPS, *, tx):
    state = tx.init(p)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(loss)(p, x, y), state, p)
        p = optax.apply_updates(p, updates)
    return p


def of_tasks(p, x, y, steps=STEPS, learn=descent):
    """The mean of the parameters that are learned for two tasks."""
    x, y = x.reshape(2, 32, 32), y.reshape(2, 32, 4)
    learned = jax.vmap(functools.partial(learn, steps=steps), (None, 0, 0))(p, x, y)
    return jax.tree.map(lambda leaf: jnp.mean(leaf, 0), learned)


def added_from_the_left(p, x, y, steps=STEPS):
    for _ in range(steps):
        p = jax.tree.map(lambda a, g: -RATE * g + a, p, jax.grad(loss)(p, x, y))
    return p


def preconditioned(p, x, y, steps=STEPS):
    """Steps along a matrix times the gradient, as with natural gradients and learned preconditioners."""
    for _ in range(steps):
        p = jax.tree.map(lambda a, g: a - RATE * (MIXES[len(a)] @ g), p, jax.grad(loss)(p, x, y))
    return p


def solved(p, x, y, steps=STEPS):
    for _ in range(steps):
        g = jax.grad(loss)(p, x, y)
        p = jax.tree.map(lambda a, g: a - RATE * jnp.linalg.solve(MIXES[len(a)], g), p, g)
    return p


def in_subspaces(p, x, y, steps=STEPS):
    """Steps with gradients projected to the span of some rows, and back (Zhao et al., "GaLore", 2024)."""
    for _ in range(steps):
        g = jax.grad(loss)(p, x, y)
        p = jax.tree.map(lambda a, g: a - RATE * (MIXES[len(a)][:8].T @ (MIXES[len(a)][:8] @ g)), p, g)
    return p


MIXES = {n: np.eye(n, dtype=np.float32) + RNG.normal(size=(n, n)).astype(np.float32) / 50 for n in (32, 48)}

LEARN = {
    "descent": descent,
    "added from the left": added_from_the_left,
    "jitted": functools.partial(descent, wrap=jax.jit),
    "checkpointed": functools.partial(descent, wrap=jax.checkpoint),
    "of two tasks": of_tasks,
    "momentum": functools.partial(with_optax, tx=optax.sgd(RATE, momentum=0.9)),
    "clipped": functools.partial(with_optax, tx=optax.chain(optax.clip(0.1), optax.sgd(RATE))),
    "weight decay": functools.partial(with_optax, tx=optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE))),
    # With the default eps, a gradient smaller than its rounding error would move a parameter as much as any other.
    "Adam": functools.partial(with_optax, tx=optax.adam(1e-4, eps=1e-4)),
    "Muon": functools.partial(with_optax, tx=optax.contrib.muon(1e-3)),
    "preconditioned": preconditioned,
    "of two tasks, preconditioned": functools.partial(of_tasks, learn=preconditioned),
    "solved": solved,
    "in subspaces": in_subspaces,
}
# Of the norm: by hand, with products alone in the dtype, 3e-4 and 3e-3, and twice that of meta-gradients.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}
DTYPES = ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)]  # each compiles unrolled steps
FAST = {"descent", "added from the left", "momentum", "Adam", "preconditioned", "solved", "of two tasks"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in LEARN])
def test_what_unrolled_steps_change_is_as_exact_as_their_gradients(name, dtype):
    def change(p, x, y):
        return jax.tree.map(lambda new, old: new - old, LEARN[name](p, x, y), p)

    got, want = (jax.jit(each)(PARAMS, X, Y) for each in (autocast(change, f"mixed_{dtype}"), change))
    # Adam divides by what may be as small as its rounding, and Muon uses it for the bias: by hand 3e-3 and 3e-2.
    bound = 6 if name in ("Adam", "Muon") else 1
    assert relative_error(got, want) < bound * TOLERANCE[dtype]


# Of as many steps as show that gradients are summed in float32. How steps are found that are products does not depend
# on who asks for a gradient.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["descent", "checkpointed", "clipped", "weight decay", "Adam", "preconditioned"])
def test_the_gradient_through_unrolled_steps_is_as_exact(name, dtype):
    def meta_loss(p):
        return loss(LEARN[name](p, X, Y, steps=10), X, Y)

    got = jmp.grad(meta_loss, f"mixed_{dtype}")(PARAMS, loss_scale=jmp.StaticLossScale(1024))
    assert relative_error(got, jax.jit(jax.grad(meta_loss))(PARAMS)) < 2 * TOLERANCE[dtype]


def reasons(fn, *args, rules=jmp.DEFAULT_RULES):
    operations = jmp.explain(fn, "mixed_float16", rules)(*args).operations
    return {operation.reason for operation in operations}


@pytest.mark.parametrize(
    ("rules", "found"),
    [
        (jmp.DEFAULT_RULES, {UPDATE.reason, GRADIENT.reason}),
        (jmp.DEFAULT_RULES.replace({"sub": "recorded"}), set()),
        (jmp.DEFAULT_RULES.replace({"add_any": "recorded"}), {UPDATE.reason}),
        (jmp.DEFAULT_RULES.with_scopes({".": "float32"}), set()),
    ],
    ids=["by default", "an edit of `sub`", "an edit of `add_any`", "a scope"],
)
def test_what_the_user_says_of_a_sum_holds(rules, found):
    def meta_loss(p):
        return loss(descent(p, X, Y, steps=2), X, Y)

    assert {UPDATE.reason, GRADIENT.reason} & reasons(jax.grad(meta_loss), PARAMS, rules=rules) == found


def generated(p, x):
    """Weights `[16, 4]` of a layer, computed by a network."""
    return (jnp.tanh(x[:1] @ p["in"]) @ p["hidden"])[0, :32].reshape(8, 4), lambda w: jnp.tanh(x[:, :8] @ w)


def encoded(p, x):
    return jnp.tanh(x @ p["in"]) @ p["out"], jnp.tanh


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [pytest.param(generated, marks=pytest.mark.slow), encoded])
def test_what_a_network_starts_is_trained_as_exactly(start, dtype):
    """Steps along gradients of what a network made: fast weights of a hypernetwork, latents of an encoder."""

    def moved(p, x, y):
        first, model = start(p, x)
        w = first
        for _ in range(10):
            w = w - RATE * jax.grad(lambda w: jnp.sum((model(w) - y) ** 2))(w)
        return jnp.mean((w - first) ** 2) * 1e4

    got = autocast(jax.value_and_grad(moved), f"mixed_{dtype}")(PARAMS, X, Y)
    exact = jax.jit(jax.value_and_grad(moved))(PARAMS, X, Y)
    assert relative_error(got[0], exact[0]) < 2 * TOLERANCE[dtype]
    assert relative_error(got[1], exact[1]) < 8 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("start", "entry", "dtype"),
    [
        (lambda p, x: x, None, "float32"),
        (lambda p, x: jnp.tanh(jnp.tile(x, (1, 2)) @ p["in"][:24, :12]), STEP, "float16"),
        (lambda p, x: p["in"][:, :12], UPDATE, "float16"),
    ],
    ids=["data", "an activation", "a parameter"],
)
def test_a_step_makes_no_parameter_of_what_it_starts_from(start, entry, dtype):
    """Coordinates stay data, of which a product over 12 numbers with data is float32; with a weight it is not."""

    def product(p, x, a):
        x = start(p, x)
        return (x + 0.1 * jax.grad(lambda x: jnp.sum(jnp.tanh(x @ p["in"][:12]) @ p["out"]))(x)) @ a

    args = PARAMS, X[:, :12], RNG.normal(size=(12, 64)).astype(np.float32)
    operations = jmp.explain(product, "mixed_float16")(*args).operations
    found = {operation.reason for operation in operations} & {STEP.reason, UPDATE.reason}
    assert found == ({entry.reason} if entry else set())
    assert [operation.dtype for operation in operations if operation.primitive == "dot_general"][-1] == dtype


def step_of_activations(change):
    """A step of activations that is a function of their gradient and of the data."""

    def step(p, x):
        h = jnp.tanh(x @ p["in"])
        g = jax.grad(lambda h: jnp.sum(jnp.tanh(h @ p["hidden"])))(h)
        return (h - change(g, x)) @ p["out"]

    return step


@pytest.mark.parametrize(("operations", "found"), [(60, {STEP.reason}), (70, set())])
def test_a_step_is_found_behind_64_operations_on_its_gradient(operations, found):
    """A search through more of them, at each sum, would make planning quadratic."""

    def sines(g, x):
        for _ in range(operations):
            g = jnp.sin(g)
        return g

    assert reasons(step_of_activations(sines), PARAMS, X) & {STEP.reason} == found


@pytest.mark.parametrize(
    "change",
    [lambda g, x: jnp.where(jnp.abs(x[:, :1]) < 1, g**3, 0), lambda g, x: jnp.stack([g, 2 * g])[1]],
    ids=["a choice of its powers", "one of a stack"],
)
def test_a_step_is_found_behind(change):
    assert STEP.reason in reasons(step_of_activations(change), PARAMS, X)


def test_the_gradient_of_a_penalty_updates_a_parameter_and_is_no_step_of_a_result():
    def penalty(p):
        return jnp.sum(jnp.square(p))

    p, x = PARAMS["hidden"], X[:, :1] * PARAMS["hidden"][0]
    assert UPDATE.reason in reasons(lambda p, x: x @ (p - 0.1 * jax.grad(penalty)(p)), p, x)
    assert not {UPDATE.reason, STEP.reason} & reasons(lambda p, x: (x @ p + jax.grad(penalty)(p[0])) @ p, p, x)


def test_data_that_is_moved_along_a_gradient_widens_what_it_meets():
    def moved(p, x):
        for _ in range(3):
            gradient = jax.grad(lambda x: jnp.sum(jnp.tanh(x / 1e5 @ p["in"]) @ p["out"]))(x)
            x = x - 0.1 * gradient + jnp.tanh(x / 1e5 @ p["in"])[:, :32]
        return x

    x = X + np.float32(1e5)
    assert relative_error(autocast(moved, "mixed_float16")(PARAMS, x), jax.jit(moved)(PARAMS, x)) < 1e-6


def test_sums_that_are_no_updates_stay_as_they_are():
    """Biases, an adapter, weights tied to others, layers on a gradient, and decay of the weights beside a gradient."""

    def program(p, x):
        y = x @ (p["hidden"] + p["hidden"].T) + p["bias"]
        y = jnp.tanh(y) @ (p["hidden"] + p["in"].T @ p["in"][:, :48])
        y = jax.grad(lambda y: jnp.sum(jnp.tanh(y @ p["hidden"])))(y)
        return jnp.tanh(y @ p["in"].T + p["bias"][:32]) @ p["out"][:32] + p["bias"][:4]

    def penalised(p, x, y):
        """The gradient of a penalty is `add_any`, of a parameter and of the gradient of the loss."""
        return loss(p, x, y) + sum(1e-3 * jnp.sum(p[name] * p[name]) for name in p)

    @jax.custom_vjp
    def squares(h, w, y):
        return jnp.sum((h @ w - y) ** 2)

    def differences(kept, g):
        h, w, y = kept
        difference = 2 * g * (h @ w - y)
        return difference @ w.T, h.T @ difference, None

    squares.defvjp(lambda *args: (squares(*args), args), differences)

    def by_rule(p, x, y):
        """Its derivative rule computes what it needs again."""
        h = jnp.tanh(x @ p["in"])
        return squares(h, p["out"], h[:, :4])

    programs = [(program, X @ np.ones((32, 48), np.float32)), (jax.grad(penalised), X, Y), (jax.grad(by_rule), X, Y)]
    for fn, *args in programs:
        assert not {UPDATE.reason, STEP.reason, GRADIENT.reason} & reasons(fn, PARAMS, *args)
