"""What a scan under autocast stacks for its backward pass, and the dtypes of its carries.

The dtypes are read from the emitted program; the numbers are compared with those of the same layers, in float64.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from battery_tools import leaves, relative_error, tracing_calls
from comparisons import as_written, assert_only_the_precision_differs, assert_two_programs_agree, with_and_without
from flax import linen as nn
from jax import lax
from loop_carries import sixteen_bit_carries

from jmp_train import DEFAULT_RULES, autocast, explain, get_policy
from jmp_train._jaxpr import scan_counts

LAYERS, BATCH, WIDTH = 3, 16, 8
RNG = np.random.default_rng(0)
FULL = (BATCH, WIDTH)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


X = normal(*FULL)
PARAMS = {"w": normal(LAYERS, WIDTH, WIDTH) / 3, "scale": np.ones((LAYERS, WIDTH), np.float32)}


def gelu_layer(h, layer):
    return h + jax.nn.gelu(h @ layer["w"])


def norm_layer(h, layer):
    return h + (nn.LayerNorm(use_bias=False, use_scale=False).apply({}, h) * layer["scale"]) @ layer["w"]


def softmax_layer(h, layer):
    return jax.nn.softmax(h @ layer["w"], axis=-1) @ layer["w"] * 3 + h


LAYER_KINDS = {"gelu": gelu_layer, "norm": norm_layer, "softmax": softmax_layer}


def scanned(layer, reverse=False):
    """The mean square of the result of scanned layers, whose input is a product."""

    def loss(params, x):
        h = x @ params["w"][0]
        h, _ = lax.scan(lambda h, p: (layer(h, p), None), h, params, reverse=reverse)
        return jnp.mean(h**2)

    return loss


def unrolled(layer, reverse=False):
    def loss(params, x):
        h = x @ params["w"][0]
        for i in range(LAYERS)[:: -1 if reverse else 1]:
            h = layer(h, jax.tree.map(lambda leaf, i=i: leaf[i], params))
        return jnp.mean(h**2)

    return loss


def scans(fn, *args):
    """For each scan in the program of `fn`, outer before inner: the types it carries, the types it stacks."""
    return scans_of(jax.make_jaxpr(fn)(*args))


def scans_of(program):
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            bodies = [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=has_equations) if has_equations(x)]
            if eqn.primitive.name == "scan":
                body = getattr(bodies[0], "jaxpr", bodies[0])
                types = [(str(out.aval.dtype), out.aval.shape) for out in body.outvars]
                _, carry = scan_counts(eqn)
                found.append((types[:carry], types[carry:]))
            for body in bodies:
                walk(getattr(body, "jaxpr", body))

    walk(program.jaxpr)
    return found


def has_equations(x):
    return hasattr(x, "eqns")


def stacked_forward(loss, policy="mixed_float16", args=(PARAMS, X), **kw):
    """The types that the first scan of the gradient of `loss` stacks."""
    return scans(autocast(jax.grad(loss), policy, **kw), *args)[0][1]


def bytes_of(types):
    return sum(np.dtype(getattr(jnp, name)).itemsize * int(np.prod(shape)) for name, shape in types if name != "bool")


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_a_scan_over_layers_stacks_nothing_large_in_float32(kind, reverse):
    loss = scanned(LAYER_KINDS[kind], reverse)
    plain = scans(jax.grad(loss), PARAMS, X)[0][1]
    ours = stacked_forward(loss)
    assert ("float32", FULL) in plain and ("float32", FULL) not in ours
    assert ("float16", FULL) in ours and bytes_of(ours) < 0.5 * bytes_of(plain)


# Only some layers, because each needs three programs, and the index of a stacked row does not depend on the layer.
FAST_KINDS = {("float16", False, kind) for kind in LAYER_KINDS} | {("float16", True, next(iter(LAYER_KINDS)))}


@pytest.mark.parametrize(
    ("dtype", "reverse", "kind"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each not in FAST_KINDS))
        for each in itertools.product(("float16", "bfloat16"), (False, True), LAYER_KINDS)
    ],
)
def test_gradients_of_a_scan_are_those_of_its_layers(kind, reverse, dtype):
    policy, layer = get_policy(f"mixed_{dtype}"), LAYER_KINDS[kind]
    ours = jax.jit(autocast(jax.grad(scanned(layer, reverse)), policy))(PARAMS, X)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, np.float64), (PARAMS, X))
        want = leaves(jax.jit(jax.grad(scanned(layer, reverse)))(*double))
    theirs = jax.jit(autocast(jax.grad(unrolled(layer, reverse)), policy))(PARAMS, X)
    # One draw: over seeds the ratio scatters from 0.85 to 1.46 around 1.
    assert relative_error(leaves(ours), want) < 1.6 * relative_error(leaves(theirs), want)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_scanned_softmax_and_its_gradient_see_the_same_logits(dtype):
    """As in `test_autocast.py`: if XLA drops a rounding, it must do so in both passes."""

    def loss(params, xs, labels):
        def batch(total, each):
            x, label = each
            logits = (jax.nn.relu(x @ params["in"]) @ params["out"]) * 3
            return total + optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), None

        return lax.scan(batch, 0.0, (xs, labels))[0]

    rng = np.random.default_rng(0)
    params = {"in": rng.standard_normal((16, 64)) / 4, "out": rng.standard_normal((64, 10))}
    params = jax.tree.map(np.float32, params)
    xs = rng.standard_normal((4, 64, 16)).astype(np.float32)
    labels = np.argmax(np.maximum(xs @ params["in"], 0) @ params["out"], -1)
    traced = jax.jit(autocast(jax.grad(loss), f"mixed_{dtype}")).trace(params, xs, labels)
    gradient = np.asarray(traced.lower().compile()(params, xs, labels)["out"])
    assert np.linalg.norm(gradient.sum(axis=1)) < 0.02 * np.linalg.norm(gradient)
    stacked = scans_of(traced.jaxpr)[0][1]
    assert (dtype, (64, 10)) in stacked and ("float32", (64, 10)) not in stacked
    forward, backward = (eqn.params["jaxpr"].eqns for eqn in traced.jaxpr.eqns if eqn.primitive.name == "scan")
    for body in (forward, backward):  # of logits: no compiler may drop it on one side only; their maxima are float32
        rounded = {eqn.invars[0].aval.shape for eqn in body if eqn.primitive.name == "reduce_precision"}
        assert rounded == {(64, 10)}
    assert ("float32", (64, 1)) in stacked


def test_nested_scans_and_scans_in_remat_stack_in_16_bits():
    def inner(h, layer):
        return lax.scan(lambda h, _: (gelu_layer(h, layer), None), h, None, length=2)[0]

    for layer in (jax.checkpoint(inner), jax.checkpoint(inner, prevent_cse=False)):
        for loss in (scanned(layer), jax.checkpoint(scanned(layer))):
            found = scans(autocast(jax.grad(loss), "mixed_float16"), PARAMS, X)
            assert len(found) >= 4
            assert not any(("float32", FULL) in stacked for _, stacked in found)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_products_that_a_checkpoint_saves_are_stacked_in_16_bits(dtype):
    """JAX marks each with a `reduce_precision` to float32's own digits."""
    layer = jax.checkpoint(gelu_layer, policy=jax.checkpoint_policies.dots_saveable)
    plain = scans(jax.grad(scanned(layer)), PARAMS, X)[0][1]
    ours = autocast(jax.grad(scanned(layer)), f"mixed_{dtype}")
    stacked = scans(ours, PARAMS, X)[0][1]
    assert bytes_of(stacked) == bytes_of(plain) / 2
    got, want = (jax.jit(fn)(PARAMS, X) for fn in (ours, autocast(jax.grad(unrolled(gelu_layer)), f"mixed_{dtype}")))
    assert_two_programs_agree(jax.tree.leaves(got), jax.tree.leaves(want), dtype)


