"""`find_overflow` inside `shard_map` and `pmap`: it runs each device by itself up to collectives, and names devices."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_train as jmp
from jmp_train import diagnostics
from jmp_train._diagnostics.interpreter._interpreter import Interpreter
from jmp_train._diagnostics.interpreter._site import Value, Watcher
from jmp_train._jaxpr import trace
from jmp_train.diagnostics import Verdict, find_overflow

AUTO = jax.sharding.AxisType.Auto
LINE = jax.make_mesh((8,), ("data",), axis_types=(AUTO,))
ONE = jax.make_mesh((1,), ("data",), axis_types=(AUTO,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO,) * 2)
W = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
X = np.sin(np.arange(128, dtype=np.float32)).reshape(16, 8)
OVER_DATA = frozenset({"data"})
SHIFT = [(i, (i + 3) % 8) for i in range(8)]


def sharded(mesh, in_specs, out_specs, **options):
    return lambda fn: jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


@sharded(LINE, (P(), P("data")), (P(), P("data"), P(None, "data"), P()))
def all_kinds(w, x):
    h = jnp.tanh(x @ w)
    mean, low, high = lax.pmean(h, "data"), lax.pmin(h, "data"), lax.pmax(h, "data")
    rows = lax.all_gather(h, "data", tiled=True)
    part = lax.psum_scatter(rows, "data", tiled=True)
    swapped = lax.all_to_all(jnp.tile(h, (4, 1)) * lax.axis_index("data"), "data", 0, 1, tiled=True)
    return mean + low + high, part + lax.ppermute(h, "data", SHIFT), swapped, lax.psum(1.0, "data")


@sharded(GRID, (P(), P(("data", "model"))), (P(("model", "data")), P("data", "model"), P("model")), check_vma=False)
def along_two_axes(w, x):
    h = jnp.sin(x @ w)
    rows = lax.all_gather(h, ("model", "data")) * lax.axis_index(("model", "data"))
    both = lax.ppermute(h, ("data", "model"), SHIFT) + lax.axis_index("model")
    scattered = lax.psum_scatter(jnp.tile(h, (8, 1)), ("model", "data"), tiled=True)
    swapped = lax.all_to_all(jnp.tile(h, (4, 1)), ("model", "data"), 0, 0, tiled=True)
    return jnp.sum(rows, 0), both[:, :2], scattered + lax.pmax(swapped[:2], "data")


@sharded(GRID, (P(None, "model"), P("data")), P("data", "model"))
def branches_and_loops(w, x):
    index = lax.axis_index("data")
    y = lax.cond(index > 1, lambda x: jnp.cos(x) @ w, lambda x: x @ w - 1, x)
    y = lax.fori_loop(0, index, lambda _, y: y * 1.5, y)

    def step(carry, row):
        return carry + lax.pmean(row, "data"), carry * row

    total, rows = lax.scan(step, 0 * w[0], y)
    return rows + total


@sharded(ONE, (P(), P("data")), P())
def one_device(w, x):
    return lax.psum(x @ w, "data")


@sharded(GRID, (P(), P("data")), P(), axis_names={"data"})
def one_axis_of_two(w, x):
    return lax.psum(x.T @ x @ w, "data")


@sharded(LINE, (P("data"), P("data")), (P("data"), P("data")))
def keys(keys, x):
    noise = jax.vmap(lambda key: jax.random.uniform(key, (8,)))(keys)
    return jax.vmap(jax.random.fold_in)(keys, jnp.arange(2)), x + noise


def gradient(w, x):
    def loss(w, x):
        return lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "data")

    return jax.jit(jax.grad(sharded(LINE, (P(), P("data")), P())(loss), (0, 1)))(w, x)


PROGRAMS = {
    "every collective": (all_kinds, (W, X)),
    "two axes": (along_two_axes, (W, X)),
    "branches and loops that differ": (branches_and_loops, (np.tile(W, (1, 2)), X)),
    "one axis of two": (one_axis_of_two, (W, X)),
    "one device": (one_device, (W, X)),
    "keys": (keys, (jax.random.split(jax.random.key(0), 16), X)),
    "a gradient": (gradient, (W, X)),
    "pmap": (jax.pmap(lambda x: x / lax.psum(x, "i"), axis_name="i"), (X.reshape(8, 2, 8),)),
}


SLOW = ("two axes", "keys", "a gradient")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in PROGRAMS])
def test_devices_one_by_one_give_the_programs_results(name):
    fn, args = PROGRAMS[name]
    interpreter = Interpreter(trace(fn, *args)[0])
    results = [value.array for value in interpreter.run(list(map(Value, args)), Watcher())]
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    assert not interpreter.not_entered() and len(results) == len(expected)
    for result, right in zip(results, expected, strict=True):
        assert (result.dtype, result.shape) == (right.dtype, right.shape)
        if jnp.issubdtype(right.dtype, jax.dtypes.prng_key):
            result, right = jax.random.key_data(result), jax.random.key_data(right)
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-6)


def test_a_shift_without_wrap_around():
    """A device to which none sends receives zeros."""
    shift = [(i, i + 1) for i in range(7)]

    def fn(x):
        return jnp.log(lax.ppermute(x, "data", shift) + 1)

    mapped = sharded(LINE, P("data"), P("data"))(fn)
    for each, x in ((mapped, X), (jax.pmap(fn, axis_name="data"), X.reshape(8, 2, 8))):
        (result,) = Interpreter(trace(each, x)[0]).run([Value(x)], Watcher())
        np.testing.assert_allclose(result.array, each(x), rtol=1e-6)
    report = find_overflow(mapped)(np.where(np.arange(16)[:, None] == 5, -1, X).astype(np.float32))
    assert (report.primitive, report.device) == ("log", (("data", 3),))
    assert diagnostics.backward_histogram(jax.grad(lambda x: jnp.sum(mapped(x))))(X).values.sum()


def test_ppermute_numbers_devices_as_the_mesh_does():
    @sharded(GRID, P(("data", "model")), P(("data", "model")), check_vma=False)
    def fn(x):
        return lax.ppermute(x, ("model", "data"), SHIFT)

    # A later JAX refuses axes in another order than the mesh's, unless it is told not to.
    allowed = getattr(jax, "raise_on_ppermute_sort_diff", lambda _: contextlib.nullcontext())
    with allowed(False):
        interpreter = Interpreter(trace(fn, X)[0])
        (result,) = interpreter.run([Value(X)], Watcher())
        try:
            expected = jax.jit(fn)(X)
        except RuntimeError as error:  # JAX 0.12 refuses it even so
            assert "same order" in str(error)
            return
        np.testing.assert_array_equal(result.array, expected)


def test_groups_of_devices_that_take_different_branches():
    @sharded(GRID, P("data", "model"), P("data"), check_vma=False)
    def fn(x):
        first = lax.axis_index("data") == 0
        return lax.cond(first, lambda x: lax.pmax(x, "model"), lambda x: lax.psum(2 * x, "model"), x)

    (result,) = Interpreter(trace(fn, X)[0]).run([Value(X)], Watcher())
    np.testing.assert_allclose(result.array, jax.jit(fn)(X), rtol=1e-6)


# Faults


def step_of(loss_fn, tx, mapped):
    grad_fn = jmp.value_and_grad(loss_fn, "mixed_float16", axis_name="data")

    def step(params, opt_state, x):
        loss, grads = grad_fn(params, x, loss_scale=jmp.get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return mapped(step)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_that_one_device_spoils(check_vma):
    def loss_fn(w, x):
        with jax.named_scope("Norm"):
            return jnp.mean(jnp.sqrt(jnp.sum((x @ w) ** 2, axis=1)))

    def mapped(step):
        return jax.jit(sharded(LINE, (P(), P(), P("data")), (P(), P(), P()), check_vma=check_vma)(step))

    tx = jmp.with_loss_scale(optax.sgd(0.1), jmp.DynamicLossScale(2.0), axis_name="data")
    x = X.copy()
    x[11] = 0  # the second row of the sixth device
    report = find_overflow(step_of(loss_fn, tx, mapped))(W, tx.init(W), x)
    assert (report.primitive, report.device, report.verdict) == ("div", (("data", 5),), Verdict.MODEL)
    assert report.text.startswith("return jnp.mean(jnp.sqrt(") and report.scope == "Norm" and report.backward
    assert report.operands[1].shape == (2,) and not report.not_entered
    assert "  in      the backward pass, Norm, device 5 of data\n" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["device"] == {"data": 5}
    assert not find_overflow(step_of(loss_fn, tx, mapped))(W, tx.init(W), X)


def test_a_pmapped_step_with_a_scale_that_is_too_large():
    def loss_fn(w, x):
        return jnp.sum(x @ w)

    tx = jmp.with_loss_scale(optax.sgd(0.1), jmp.StaticLossScale(2.0**17), axis_name="data")

    def mapped(step):
        return jax.pmap(step, axis_name="data", in_axes=(None, None, 0), out_axes=None)

    report = find_overflow(step_of(loss_fn, tx, mapped))(W, tx.init(W), X.reshape(8, 2, 8))
    assert (report.verdict, report.fitting_loss_scale) == (Verdict.LOWER_SCALE, 2.0**15)
    assert report.device == (("data", 0),)


def test_a_sum_over_devices_that_overflows():
    @sharded(GRID, P("data", "model"), P(None, "model"))
    def total(x):
        return lax.psum(x.astype(jnp.float16), "data").astype(jnp.float32)

    x = np.ones((4, 2), np.float32)
    x[:, 1] = 30000
    report = find_overflow(total)(x)
    assert (report.primitive, report.verdict) == ("psum_invariant", Verdict.KEEP_FLOAT32)
    assert report.device == (("data", 0), ("model", 1)) and report.operands[0].shape == (4, 1, 1)
    assert report.results[0].shape == (1, 1)
    assert report.cure == (
        "Reduce in float32: a policy with reduce_dtype=jnp.float32, or .astype(jnp.float32) before the collective."
    )
    assert "from the same operands float32 reaches 1.2e+05" in report.why


def test_a_fault_reaches_other_devices_through_collectives():
    @sharded(LINE, P("data"), P())
    def fn(x):
        moved = lax.ppermute(jnp.log(x), "data", SHIFT)
        return lax.pmax(jnp.where(lax.axis_index("data") == 5, moved, 0.0), "data")

    spoilt = np.ones(8, np.float32)
    spoilt[2] = -1
    report = find_overflow(fn)(spoilt)
    assert (report.primitive, report.device) == ("log", (("data", 2),))
    spoilt[2], spoilt[3] = 1, -1  # what the other devices hold is masked away
    assert not find_overflow(fn)(spoilt)


@pytest.mark.slow
def test_masks_are_not_blamed_on_devices():
    def attention(q, mask):
        scores = jnp.where(mask, q @ q.T, -jnp.inf)
        high = lax.pmax(jnp.max(scores, axis=1, keepdims=True), "data")
        share = jnp.exp(scores - high)
        return share / lax.psum(jnp.sum(share, axis=1, keepdims=True), "data")

    fn = sharded(LINE, (P(), P(None, "data")), P(None, "data"))(attention)
    mask = np.ones((16, 128), bool)
    mask[:, 32:48] = False  # one device is masked altogether
    assert not find_overflow(fn)(X, mask)


def test_a_fault_in_a_loop_on_a_device():
    @sharded(LINE, P("data"), P("data"))
    def fn(x):
        return lax.scan(lambda c, row: (c / row, None), jnp.ones_like(x[0]), x)[0][None]

    x = np.ones((24, 2), np.float32)
    x[13] = 0
    report = find_overflow(fn)(x)
    assert (report.device, report.loops[0][:2]) == ((("data", 4),), ("scan", 1))


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data", "model"}, {"data"}])
def test_shardings_that_are_part_of_types(axes):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    columns = P(None, "model")
    with jax.set_mesh(mesh):
        x = jax.device_put(np.zeros((8, 4), np.float32), jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(np.ones((4, 4), np.float32), jax.NamedSharding(mesh, columns))
        both = "model" in axes
        out = P("data", "model") if both else P("data")
        fn = jax.shard_map(
            lambda w, x: jnp.sin(x @ w), in_specs=(columns if both else P(), P("data")), out_specs=out, axis_names=axes
        )
        report = find_overflow(jax.grad(lambda w: jnp.sqrt(jnp.sum((fn(w, x) + x @ w) ** 2))))(w)
    assert (report.primitive, report.verdict, report.not_entered) == ("div", Verdict.MODEL, ())


def open_sum(w, x):
    """A sum of which each device first holds one term."""
    h = jnp.einsum("bi,ij->bj", x, w, out_sharding=P(None, None, unreduced=OVER_DATA))
    return jax.reshard(h, P(None, None))


def open_sum_of_devices(w, x):
    specs = {"in_specs": (P("data"), P(None, "data")), "out_specs": P(unreduced=OVER_DATA)}
    h = jax.shard_map(lambda w, x: lax.pcast(x @ w, "data", to="unreduced"), **specs)(w, x)
    return jax.reshard(h, P(None, None))


@pytest.mark.parametrize("fn", [open_sum, open_sum_of_devices])
def test_values_whose_sum_over_devices_is_left_open(fn):
    """Each device holds 1e38; only the sum is infinite, and the sum is judged."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.full((8, 3), 1e19), P("data"))
        fine, infinite = (jax.device_put(jnp.full((2, 8), x), P(None, "data")) for x in (1e18, 1e19))
        report = find_overflow(fn)(w, infinite)
        assert not find_overflow(fn)(w, fine) and report.primitive in ("dot_general", "shard_map")
    assert report.results[0].infs == 6


