"""Loops that a program writes out as repeated code: which values are their states, and the dtypes of these."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import figures, leaves, relative_error
from jax import lax
from pass_tools import after

import jmp_train as jmp
from jmp_train import autocast
from jmp_train._autocast.ir import TOP, Precision, precision_of
from jmp_train._autocast.planner import Planner
from jmp_train._dtypes import FLOAT32

RNG = np.random.default_rng(0)
N, ROWS = 16, 32


def weights(*sizes):
    return [(RNG.normal(size=pair) / np.sqrt(pair[0])).astype(np.float32) for pair in itertools.pairwise(sizes)]


W, V = weights(N, 64, N), weights(N, 64, N)
X, Y = (RNG.normal(size=(ROWS, N)).astype(np.float32) for _ in range(2))
TOKENS = np.arange(ROWS) % 8


def matmul(x, w, dtype=None):
    """`a @ b` as the user writes it; with a dtype, mixed precision by hand: float32 outside of products."""
    return x @ w if dtype is None else jnp.matmul(x.astype(dtype), w.astype(dtype)).astype(jnp.float32)


def network(w, x, dtype=None):
    for each in w[:-1]:
        x = jnp.tanh(matmul(x, each, dtype))
    return matmul(x, w[-1], dtype)


def euler(net, w, x, steps=8, size=1e-3):
    for _ in range(steps):
        x = x + size * net(w, x)
    return x


def runge_kutta(net, w, x):
    for _ in range(6):
        a = net(w, x)
        b = net(w, x + 0.05 * a)
        c = net(w, x + 0.05 * b)
        x = x + 0.1 / 6 * (a + 2 * b + 2 * c + net(w, x + 0.1 * c))
    return x


def noise(x):
    return jax.random.normal(jax.random.key(0), x.shape, jnp.float32)


def langevin(net, w, x):
    for key in jax.random.split(jax.random.key(0), 8):
        gradient = jax.grad(lambda x: jnp.sum(net(w, x)))(x)
        x = x - 1e-3 * gradient + 1e-3 * jax.random.normal(key, x.shape, jnp.float32)
    return x


def leapfrog(net, w, x):
    force = jax.grad(lambda x: 1e-2 * jnp.sum(net(w, x)))
    v = jnp.ones_like(x)
    for _ in range(8):
        v = v - 0.05 * force(x)
        x = x + 0.1 * v
    return v


def attack(net, w, x):
    """Madry et al., "Towards Deep Learning Models Resistant to Adversarial Attacks", 2018."""
    start = x
    for _ in range(8):
        gradient = jax.grad(lambda x: jnp.sum(net(w, x) ** 2))(x)
        x = jnp.clip(x + 1e-3 * jnp.tanh(gradient), start - 0.03, start + 0.03)
    return x - start


def heavy_ball(net, w, x):
    v = jnp.zeros_like(x)
    for _ in range(12):
        v = 0.9 * v - 0.01 * net(w, x)
        x = x + v
    return x


def sparse_code(net, w, x):
    """ISTA (Daubechies et al., 2004), of which each step is a layer with the same dictionary."""
    dictionary, z = w[1], jnp.zeros((ROWS, 64), jnp.float32)
    for _ in range(12):
        z = jax.nn.relu(z - 0.1 * net([dictionary.T], net([dictionary], z) - x) - 0.01)
    return z


def forecast(net, w, x):
    for _ in range(8):
        x = jnp.concatenate([x[:, 1:], x[:, -1:] + 0.05 * net(w, x)[:, :1]], 1)
    return jnp.diff(x, axis=1)


def denoise(net, w, x):
    """DDIM (Song et al., "Denoising Diffusion Implicit Models", 2021)."""
    signal = [float(np.cos(0.02 + 1.5 * i / 15) ** 2) for i in range(16)]
    x = noise(x)
    for now, then in zip(signal[:0:-1], signal[-2::-1], strict=True):
        error = net(w, x)
        x = then**0.5 * (x - (1 - now) ** 0.5 * error) / now**0.5 + (1 - then) ** 0.5 * error
    return x


def from_table(net, w, x):
    z = jnp.broadcast_to(jnp.linspace(-3, 3, N, dtype=jnp.float32), x.shape)
    return euler(lambda w, z: net(w, z + x), w, z, size=0.05)


def from_zeros(net, w, x):
    return euler(lambda w, z: net(w, z + x), w, jnp.zeros_like(x), 16, 0.05)


def mapped_over_rows(net, w, x):
    return jax.vmap(lambda x: from_zeros(net, w, x))(x)


def added_in_place(net, w, x):
    for _ in range(8):
        x = x.at[:, :8].add(1e-2 * net(w, x)[:, :8])
    return x


def coupled(net, w, x):
    a, b = x[:, : N // 2], x[:, N // 2 :]
    for _ in range(8):
        a = a + 1e-2 * net(w, jnp.concatenate([b, b], 1))[:, : N // 2]
        b = b + 1e-2 * net(w, jnp.concatenate([a, a], 1))[:, : N // 2]
    return jnp.concatenate([a, b], 1)


def cell_state(net, w, x):
    """An LSTM, whose state starts from zeros and whose steps are written out."""
    h = c = jnp.zeros_like(x)
    for _ in range(24):
        gate = net(w, jnp.tanh(h) + x)
        c = jax.nn.sigmoid(gate + 2) * c + 0.1 * jnp.tanh(gate)
        h = jax.nn.sigmoid(gate) * jnp.tanh(c)
    return c


def running_sum(net, w, x):
    total = jnp.zeros_like(x)
    for i in range(24):
        total = total + net(w, x * (i + 1))
    return total


def in_checkpointed_steps(net, w, x):
    step = jax.checkpoint(lambda w, x: x + 1e-3 * net(w, x))
    for _ in range(8):
        x = step(w, x)
    return x


def in_checkpointed_steps_of_two(net, w, x):
    """Each step returns what it added, in 16 bits, and then the state."""

    def step(w, x):
        change = net(w, x)
        return change, x + 1e-3 * change

    step = jax.checkpoint(step)
    for _ in range(8):
        _, x = step(w, x)
    return x


def through_checkpointed_networks(net, w, x):
    return euler(jax.checkpoint(net), w, x)


RESULTS = {
    "euler": euler,
    "displacement": lambda net, w, x: euler(net, w, x) - x,
    "from noise": lambda net, w, x: euler(net, w, noise(x)),
    "from a part": lambda net, w, x: euler(net, w, jnp.concatenate([x[:, 8:], x[:, :8]], 1)),
    "each of two batches": lambda net, w, x: euler(net, w, x) + euler(net, w, 2 * x),
    "normalised": lambda net, w, x: euler(lambda w, x: net(w, jax.nn.standardize(x)), w, x),
    "runge-kutta": runge_kutta,
    "langevin": langevin,
    "leapfrog": leapfrog,
    "attack": attack,
    "heavy ball": heavy_ball,
    "sparse code": sparse_code,
    "forecast": forecast,
    "denoise": denoise,
    "from a table": from_table,
    "from zeros": from_zeros,
    "mapped over rows": mapped_over_rows,
    "added in place": added_in_place,
    "coupled": coupled,
    "cell state": cell_state,
    "running sum": running_sum,
    "checkpointed steps": in_checkpointed_steps,
    "checkpointed steps of two results": in_checkpointed_steps_of_two,
    "checkpointed networks": through_checkpointed_networks,
}


def loss_of(solve, measure):
    return lambda net, w, x: jnp.mean(measure(solve(net, w, x), x))


GRADIENTS = {
    "velocity": loss_of(euler, lambda out, x: ((out - x) / 8e-3 - Y) ** 2),
    "linear": loss_of(functools.partial(euler, steps=16, size=0.05), lambda out, x: out * Y),
    "each step": lambda net, w, x: sum(jnp.mean((euler(net, w, x, n, 0.05) - Y) ** 2) for n in range(1, 8)),
    "runge-kutta": loss_of(runge_kutta, lambda out, x: (out - Y) ** 2),
    "checkpointed steps": loss_of(in_checkpointed_steps, lambda out, x: ((out - x) / 8e-3 - Y) ** 2),
    "checkpointed networks": loss_of(through_checkpointed_networks, lambda out, x: ((out - x) / 8e-3 - Y) ** 2),
}


def exact(fn):
    """The result in float64."""
    with jax.enable_x64(True):
        return jax.jit(functools.partial(fn, network))(*jax.tree.map(np.float64, (W, X)))


def error(got, want):
    return relative_error(leaves(got), leaves(want))


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_as_accurate_as_by_hand(name):
    fn = RESULTS[name]
    by_hand = jax.jit(functools.partial(fn, functools.partial(network, dtype=jnp.float16)))
    ours = jax.jit(autocast(functools.partial(fn, network), "mixed_float16"))
    want = exact(fn)
    assert error(ours(W, X), want) <= 1.5 * error(by_hand(W, X), want)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_is_as_accurate_as_by_hand(name):
    fn, scale = GRADIENTS[name], 1024.0
    hand = functools.partial(fn, functools.partial(network, dtype=jnp.float16))
    scaled = jax.jit(jax.grad(lambda w, x: hand(w, x) * scale))
    gradient = jmp.value_and_grad(functools.partial(fn, network), "mixed_float16")
    ours = jax.jit(lambda w, x: gradient(w, x, loss_scale=jmp.StaticLossScale(scale))[1])
    want = exact(lambda net, w, x: jax.grad(functools.partial(fn, net))(w, x))
    by_hand = jax.tree.map(lambda leaf: leaf / scale, scaled(W, X))
    assert error(ours(W, X), want) <= 1.5 * error(by_hand, want)


def found(fn, *args):
    """The primitives that compute states of loops, and those with which sums start."""
    jaxpr, parameters = jax.make_jaxpr(fn)(*args), len(jax.tree.leaves(args[0]))
    planner = Planner(jmp.get_policy("mixed_float16"), jmp.DEFAULT_RULES)
    precisions = [
        precision_of(aval, Precision.WEAK if i < parameters else Precision.FULL)
        for i, aval in enumerate(jaxpr.in_avals)
    ]
    planner.analyze(jaxpr, precisions)
    program, _ = planner.recorded(jaxpr, TOP)
    of = lambda ids: [node.name for node in program.nodes if id(node) in ids]  # noqa: E731
    return of(planner.states), of(planner.starts)


def step(w, x):
    return x + network(w, x)


def test_the_states_are_the_sums_that_the_same_weights_multiply_again():
    assert found(lambda w, x: step(w, step(w, step(w, x))), W, X) == (["add"] * 3, [])


def test_what_an_unrolled_loop_starts_with_is_a_state():
    states, _ = found(lambda w, x: step(w, step(w, jnp.sin(x))), W, X)
    assert states == ["sin", "add", "add"]


def test_a_state_may_be_computed_from_element_by_element():
    def refined(w, x):
        for _ in range(2):
            x = jax.nn.relu(jnp.clip(x, -1, 1) + network(w, jnp.tanh(x)))
        return x

    states, _ = found(refined, W, X)
    assert states.count("add") == 2
    assert states.count("tanh") == 1  # the second, of a state


def test_a_state_may_be_joined_with_what_a_product_computed():
    def window(w, x):
        for _ in range(3):
            x = jnp.concatenate([x[:, 1:], network(w, x)[:, :1]], 1)
        return x

    states, _ = found(window, W, X)
    assert states.count("concatenate") == 3


def test_a_part_of_a_state_that_starts_from_zeros_is_one():
    def shifted(w, x):
        z = jnp.zeros_like(x)
        for _ in range(3):
            z = z + network(w, x + jnp.concatenate([z[:, 1:], x[:, :1]], 1))
        return z

    states, _ = found(shifted, W, X)
    assert states.count("slice") >= 2


def test_a_state_may_be_selected():
    def frozen(w, x, mask):
        for _ in range(3):
            x = jnp.where(mask, x + network(w, x), x)
        return x

    states, _ = found(frozen, W, X, Y > 0)
    assert states.count("add") == 3


@pytest.mark.parametrize("order", [1, -1])
def test_a_state_may_be_any_result_of_a_step(order):
    step = jax.checkpoint(lambda w, x: (x + (change := network(w, x)), change)[::order])

    def steps(w, x):
        for _ in range(3):
            x = step(w, x)[::order][0]
        return x

    assert found(steps, W, X) == (["remat2"] * 3, [])


def test_each_factor_of_a_loop_is_told_from_others():
    """The first layer that two networks have in common refines nothing."""
    both = lambda w, x: step([w[0], V[1]], x + jnp.sin(x)) - step([w[0], w[1]], x)  # noqa: E731
    assert found(both, W, X) == ([], [])


def tied(w, x, body):
    """A stack of layers with shared weights, after a first layer with its own."""
    x = x @ V[0][:, :N]
    for _ in range(3):
        x = body(w, x)
    return x


def rms_norm(x):
    """RMSNorm as Flax writes it: with zeros for the mean."""
    return (x - jnp.zeros((ROWS, 1))) * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def generate(w, tokens):
    """Each token is the most likely one after the last. The embedding comes with positions, which are a table."""
    table = jnp.sin(jnp.arange(N, dtype=jnp.float32))
    for _ in range(3):
        h = jnp.asarray(V[1])[tokens] + table
        tokens = jnp.argmax(h + network(w, h), -1)
    return tokens


def loss(out):
    return jnp.mean((out - jnp.resize(Y, out.shape)) ** 2)


def last_layer_of_first_weight(layer):
    """A loss of a residual stream, and of a product of it with its first weight."""

    def total(w, x):
        out = layer(V, layer(w, x))
        return loss(out) + loss(out @ w[0])

    return total


WITHOUT_STATES = {
    "layers with weights of their own": (lambda w, x: step(V, step(w, x)), X),
    "one step": (step, X),
    "a network": (lambda w, x: network(w, network(w, x)), X),
    "one network of two batches": (lambda w, x: step(w, x) * step(w, jnp.sin(x)), X),
    "the first weight again at the end": (lambda w, x: step(V, step(w, x)) @ w[0], X),
    "layers behind a first one": (lambda w, x: tied(w, x, step), X),
    "those of activations and data": (lambda w, x: tied(w, x, lambda w, h: network(w, h) + network(w, h)), X),
    "norms that subtract zeros": (lambda w, x: tied(w, x, lambda w, h: h + network(w, rms_norm(h))), X),
    "masks": (lambda w, x, mask: tied(w, x, lambda w, h: h + network(w, h) * mask), X, Y > 0),
    "selections": (lambda w, x, mask: tied(w, x, lambda w, h: jnp.where(mask, h, 0) + network(w, h)), X, Y > 0),
    "tokens": (generate, TOKENS),
    "solutions": (lambda w, x: step(w, jnp.linalg.solve(jnp.eye(N) + network(w, x)[:N], x.T).T), X),
    "one network of a sum and of data": (lambda w, x: jnp.sin(x) + network(w, step(w, x)), X),
    "a gradient": (jax.grad(lambda w, x: jnp.mean((step(w, x) - x) ** 2)), X),
    "a gradient of the first weight": (jax.grad(lambda w, x: loss(step(V, step(w, x)) @ w[0])), X),
    "a gradient of the input, too": (jax.grad(last_layer_of_first_weight(step), (0, 1)), X),
    "of checkpointed layers": (jax.grad(last_layer_of_first_weight(jax.checkpoint(step)), (0, 1)), X),
    "a gradient of layers behind a first one": (jax.grad(lambda w, x: loss(tied(w, x, step))), X),
    "a network in one layer": (lambda w, x: network(W, (h := step(w, x)) + network(V, network(V, h))), X),
    "a loop": (lambda w, x: lax.fori_loop(0, 3, lambda _, x: step(w, x), x), X),
}


@pytest.mark.parametrize("name", WITHOUT_STATES)
def test_what_has_no_states(name):
    fn, *args = WITHOUT_STATES[name]
    states, _ = found(fn, W, *args)
    assert states == []


STARTS = {
    "a sum with zeros": (lambda w, x: jnp.zeros((ROWS, 64)) + x @ w[0], ["add"]),
    "with another constant": (lambda w, x: x @ w[0] - jnp.full((ROWS, 64), 2.0), ["sub"]),
    "a product with zeros": (lambda w, x: jnp.zeros((ROWS, 64)) * (x @ w[0]), ["mul"]),
    "under vmap": (jax.vmap(lambda w, x: jnp.zeros(64) + x @ w[0], (None, 0)), ["add"]),
    "of a literal": (lambda w, x: 2.0 + x @ w[0], []),
    "of rows": (lambda w, x: jnp.zeros((ROWS, 1)) + x @ w[0], []),
    "of two constants": (lambda w, x: (jnp.zeros((ROWS, 64)) + jnp.ones((ROWS, 64)), x @ w[0]), []),
    "a selection": (lambda w, x: jnp.where(x @ w[0] > 0, x @ w[0], jnp.zeros((ROWS, 64))), []),
    "a bound": (lambda w, x: jnp.maximum(x @ w[0], jnp.zeros((ROWS, 64))), []),
    "a derivative": (jax.grad(lambda w, x: jnp.sum((x @ w[0])[:, :8])), []),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_a_running_sum_starts_with(name):
    fn, starts = STARTS[name]
    assert found(fn, W, X)[1] == starts


def test_a_sum_that_starts_from_an_array_is_float32_and_a_product_with_one_other_than_zeros_is_not():
    def results(fn):
        program = after("assign_dtypes", lambda w, x: fn(x @ w[0]) @ w[1], W, X)
        (equation,) = (e for e in program.equations if e.node.name in ("add", "mul"))
        return {use.dtype for use in equation.uses}

    shape = (ROWS, 64)
    assert results(lambda h: h + jnp.zeros(shape)) == {FLOAT32}
    assert results(lambda h: h + jnp.ones(shape)) == {FLOAT32}
    assert results(lambda h: h * jnp.zeros(shape)) == {FLOAT32}
    assert FLOAT32 not in results(lambda h: h * jnp.ones(shape))
    assert FLOAT32 not in results(lambda h: h + 1.0)


def test_a_state_is_read_by_products_in_16_bits_and_by_sums_as_it_is():
    program = after("insert_casts", lambda w, x: step(w, step(w, step(w, x))), W, X)
    sums = [equation for equation in program.equations if equation.name == "add"]
    dots = [equation for equation in program.equations if equation.name == "dot_general"]
    assert all({program.avals[number].dtype for number in e.operands} == {np.dtype(np.float32)} for e in sums)
    assert all({program.avals[number].dtype for number in e.operands} == {np.dtype(np.float16)} for e in dots)


def test_activations_between_states_have_copies_in_16_bits():
    layer = lambda w, x: x + jnp.exp(jnp.tanh(x @ w[0])) @ w[1]  # noqa: E731
    program = after("assign_dtypes", lambda w, x: layer(w, layer(w, layer(w, x))), W, X)
    results = [equation.results[0] for equation in program.equations if equation.node.name == "exp"]
    assert [program.facts[number].has_low_copy for number in results] == [True] * 3


def test_the_activations_of_a_network_are_no_states():
    """Its residual stream starts behind a layer, and is given to a rematerialized call."""

    def refined(w, x):
        for _ in range(3):
            h = x @ w[0]
            x = x + jax.checkpoint(lambda v, h: h + jnp.tanh(h @ v))(w[1] @ w[0], h) @ w[1]
        return x

    operations = jmp.explain(refined, "mixed_float16")(W, X).operations
    assert [op.dtype for op in operations if op.primitive == "add"] == ["float16", "float32"] * 3


def test_explain_says_why():
    report = jmp.explain(lambda w, x: (jnp.zeros((ROWS, 64)) + x @ w[0]) @ w[1], "mixed_float16")(W, X)
    (reason,) = (operation.reason for operation in report.operations if operation.primitive == "add")
    assert "unrolled loop" in reason


@pytest.mark.slow
@pytest.mark.parametrize("solve", [functools.partial(euler, steps=8), runge_kutta], ids=["euler", "runge-kutta"])
def test_a_solver_of_a_network_moves_hardly_more_bytes_than_by_hand(solve):
    def by_hand(w, x):
        for each in w[:-1]:
            x = jnp.tanh(x.astype(jnp.float16) @ each.astype(jnp.float16))
        return x @ w[-1].astype(jnp.float16)

    def moved(net, transform=lambda fn: fn):
        gradient = transform(jax.grad(lambda w, x, y: jnp.mean((solve(net, w, x) - y) ** 2)))
        x = jax.ShapeDtypeStruct((32768, 1024), jnp.float32)
        shapes = [(1024, 4096), (4096, 1024)]
        return figures(gradient, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], x, x)

    ours, hand = moved(network, lambda fn: autocast(fn, "mixed_float16")), moved(by_hand)
    print(f"{ours.bytes / 1e6:,.0f} MB, by hand {hand.bytes / 1e6:,.0f} MB")
    assert ours.bytes <= 1.05 * hand.bytes