@pytest.mark.parametrize("cell", [nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell])
def test_recurrent_cells_stack_less_and_keep_their_state_wide(cell):
    model = nn.RNN(cell(WIDTH))
    x = normal(BATCH, 5, WIDTH)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(jnp.asarray(model.apply(params, x)) ** 2)

    (carry, ours), (plain_carry, plain) = (
        scans(fn, params, x)[0] for fn in (autocast(jax.grad(loss), "mixed_float16"), jax.grad(loss))
    )
    assert bytes_of(ours) < 0.75 * bytes_of(plain)
    assert ("float32", FULL) in plain_carry and ("float32", FULL) in carry


def test_what_others_read_is_stacked_as_it_was():
    """A stacked value keeps its dtype if it is returned or read outside of the backward scan."""

    def layer(h, p):
        h = h + jax.nn.gelu(h @ p["w"])
        return h, jnp.exp(h * 0.1)

    def run(params, x):
        return lax.scan(layer, x @ params["w"][0], params)

    def returned(params, x):
        h, kept = run(params, x)
        return jnp.mean(h**2) + jnp.sum(kept[1]), kept

    ours = autocast(jax.grad(returned, has_aux=True), "mixed_float16")
    (gradient, kept), (want, wanted) = with_and_without(jax.grad(returned, has_aux=True), "mixed_float16", PARAMS, X)
    assert kept.dtype == np.float32 and kept.shape == (LAYERS, *FULL)
    assert relative_error(leaves(gradient), leaves(want)) < 5e-3
    np.testing.assert_allclose(kept, wanted, rtol=1e-2)
    (_, stacked), *_ = scans(ours, PARAMS, X)
    assert stacked.count(("float32", FULL)) == 1