@pytest.mark.parametrize(
    "layer",
    [
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 2)[0],
        lambda w, x: jax.shard_map(jnp.tanh, in_specs=P("data"), out_specs=P("data"))(x) @ w,
    ],
    ids=["scan", "shard_map"],
)
def test_what_is_put_together_is_sharded_as_its_type_says(layer):
    """The sum of a "reduced" parameter's gradient is left open only along an axis that the types of operands name."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w = jax.device_put(np.eye(8, dtype=np.float32), jax.NamedSharding(mesh, P(reduced=OVER_DATA)))
        x = jax.device_put(X, P("data"))
        assert not find_overflow(jax.grad(lambda w: jnp.sum(layer(w, x))))(w)


# Programs that cannot be entered


def mean_loss(w, x):
    return lax.pmean(jnp.sum(x @ w), "data")


@pytest.mark.parametrize(
    "fn, shape",
    [
        (sharded(LINE, (P(), P("data")), P())(mean_loss), (16, 8)),
        (jax.pmap(mean_loss, axis_name="data", in_axes=(None, 0)), (8, 2, 8)),
    ],
    ids=["shard_map", "pmap"],
)
def test_bad_data_is_named_on_the_device_that_has_it(fn, shape):
    x = np.where(np.arange(16)[:, None] == 11, np.nan, X).astype(np.float32).reshape(shape)
    report = find_overflow(fn)(W, x)
    assert (report.verdict, report.primitive, report.device) == (Verdict.INPUT, "dot_general", (("data", 5),))
    assert report.operands[0].nans == 8 and report.text == 'return lax.pmean(jnp.sum(x @ w), "data")'


def test_a_shard_map_inside_of_another_that_the_user_jits():
    """JAX runs it under `jit` only; `autocast` and `find_overflow` evaluate the `jit`'s equations one by one."""

    def inner(x, w):
        return lax.psum(x @ w, "model")

    def outer(x, w):
        return jax.shard_map(inner, in_specs=(P("model"), P()), out_specs=P(), axis_names={"model"})(x, w)

    fn = jax.jit(sharded(GRID, (P("data"), P()), P("data"), axis_names={"data"})(outer))
    x, w = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    np.testing.assert_array_equal(jmp.autocast(fn, "mixed_float16")(x, w), fn(x, w))
    assert not find_overflow(fn)(x, w) and find_overflow(fn)(np.inf * x, w).verdict is Verdict.INPUT