def test_one_scan_may_serve_several():
    """Two scans read what a third one stacks; one of the values is read by both."""

    def stack(w, xs):
        def step(_, x):
            h = x @ w
            return 0.0, (jnp.exp(h), jnp.tanh(h) * 2, h)

        return lax.scan(step, 0.0, xs)[1]

    def read(c, values):
        return c + sum(jnp.sum(jnp.square(v)) for v in values), None

    def f(w, xs):
        exp, tanh, h = stack(w, xs)
        return lax.scan(read, 0.0, (exp,))[0] + lax.scan(read, 0.0, (tanh,))[0] + lax.scan(read, 0.0, (h,))[0]

    w, xs = normal(WIDTH, WIDTH) / 3, normal(LAYERS, *FULL)
    np.testing.assert_allclose(*with_and_without(f, "mixed_float16", w, xs), rtol=2e-2)
    (_, stacked), *_ = scans(autocast(f, "mixed_float16"), w, xs)
    assert stacked == [("float16", FULL)]


def test_what_one_scan_rematerializes_from_stays_stacked_though_another_could_do_without():
    """The second reader could compute `h` from two dots, but the first one computes `exp(h)` from `h`."""

    def f(w, xs):
        def write(_, x):
            dots = [x @ each for each in w]
            h = dots[0] + dots[1]
            return 0.0, (jnp.exp(h), h, dots)

        def first(c, exp):
            return c + jnp.sum(exp), None

        def second(c, values):
            h, dots = values
            return c + jnp.sum(h**2 * dots[0] * dots[1]), None

        exp, *others = lax.scan(write, 0.0, xs)[1]
        return lax.scan(first, 0.0, exp)[0] + lax.scan(second, 0.0, others)[0]

    w, xs = normal(2, WIDTH, WIDTH) / 9, normal(LAYERS, *FULL)
    (_, stacked), *_ = scans(autocast(f, "mixed_float16"), w, xs)
    assert sorted(stacked) == [("float16", FULL)] * 2 + [("float32", FULL)]  # `h`
    np.testing.assert_allclose(*with_and_without(f, "mixed_float16", w, xs), rtol=2e-2)


def test_a_scan_computes_again_what_another_made_with_a_derivative_rule_or_joined():
    def f(w, xs):
        def write(_, x):
            h = x @ w
            return 0.0, (h, jax.nn.relu(h), jnp.concatenate([h, 2 * h]))

        def read(c, values):
            h, positive, joined = values
            return c + jnp.sum((positive * h) @ w) + jnp.sum(joined**2), None

        return lax.scan(read, 0.0, lax.scan(write, 0.0, xs)[1])[0]

    w, xs = normal(WIDTH, WIDTH) / 3, normal(LAYERS, *FULL)
    ours = autocast(f, "mixed_float16")
    (_, stacked), *_ = scans(ours, w, xs)
    assert stacked == [("float16", FULL)]
    got, want = as_written(lambda *args: [jax.value_and_grad(each)(*args) for each in (ours, f)])(w, xs)
    assert relative_error(leaves(got), leaves(want)) < 2e-3


@pytest.mark.parametrize(
    ("gate", "joined"),
    [
        *((gate, False) for gate in (jax.nn.silu, jax.nn.gelu, jax.nn.sigmoid, jnp.tanh)),
        (jax.nn.gelu, True),
        *(pytest.param(gate, True, marks=pytest.mark.slow) for gate in (jax.nn.silu, jax.nn.sigmoid, jnp.tanh)),
    ],
)
def test_a_gated_product_is_computed_again_from_the_results_of_two_dots(gate, joined):
    """The product has as many bytes as either dot, and its float32 operand as both: saving either is not cheaper."""

    def layer(h, p):
        a, b = jnp.split(h @ p["joined"], 2, -1) if joined else (h @ p["w"], h @ p["v"])
        return h + (gate(a) * b) @ p["w"]

    params = PARAMS | {"v": PARAMS["w"][::-1], "joined": normal(LAYERS, WIDTH, 2 * WIDTH) / 3}
    loss = scanned(layer)
    assert stacked_forward(loss, args=(params, X)) == [("float16", FULL)] * 3
    ours, plain = with_and_without(jax.grad(loss), "mixed_float16", params, X)
    assert relative_error(leaves(ours), leaves(plain)) < 3e-3


def test_rows_of_an_argument_cost_nothing_to_read_again():
    """Both scans can read the rows of the argument; stacking a sum with them would cost 8 bytes a number."""

    def loss(params, rows):
        def step(h, layer):
            w, row = layer
            return jnp.exp(-((h @ w + row) ** 2)), None

        return jnp.mean(lax.scan(step, X, (params["w"], rows))[0] ** 2)

    rows = normal(LAYERS, *FULL)
    (_, stacked), *_ = scans(autocast(jax.grad(loss), "mixed_float16"), PARAMS, rows)
    assert stacked and ("float32", FULL) not in stacked


@pytest.mark.parametrize("length", [0, 1, LAYERS])
def test_a_scan_may_hand_on_its_own_rows_constants_and_zeros(length):
    def f(w, xs):
        def write(_, x):
            h = x @ w
            return 0.0, (x, w, jnp.zeros(()), jnp.exp(h), h)

        def read(c, values):
            x, w, zero, exp, h = values
            return c + jnp.sum((exp * h) @ w * x) + zero, None

        return lax.scan(read, 0.0, lax.scan(write, 0.0, xs)[1])[0]

    w, xs = normal(WIDTH, WIDTH) / 3, normal(LAYERS, *FULL)[:length]
    np.testing.assert_allclose(*with_and_without(f, "mixed_float16", w, xs), rtol=2e-2)


@pytest.mark.parametrize("delicate, dtype", [(False, "float16"), (True, "float32")])
def test_a_carry_that_a_scan_stacks_is_rounded_for_a_dot_outside_unless_another_reader_minds(delicate, dtype):
    def f(w, xs):
        stacked = lax.scan(lambda h, x: (jnp.cos(h + x), h), xs[0], xs)[1]
        return jnp.sum(stacked @ w) + jnp.sum(jnp.exp(stacked - 3) if delicate else jnp.sin(stacked))

    jaxpr = jax.make_jaxpr(autocast(f, "mixed_float16"))(normal(WIDTH, WIDTH), normal(LAYERS, *FULL))
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan.outvars[1].aval.dtype.name == dtype