def test_a_shard_map_that_cannot_be_entered():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    @sharded(LINE, P("data"), P("data"), check_vma=False)
    def grouped(x):
        return jnp.log(x) + lax.psum(x, "data", axis_index_groups=groups)

    @sharded(GRID, P("data"), P("data"), axis_names={"data"})
    def nested(x):
        return jax.shard_map(jnp.log, in_specs=P("model"), out_specs=P("model"), axis_names={"model"})(x)

    @sharded(LINE, P("data"), P("data"), check_vma=False)
    def solved(x):
        return lax.custom_linear_solve(lambda y: y * x, x, lambda _, y: jnp.log(y) + lax.psum(y, "data"))

    for fn in (grouped, nested, solved):
        report = find_overflow(fn)(np.arange(8, dtype=np.float32))
        assert (report.primitive, report.verdict, report.not_entered) == ("shard_map", "unknown", ("shard_map",))
        assert report.why == (
            "This shard_map runs as one operation: it holds another one, or a collective that is not known here."
        )
        assert report.cure == (
            "Call find_overflow on jax.vmap(fn, axis_name=...) of the function inside, on what each device gets, "
            "stacked; or on the function inside alone."
        )
        assert str(report).endswith("Not looked into: shard_map")


def test_the_cure_for_what_cannot_be_entered():
    def inside(x):
        return lax.pmean(jnp.log(x), "data")

    report = find_overflow(jax.vmap(inside, axis_name="data"))(np.arange(8, dtype=np.float32))
    assert report.primitive == "log" and report.text == 'return lax.pmean(jnp.log(x), "data")'


def test_devices_meet_in_equal_collectives_of_different_branches():
    """JAX's transpose of a `cond` sums the gradient of replicated values in every branch."""

    @sharded(LINE, (P(), P("data")), P("data"))
    def layer(w, x):
        return lax.cond(lax.axis_index("data") < 5, lambda x: x @ w, lambda x: jnp.tanh(x) @ w, x)

    gradient = jax.grad(lambda w, x: jnp.sum(jnp.log(layer(w, x))))
    (result,) = Interpreter(trace(gradient, W, X)[0]).run([Value(W), Value(X)], Watcher())
    np.testing.assert_allclose(result.array, jax.jit(gradient)(W, X), rtol=1e-5)
    x = np.ones((16, 8), np.float32)
    x[13] = 0
    report = find_overflow(gradient)(np.ones_like(W), x)
    assert (report.primitive, report.verdict) == ("div", Verdict.MODEL)


def test_devices_in_different_collectives_would_hang():
    @sharded(LINE, P("data"), P("data"), check_vma=False)
    def fn(x):
        first = lax.axis_index("data") == 0
        return lax.cond(first, lambda x: lax.psum(x, "data"), lambda x: lax.pmax(x, "data"), x)

    with pytest.raises(ValueError, match=r"that they do not all reach \(pmax, psum\), and would hang"):
        find_overflow(fn)(X)