COPIES = {  # what the scans return in each iteration
    "by both": (lambda w, x: ((h := jnp.sin(jnp.cumsum(x, 0))), h @ w), lambda c, w, h: (c, h @ w)),
    "by the second alone": (lambda w, x: (w[:4], x @ w), lambda c, w, h: (c, h @ w)),
    "by both, and carried": (lambda w, x: ((h := jnp.exp(x)), h @ w), lambda c, w, h: (h, h @ w)),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_a_scan_stacks_is_read_in_16_bits(name):
    write, read = COPIES[name]

    def f(w, xs):
        h, products = lax.scan(lambda c, x: (c, write(w, x)), 0.0, xs)[1]
        return products, lax.scan(lambda c, h: read(c, w, h), xs[0], h)

    w, xs = normal(WIDTH, WIDTH) / 3, normal(LAYERS, *FULL)
    got, want = with_and_without(f, "mixed_float16", w, xs)
    assert relative_error(leaves(got), leaves(want)) < 2e-3
    (_, stacked), *_ = scans(autocast(f, "mixed_float16"), w, xs)
    assert ("float32", FULL) not in stacked


@pytest.mark.parametrize("how", ["whole", "rows and whole", "rows twice", "rows and outside", "rows and returned"])
def test_what_is_not_only_read_as_rows_is_stacked_as_it_was(how):
    def f(w, xs):
        def write(_, x):
            h = x @ w
            return 0.0, (jnp.exp(h), h)

        exp, h = lax.scan(write, 0.0, xs)[1]

        def read(c, rows):
            return c + sum(jnp.sum(row) for row in rows) + (jnp.sum(exp) if "whole" in how else 0.0), None

        rows = {"whole": [h], "rows twice": [exp, exp, h]}.get(how, [exp, h])
        total = lax.scan(read, 0.0, rows)[0] + (jnp.sum(exp) if "outside" in how else 0.0)
        return (total, exp) if "returned" in how else total

    w, xs = normal(WIDTH, WIDTH) / 3, normal(LAYERS, *FULL)
    assert ("float32", FULL) in scans(autocast(f, "mixed_float16"), w, xs)[0][1]
    np.testing.assert_allclose(
        *(jax.tree.leaves(each)[0] for each in with_and_without(f, "mixed_float16", w, xs)), rtol=2e-2
    )


@pytest.mark.parametrize("policy", ["mixed_float16", pytest.param("float32", marks=pytest.mark.slow)])
def test_every_order_of_transformations_agrees(policy):
    loss = scanned(softmax_layer)
    once = autocast(jax.grad(loss), policy)
    want = leaves(jax.jit(once)(PARAMS, X))
    orders = [
        autocast(once, policy),
        autocast(jax.jit(jax.grad(loss)), policy),
        jax.grad(autocast(loss, policy)),
        lambda p, x: jax.tree.map(lambda a: a[0], jax.vmap(once, (None, 0))(p, x[None])),
        lambda p, x: jax.tree.map(lambda a: a[0], autocast(jax.vmap(jax.grad(loss), (None, 0)), policy)(p, x[None])),
    ]
    for other in orders:
        assert relative_error(leaves(jax.jit(other)(PARAMS, X)), want) < (1e-2 if policy != "float32" else 1e-6)


def test_float32_changes_nothing_and_residuals_can_stay_wide():
    loss = scanned(gelu_layer)
    assert_only_the_precision_differs(autocast(jax.grad(loss), "float32"), jax.grad(loss), PARAMS, X)
    wide = DEFAULT_RULES.with_residuals("float32")
    stacked = stacked_forward(loss, rules=wide)
    assert ("float32", FULL) in stacked
    plain = scans(jax.grad(loss), PARAMS, X)[0][1]
    assert sorted(shape for _, shape in stacked) == sorted(shape for _, shape in plain)  # nothing is rematerialized


def test_explain_counts_what_is_stacked():
    loss = scanned(gelu_layer)
    kept = [
        dict(explain(jax.grad(loss), "mixed_float16", rules)(PARAMS, X).kept_bytes)
        for rules in (DEFAULT_RULES, DEFAULT_RULES.with_residuals("float32"))
    ]
    stacked = stacked_forward(loss)
    narrow = sum(2 * int(np.prod(shape)) for name, shape in stacked if name == "float16")
    assert kept[0] == {"float16": LAYERS * narrow, "float32": 4 * BATCH * WIDTH}  # and what the loss's gradient reads
    assert kept[0]["float32"] < kept[1]["float32"] / 4


def carried(fn, *args):
    return [carry for carry, _ in scans(autocast(fn, "mixed_float16"), *args)]


def test_a_residual_stream_is_carried_narrow_from_an_embedding_on():
    def loss(params, tokens):
        h = params["embedding"][tokens] + params["position"]
        h, _ = lax.scan(lambda h, p: (norm_layer(h, p), None), h, params["layers"])
        return jnp.mean((h @ params["embedding"].T) ** 2)

    params = {"embedding": normal(32, WIDTH), "position": normal(BATCH, WIDTH), "layers": PARAMS}
    forward, backward = carried(jax.grad(loss), params, np.arange(BATCH))
    assert forward == [("float16", FULL)] and backward[0] == ("float16", FULL)


def test_a_stream_that_starts_with_data_stays_wide_and_so_does_its_gradient():
    def loss(params, x):
        return jnp.mean(lax.scan(lambda h, p: (norm_layer(h, p), None), x, params)[0] ** 2)

    for start in (loss, lambda params, x: loss(params, jnp.sin(x))):
        assert carried(jax.grad(start), PARAMS, X) == [[("float32", FULL)]] * 2

    def two(params, x):
        def layer(streams, p):
            return [norm_layer(h, p) for h in streams], None

        first, second = lax.scan(layer, [x @ params["w"][0], x[: BATCH // 2]], params)[0]
        return jnp.mean(first**2) + jnp.mean(second**2)

    streams = [("float16", FULL), ("float32", (BATCH // 2, WIDTH))]
    forward, backward = carried(jax.grad(two), PARAMS, X)
    assert forward == streams and backward[:2] == streams


def test_weights_that_an_inner_loop_updates_stay_wide():
    """`w - rate * gradient` looks like a residual stream."""

    def inner_loss(w, x):
        return jnp.mean(jax.nn.gelu(x @ w) ** 2)

    def learn(w, xs):
        return lax.scan(lambda w, x: (w - 0.1 * jax.grad(inner_loss)(w, x), None), w * 2, xs)[0]

    def outer(w, xs):
        return inner_loss(learn(w, xs), xs[0])

    xs, w = normal(4, *FULL), normal(WIDTH, WIDTH)
    narrow_gradients = get_policy("mixed_float16").replace(reduce_dtype="float16")
    for fn in (autocast(learn, narrow_gradients), autocast(jax.grad(outer), "mixed_float16")):
        carry, _ = scans(fn, w, xs)[0]
        assert carry == [("float32", (WIDTH, WIDTH))]


def test_the_cost_of_stacking_less_is_linear():
    def calls(count):
        def layer(h, w):
            for _ in range(count):
                h = jnp.tanh(h) * jnp.exp(-h)
            return h @ w, None

        def loss(w, x):
            return jnp.sum(lax.scan(layer, x, w)[0])

        return tracing_calls(lambda: autocast(jax.grad(loss), "mixed_float16"), PARAMS["w"], X)

    few, more, most = map(calls, (8, 16, 24))
    assert most - more <= 1.05 * (more - few)  # quadratic would be 1.67


def test_the_cost_of_carries_is_linear():
    """A loop that accumulates gradients carries one for each parameter."""

    def calls(count):
        def loss(weights, x):
            for w in weights:
                x = jnp.tanh(x @ w) / (1 + x**2)
            return jnp.sum(x)

        def accumulate(weights, xs):
            def step(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

            return lax.scan(step, jax.tree.map(jnp.zeros_like, weights), xs)[0]

        return tracing_calls(lambda: autocast(accumulate, "mixed_float16"), [PARAMS["w"]] * count, normal(2, *FULL))

    few, more, most = map(calls, (8, 16, 24))
    assert most - more <= 1.02 * (more - few)  # a walk through the body for each carry made it 1.09


def test_a_loop_is_not_analyzed_twice_as_often_for_every_loop_around():
    def sums(inner, h, xs, w):
        return h + lax.scan(lambda h, x: (inner(h, x, w)[0], None), jnp.zeros(FULL), xs)[0], None

    def calls(levels):
        def cell(h, x, w):
            return jnp.tanh(h @ w + x), None

        step: Any = cell
        for _ in range(levels):
            step = functools.partial(sums, step)
        xs = normal(*[1] * levels, *FULL)
        return tracing_calls(lambda: autocast(lambda w, x: step(x, xs, w)[0], "mixed_float16"), PARAMS["w"][0], X)

    few, more, most = map(calls, (2, 4, 6))
    assert most - more <= 1.5 * (more - few)


def test_layers_that_are_rematerialized_alike_share_a_program():
    """JAX records the backward pass of such layers as one jaxpr, which several equations run: it is planned once."""

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def loss(weights, x):
        for w in weights:
            x = layer(x, w)
        return jnp.sum(x)

    weights = [PARAMS["w"][0]] * 8

    def programs(fn):
        eqns = jax.make_jaxpr(fn)(weights, X).eqns
        return len({id(eqn.params["jaxpr"]) for eqn in eqns if eqn.primitive.name == "remat2"})

    # The first layer has no gradient of its input, and that of the last one's result is in float32.
    assert (programs(jax.grad(loss)), programs(autocast(jax.grad(loss), "mixed_float16"))) == (2, 3)


def last_carry(fn, *args):
    """The dtypes that the last scan of the program of `fn` carries."""
    scan = [eqn for eqn in jax.make_jaxpr(fn)(*args).eqns if eqn.primitive.name == "scan"][-1]
    consts, carry = scan_counts(scan)
    return [var.aval.dtype.name for var in scan.invars[consts : consts + carry]]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_sums_recorded_in_16_bits_are_carried_in_float32(dtype):
    """With weights stored in 16 bits, JAX records the sum of their gradients in a backward scan in 16 bits."""

    def loss(weights, x):
        def cell(h, row):
            h = jnp.tanh(row @ weights["in"] + h @ weights["h"] + weights["b"])
            return h, h

        states = lax.scan(cell, jnp.zeros(FULL, x.dtype), x)[1]
        return jnp.mean(states.astype(jnp.float32) ** 2) * 1024

    x = np.ones((2048, *FULL), np.float32)
    weights = {"in": np.eye(WIDTH) / 8, "h": np.eye(WIDTH) / 16, "b": np.full(WIDTH, 0.25)}
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(*jax.tree.map(np.float64, (weights, x))))
    args = jax.tree.map(lambda a: np.asarray(a, getattr(jnp, dtype)), (weights, x))
    cast = autocast(jax.grad(loss), dtype)
    assert last_carry(jax.grad(loss), *args) == [dtype] * 4
    assert sorted(last_carry(cast, *args)) == sorted([dtype, "float32", "float32", "float32"])
    got, recorded = with_and_without(jax.grad(loss), dtype, *args)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(got)} == {dtype}
    eps = float(jnp.finfo(dtype).eps)
    assert relative_error(got, exact) < 2 * eps
    assert relative_error(recorded, exact) > 10 * eps  # as recorded, the sums stop growing
    assert last_carry(autocast(cast, dtype), *args) == last_carry(cast, *args)


def test_a_16_bit_carry_that_is_no_sum_stays():
    def average(x):
        return lax.scan(lambda mean, row: (mean * 0.5 + row, None), jnp.zeros(8, jnp.float16), x)[0]

    def difference(x):
        return lax.scan(lambda carry, row: (row - carry, None), jnp.zeros(8, jnp.float16), x)[0]

    def total(x):
        return lax.scan(lambda carry, row: (carry - row, None), jnp.zeros(8, jnp.float16), x, reverse=True)[0]

    x = np.full((3000, 8), -1.0, np.float16)
    assert last_carry(autocast(average, "mixed_float16"), x) == ["float16"]
    assert last_carry(autocast(difference, "mixed_float16"), x) == ["float16"]
    assert last_carry(autocast(total, "mixed_float16"), x) == ["float32"]
    assert [found[0] for found in with_and_without(total, "mixed_float16", x)] == [3000, 2048]
    np.testing.assert_array_equal(*with_and_without(difference, "mixed_float16", x))


ONES = jnp.asarray(np.ones((4096, 4), np.float16))
ZERO = jnp.asarray(np.zeros(4, np.float16))
INDICES = np.array([0, 0, 1, 2])
SUMS_IN_16_BITS = {
    "masked": lambda x: lax.scan(lambda c, row: (jnp.where(row > 0, c + row, c), None), ZERO, x)[0],
    "branch": lambda x: lax.scan(lambda c, row: (lax.cond(row[0] > 0, jnp.add, lambda c, _: c, c, row), None), ZERO, x)[
        0
    ],
    "scatter": lambda x: lax.scan(lambda c, row: (c.at[INDICES].add(row), None), ZERO, x)[0],
    "rearranged": lambda x: lax.scan(lambda c, row: ((c[::1].reshape(2, 2) + row[0]).ravel(), None), ZERO, x)[0],
    "counted": lambda x: lax.fori_loop(0, x.shape[0] + jnp.int32(x[0, 0]) - 1, lambda i, c: c + x[i], ZERO),
    "added in float32": lambda x: lax.scan(
        lambda c, row: ((c.astype(np.float32) + row).astype(np.float16), None), ZERO, x.astype(np.float32)
    )[0],
    "nested": lambda x: lax.scan(
        lambda c, block: lax.scan(lambda c, row: (c + row, None), c, block), ZERO, x.reshape(4096, 1, 4)
    )[0],
    "nested, beside another": lambda x: lax.scan(
        lambda c, block: lax.scan(lambda c, row: ((c[0] + row, c[1] - row), None), c, block),
        (ZERO, ZERO),
        x.reshape(4096, 1, 4),
    )[0][0],
    "rematerialised": lambda x: lax.scan(
        lambda c, row: (jax.checkpoint(lambda c, row: c + jnp.sin(row) / jnp.sin(row))(c, row), None), ZERO, x
    )[0],
}


@pytest.mark.parametrize("name", SUMS_IN_16_BITS)
def test_a_16_bit_sum_may_pass_through_anything_that_hands_it_on(name):
    total = SUMS_IN_16_BITS[name]
    assert sixteen_bit_carries(autocast(total, "mixed_float16"))(ONES) == []
    found, recorded = with_and_without(total, "mixed_float16", ONES)
    assert recorded[0] == 2048
    assert found[0] == (8192 if name == "scatter" else 4096)
    assert found.dtype == jnp.float16


def test_a_16_bit_sum_of_a_loop_that_is_not_counted_stays():
    def total(x):
        return lax.while_loop(lambda c: jnp.max(c) < 3, lambda c: c + x, ZERO)

    assert sixteen_bit_carries(autocast(total, "mixed_float16"))(ONES[0]) == ["while carry 0: float16[4]"]


def test_what_reads_a_running_sum_reads_the_sum():
    def cumulative(x):
        def step(carry, row):
            total, largest = carry
            return (total + row, jnp.maximum(largest, total)), (total * 2, total + row)

        return lax.scan(step, (ZERO, ZERO), x)

    x = np.arange(32, dtype=np.float16).reshape(8, 4)
    jax.tree.map(np.testing.assert_array_equal, *with_and_without(cumulative, "mixed_float16", x))


def narrow_carries(fn, *args, argnums=0):
    return [dtype for dtypes in carried_by(fn, *args, argnums=argnums) for dtype in dtypes if dtype == "float16"]


def carried_by(fn, *args, argnums):
    program = jax.make_jaxpr(autocast(fn, "mixed_float16", argnums=argnums))(*args)
    for eqn in program.eqns:
        if eqn.primitive.name == "scan":
            consts, carry = scan_counts(eqn)
            yield [var.aval.dtype.name for var in eqn.invars[consts : consts + carry]]


def euler(w, x):
    """1,000 small steps from a state that is the result of a dot."""
    return lax.scan(lambda y, _: (y + 1e-3 * jnp.tanh(y @ w["f"]), None), x @ w["in"], None, length=1000)[0]


def forward_algorithm(w, x):
    """A linear-chain CRF's log partition function, started from a row of emissions."""
    emissions = x @ w["in"]
    step = lambda a, row: (jax.nn.logsumexp(a[:, None] + w["f"], axis=0) + row, None)  # noqa: E731
    return jax.nn.logsumexp(lax.scan(step, emissions[0], jnp.tile(emissions, (20, 1)))[0])


def moving_average(w, x):
    rows = jnp.tile(x @ w["in"], (100, 1))
    return lax.scan(lambda mean, row: (mean + 1e-3 * (row - mean), None), (x @ w["in"])[0], rows)[0]


def inner_loop(w, x):
    """Weights that a network computes, and that the program trains by gradient descent."""
    inner = jax.grad(lambda v: jnp.mean((x @ v - 1) ** 2))
    return lax.scan(lambda v, _: (v - 0.01 * inner(v), None), w["in"] @ w["f"], None, length=200)[0]


def meta_learning(w, x):
    """A network's weights, which the program trains by gradient descent; the gradient passes through every update."""

    def inner_loss(v):
        return jnp.mean((jnp.tanh(x @ v["in"]) @ v["f"] - 1) ** 2)

    step = lambda v, _: (jax.tree.map(lambda a, g: a - 2e-3 * g, v, jax.grad(inner_loss)(v)), None)  # noqa: E731
    return 300 * inner_loss(lax.scan(step, w, None, length=400)[0])


@pytest.mark.parametrize("fn", [euler, forward_algorithm, moving_average, inner_loop, meta_learning])
def test_what_a_loop_builds_up_is_carried_in_float32(fn):
    """Also if the carry starts as the result of a dot: a loop of a thousand steps would round it a thousand times."""
    weights = {"in": normal(WIDTH, WIDTH) / 3, "f": normal(WIDTH, WIDTH) / 3}

    def loss(weights, x):
        return jnp.sum(fn(weights, x) ** 2) * 1e-2

    assert narrow_carries(jax.grad(loss), weights, X) == []
    assert relative_error(*with_and_without(jax.grad(loss), "mixed_float16", weights, X)) < 5e-3


def test_a_critics_gradients_accumulate_in_float32_though_its_cotangent_is_a_literal():
    def loss(params, x):
        return jnp.mean(jax.nn.relu(x @ params["a"]) @ params["b"]) * 2.0**15

    def accumulated(params, xs):
        def step(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        return lax.scan(step, jax.tree.map(jnp.zeros_like, params), xs)[0]

    params = {"a": 20 * normal(16, 32), "b": normal(32, 1)}
    xs = normal(4, 512, 16)
    got, want = with_and_without(accumulated, "mixed_float16", params, xs)
    assert float(abs(want["b"]).max()) > 65504
    assert relative_error(got, want) < 2e-3


def test_low_rank_weights_have_float32_gradients_where_they_are_clipped_in_the_program():
    def clipped(params, x):
        gradient = jax.grad(lambda p: jnp.sum((x @ (p["a"] @ p["b"])) ** 2) * 64)(params)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda leaf: leaf / norm, gradient)

    params = {"a": normal(WIDTH, 2), "b": 4 * normal(2, WIDTH)}
    got, want = with_and_without(clipped, "mixed_float16", params, X)
    assert relative_error(got, want) < 2e-3


def test_small_numbers_survive_beside_a_softmax():
    """A float16 value of 1e-5 is subnormal, not zero, also for a normalisation that reads it."""

    def loss(w, x):
        h = x @ w
        return jnp.sum(jax.nn.softmax(h)[:, 0]) + jnp.sum(h * lax.rsqrt(jnp.sum(h * h)))

    w = 1e-5 * normal(WIDTH, WIDTH)
    got, want = with_and_without(jax.grad(loss), "mixed_float16", w, X)
    assert np.isfinite(got).all()
    assert relative_error({"w": got}, {"w": want}) < 5e-2


@pytest.mark.slow
def test_the_paths_of_a_ctc_loss_keep_their_scores():
    """A dot with zeros and ones selects the last of the stacked scores, and exponentials read all of them."""

    def loss_and_gradient(logits, labels):
        zeros = jnp.zeros(logits.shape[:2], logits.dtype), jnp.zeros(labels.shape, logits.dtype)
        return jax.value_and_grad(lambda x: jnp.mean(optax.ctc_loss(x, zeros[0], labels, zeros[1])))(logits)

    logits, labels = normal(4, 20, 12), np.random.default_rng(0).integers(1, 12, (4, 6))
    loss, got = jax.jit(autocast(loss_and_gradient, "mixed_float16"))(logits, labels)
    true_loss, want = jax.jit(loss_and_gradient)(logits, labels)
    np.testing.assert_allclose(loss, true_loss, rtol=1e-3)
    assert relative_error({"logits": got}, {"logits": want}) < 1e-3


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [(DEFAULT_RULES, "float16"), (DEFAULT_RULES.with_scopes({"layer": "float32"}), "float32")],
    ids=["by default", "a scope in float32"],
)
def test_layers_that_a_scope_keeps_in_float32_hand_on_float32(rules, dtype):
    def layers(w, x):
        def step(h, _):
            with jax.named_scope("layer"):
                return jnp.tanh(h @ w["f"]), None

        return lax.scan(step, x @ w["in"], None, length=20)[0]

    weights, x = {"in": normal(32, 32) / 6, "f": normal(32, 32) / 6}, normal(BATCH, 32)
    program = jax.make_jaxpr(autocast(layers, "mixed_float16", rules=rules))(weights, x)
    assert [eqn.outvars[0].aval.dtype for eqn in program.eqns if eqn.primitive.name == "scan"] == [dtype]