def test_a_device_is_judged_by_its_own_operands():
    @sharded(LINE, P("data"), P("data"))
    def fn(x):
        half = (x * x).astype(jnp.float16) / (x * x).astype(jnp.float16)
        return half.astype(jnp.float32)

    x = np.ones(8, np.float32)
    x[6] = 1e-6  # its square is zero in float16 only
    report = find_overflow(fn)(x)
    assert (report.primitive, report.device, report.verdict) == ("div", (("data", 6),), Verdict.KEEP_FLOAT32)


def test_devices_that_would_hang():
    @sharded(LINE, P("data"), P("data"), check_vma=False)
    def fn(x):
        return lax.cond(lax.axis_index("data") == 0, lambda x: lax.psum(x, "data"), lambda x: x, x)

    with pytest.raises(ValueError) as error:
        find_overflow(fn)(X)
    assert str(error.value) == (
        "the devices of a shard_map wait for each other in collectives that they do not all reach (psum), and would "
        "hang; every device must take the branches and iterations that lead to one, along all of its axes."
    )


def test_a_shift_along_one_of_two_axes():
    @sharded(GRID, P("data", "model"), P("data", "model"))
    def fn(x):
        return lax.ppermute(x, "model", [(0, 1), (1, 0)])

    (result,) = Interpreter(trace(fn, X)[0]).run([Value(X)], Watcher())
    np.testing.assert_array_equal(result.array, jax.jit(fn)(X))


def test_a_collective_inside_of_what_runs_as_a_whole():
    @sharded(LINE, P("data"), P("data"), check_vma=False)
    def fn(x):
        return jnp.log(lax.custom_linear_solve(lambda y: 0 * lax.psum(y, "data"), x, lambda solve, y: solve(y)))

    report = find_overflow(fn)(X)
    assert (report.primitive, report.verdict) == ("shard_map", Verdict.UNKNOWN)


def test_a_collective_that_is_not_known():
    @sharded(LINE, P("data"), P("data"), check_vma=False)
    def fn(x):
        sizes = jnp.ones(8, jnp.int32)
        return lax.ragged_all_to_all(x[:1], 0 * x[:1], 0 * sizes, sizes, 0 * sizes, sizes, axis_name="data")

    assert Interpreter(trace(fn, X)[0]).not_entered() == ["shard_map"]
