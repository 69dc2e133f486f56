"""Each pass of autocast on a program of a few lines, before and after the pass.

Passes that only record facts (`mark_dead`, `shared_roundings`) are tested by the program that `insert_casts` writes.
"""

import functools
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery_tools import primitives, primitives_of, tracing_calls
from comparisons import assert_two_programs_agree
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pass_tools import after, lines, run, stages

import jmp_train as jmp
import jmp_train._autocast.emit as emit_module
from jmp_train import DEFAULT_RULES, autocast
from jmp_train._autocast.emit import emit
from jmp_train._autocast.format_program import format_program
from jmp_train._autocast.ir import Program, Use
from jmp_train._autocast.passes.rewrites import REWRITES
from jmp_train._autocast.passes.rewrites.dot_as_sums import multiply_and_add
from jmp_train._autocast.passes.rewrites.two_step_sums import first_axes, sum_in_two_steps, sum_over
from jmp_train._autocast.planner import LOWERING, PLANNING
from jmp_train._jaxpr import Node

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"

RNG = np.random.default_rng(0)
W = RNG.normal(size=(8, 4)).astype(np.float32)
X = RNG.normal(size=(2, 8)).astype(np.float32)
LAYERS = (0.3 * RNG.normal(size=(3, 8, 8))).astype(np.float32)


@jax.custom_jvp
def tanh(x):
    """Has its own derivative rule, because JAX 0.12 records the rule of `jnp.tanh` otherwise than JAX 0.11 does."""
    return jnp.tanh(x)


@tanh.defjvp
def _tanh_jvp(primals, tangents):
    y, tangent = jnp.tanh(primals[0]), tangents[0]
    return y, (tangent + tangent * y) * (1 - y)


def squares(w, x):
    return jnp.sum((x @ w) ** 2)


def tanh_between_dots(w, x):
    return jnp.sum(tanh(x @ w) @ w.T)


def softmax_between_dots(w, x):
    h = jnp.exp(x @ w)
    return jnp.sum((h / jnp.sum(h)) @ w.T)


def stack_of_layers(w, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.exp(h @ w), None), x, w)[0])


def recurrent(w, x):
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros(8), x)[0]


def lookup(w, x):
    """A loop in which each token writes its row to a cache and then reads all rows."""

    def step(cache, i):
        cache = lax.dynamic_update_slice(cache, x @ w, (i, 0))
        return cache, jnp.tanh(x @ w) @ cache.T

    return lax.scan(step, jnp.zeros((16, 8)), jnp.arange(2))[1]


def residual_stream(w, x):
    for layer in w:
        x = x + jnp.exp(-((x @ layer) ** 2)) @ layer
        x = x / (1 + jnp.mean(x * x))
    return jnp.sum(x @ w[0])


def test_assign_dtypes_narrows_a_dot_and_runs_a_square_and_a_sum_in_float32():
    assert format_program(after("assign_dtypes", squares, W, X)) == lines("""
        { lambda  ; a:f32[8,4] b:f32[2,8] . let
            c:f16[2,4] = dot_general b:float16 a:float16
            d:f32[2,4] = integer_pow c:float32
            e:f32[] = reduce_sum d:float32
          in (e) }
    """)


def test_control_flow_carries_a_residual_stream_in_the_compute_dtype():
    def layers(w, x):
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w) @ w, None), x @ w[0], w)[0]

    body = lines("""
        { lambda  ; a:f16[2,8] b:f32[8,8] . let
            c:f16[2,8] = dot_general a:float16 b:float16
            d:f16[2,8] = tanh c:float16
            e:f16[2,8] = dot_general d:float16 b:float16
            f:f16[2,8] = add a:float16 e:float16
          in (f) }
    """)
    (scan,) = (e for e in after("assign_dtypes", layers, LAYERS, X).equations if e.name == "scan")
    assert [format_program(inner) for inner in scan.bodies] == [body]


def test_control_flow_carries_in_float32_what_a_loop_updates_by_gradients():
    def descended(w, x):
        return lax.scan(lambda h, w: (h - jax.grad(lambda h: jnp.sum(jnp.tanh(h @ w)))(h), None), x @ w[0], w)[0]

    program = after("assign_dtypes", descended, LAYERS, X)
    (scan,) = (e for e in program.equations if e.name == "scan")
    assert program.precision(scan.results[0]).value == "full"


def test_f32_accumulators_carries_a_sum_that_was_recorded_in_16_bits():
    def sum_of_rows(w, x):
        return lax.scan(lambda total, row: (total + row.astype(jnp.float16), None), jnp.zeros(8, jnp.float16), x)[0]

    (scan,) = (e for e in after("insert_casts", sum_of_rows, W, X).equations if e.name == "scan")
    assert [format_program(inner) for inner in scan.bodies] == [
        lines("""
        { lambda  ; a:f32[8] b:f32[8] . let
            c:f16[8] = convert_element_type b
            d:f32[8] = convert_element_type c
            e:f32[8] = add a d
          in (e) }
        """)
    ]


def test_f32_accumulators_rounds_a_sum_for_what_only_reads_it():
    """Of two sums that a branch is given, it adds to the first, and compares the second."""

    def sums(w, x):
        def step(state, row):
            one, other = state
            one = lax.cond(row[0] > 0, lambda a, b, c: a + c, lambda a, b, c: a + c * (b > 1), one, other, row)
            return (one, other + row), None

        zeros = jnp.zeros(8, jnp.float16)
        return lax.scan(step, (zeros, zeros), x.astype(jnp.float16))[0]

    (scan,) = (e for e in after("insert_casts", sums, W, X).equations if e.name == "scan")
    body = scan.bodies[0]
    (cond,) = (e for e in body.equations if e.name == "cond")
    assert [body.avals[number].dtype.name for number in body.inputs] == ["float32", "float32", "float16"]
    assert [body.avals[number].dtype.name for number in cond.given] == ["float32", "float16", "float16"]


def test_f32_accumulators_keeps_regions_of_low_precision():
    """The pass traces the loop again, and the mark of a region is not among the parameters of its equations."""

    def sum_of_rows(w, x):
        step = lambda c, row: (c + jmp.low_precision(jnp.exp)(row).astype(jnp.float16), None)  # noqa: E731
        return lax.scan(step, jnp.zeros(8, jnp.float16), x)[0]

    (scan,) = (e for e in after("assign_dtypes", sum_of_rows, W, X).equations if e.name == "scan")
    assert [e.reads for e in scan.bodies[0].equations if e.name == "exp"] == [[np.float16]]


def test_save_or_remat_saves_what_a_dot_reads_and_rematerializes_what_is_elementwise_in_it():
    program = after("save_or_remat", jax.grad(tanh_between_dots), W, X)
    made = {number: e.name for e in program.equations for number in e.results}
    read_across = {use.value for e in program.equations for use in e.uses if use.residual}
    assert {made[number] for number in read_across & program.residuals.saved} == {"tanh"}
    assert {made[number] for number in read_across & program.residuals.remat} == {"sub"}  # 1 - tanh


def test_save_for_sums_saves_in_16_bits_what_a_norms_sums_share_of_an_expensive_chain():
    def norm_then_gelu(w, x):
        h = x @ w
        h = (h - jnp.mean(h, -1, keepdims=True)) * w[0] + w[1]
        return jnp.sum(jax.nn.gelu(h) @ w.T)

    w, x = (RNG.normal(size=shape).astype(np.float32) for shape in ((32, 16), (16, 32)))
    program = after("save_for_sums", jax.grad(norm_then_gelu), w, x)
    sums = [e for e in program.equations if e.name == "reduce_sum" and program.place.is_backward(e.node)]
    shared = {use.value for e in sums for use in e.uses} & program.residuals.saved
    (number,) = shared  # the gradient of the GELU: the sum for w[1] reads it, and the product for w[0]
    readers = [use for e in program.equations for use in e.uses if use.value == number]
    assert len(readers) > 1 and all(use.residual for use in readers)
    assert program.precision(number).value == "full"


def test_insert_casts_writes_saved_copies_and_rematerialized_equations():
    assert format_program(after("insert_casts", jax.grad(tanh_between_dots), W, X)) == lines("""
        { lambda  ; a:f32[8,4] b:f32[2,8] . let
            c:f16[2,8] = cast b
            d:f16[8,4] = cast a
            e:f16[2,4] = dot_general c d
            f:f16[2,4] = tanh e
            g:f32[4,8] = transpose a
            h:f32[2,8] = broadcast_in_dim 1.0
            i:f16[2,8] = cast h
            j:f16[2,4] = saved f
            k:f32[8,4] = dot_general i j
            l:f16[4,8] = cast g
            m:f16[2,4] = dot_general i l
            n:f16[2,4] = remat sub 1.0 j
            o:f16[2,4] = mul m n
            p:f16[2,4] = mul o j
            q:f16[2,4] = add_any o p
            r:f32[8,4] = dot_general c q
            s:f32[8,4] = add_any k r
          in (s) }
    """)


def test_insert_casts_gives_what_is_read_in_16_bits_no_derivative_of_a_cast():
    def residual(w, x):
        h = x @ w
        return h + jnp.sin(h) @ w

    assert "copy_of" not in [e.name for e in after("insert_casts", residual, LAYERS[0], X).equations]


def test_insert_casts_rematerializes_long_chains():
    """An unrolled iteration: each step reads the one before, and each rematerialized step the rematerialized one."""

    def iterated(w, x):
        y = functools.reduce(lambda y, _: jnp.sin(y), range(400), x @ w)
        return jnp.sum((y @ w.T) ** 2)

    w, x = RNG.normal(size=(16, 32)).astype(np.float32), RNG.normal(size=(8, 16)).astype(np.float32)
    program = after("insert_casts", jax.grad(iterated), w, x)
    assert Counter(e.name for e in program.equations if e.remat) == {"sin": 399, "cos": 400}
    producers = {number: i for i, e in enumerate(program.equations) for number in e.results}
    assert all(producers[n] < i for i, e in enumerate(program.equations) for n in e.operands if n in producers)


def test_shared_roundings_rounds_what_a_rematerialized_exponential_reads():
    program = after("insert_casts", jax.grad(softmax_between_dots), W, X)
    producers = {number: e for e in program.equations for number in e.results}
    exponentials = [e for e in program.equations if e.name == "exp"]
    assert [e.remat for e in exponentials] == [False, True]
    near, of_sum = (producers[e.operands[0]] for e in exponentials)
    assert near.name == of_sum.name == "rounded"
    saved = producers[producers[of_sum.operands[0]].operands[0]]
    assert saved.name == "saved" and saved.operands == producers[near.operands[0]].operands


@pytest.mark.parametrize("scale", [lambda x: x, lambda x: 2 * x.T.T, lambda x: -x / 2], ids=["1", "2", "-1/2"])
def test_shared_roundings_rounds_what_is_squared_beside_a_product(scale):
    """In `|a|² - 2 a b`, square and product have to read the same `a`, however the product's operand is scaled."""

    def fn(w, x):
        a, b = x @ w, x @ (w + 1)
        return jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1) - scale(a) @ b.T

    program = after("insert_casts", fn, W, X)
    producers = {number: e for e in program.equations for number in e.results}
    squares = [e for e in program.equations if e.name in ("integer_pow", "square")]
    assert [producers[e.operands[0]].name for e in squares] == ["rounded", "rounded"]


def test_shared_roundings_rounds_no_operand_of_an_outer_product():
    def fn(w, x):
        h = x @ w
        return jnp.einsum("bi,bj->bij", h, jnp.sin(h)) + h[:, :, None] * x[:, None, :4]

    assert "rounded" not in [e.name for e in after("insert_casts", fn, W, X).equations]


def test_mark_dead_leaves_out_what_is_only_rematerialized():
    program = after("mark_dead", jax.grad(tanh_between_dots), W, X)
    (distance,) = (e for e in program.equations if e.name == "sub")
    assert distance.dead
    assert not any(use.value in distance.results and not use.residual for e in program.equations for use in e.uses)


def test_widen_runs_a_sum_in_float32_whose_only_reader_does():
    def sum_times_data(w, x, d):
        return (2 * (x @ w) + 1) * d

    def precision_of_sum(program):
        (number,) = (number for e in program.equations if e.name == "add" for number in e.results)
        return program.precision(number).value

    args = W, X, np.ones((2, 4), np.float32)
    assert precision_of_sum(after("assign_dtypes", sum_times_data, *args)) == "low"
    assert precision_of_sum(after("widen", sum_times_data, *args)) == "full"


def test_body_residuals_stacks_a_dot_in_16_bits_rather_than_an_exponential_in_32():
    def stacked(program):
        forward = next(e for e in program.equations if e.name == "scan")
        return [f"{program.avals[number].str_short(short_dtypes=True)}" for number in forward.results[1:]]

    assert stacked(after("insert_casts", jax.grad(stack_of_layers), LAYERS, X)) == ["f16[3,2,8]", "f32[3,2,8]"]
    program = after("body_residuals", jax.grad(stack_of_layers), LAYERS, X)
    assert stacked(program) == ["f16[3,2,8]", "f16[3,2,8]"]
    backward = [e for e in program.equations if e.name == "scan"][-1]
    assert [e.name for e in backward.bodies[0].equations if e.remat] == ["cast", "rounded", "exp"]


def test_body_residuals_reads_a_stack_of_both_scans_once():
    def loss(w, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.exp((h @ w) * w[0]), None), x, w)[0])

    program = after("body_residuals", jax.grad(loss), LAYERS, X)
    backward = [e for e in program.equations if e.name == "scan"][-1]
    assert "mul" in [e.name for e in backward.bodies[0].equations if e.remat]  # which reads the weight's first row
    assert len({*backward.operands}) == len(backward.operands)


def test_body_residuals_hands_on_one_number_a_row_of_a_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = (PartitionSpec(), PartitionSpec("data"))
    rows = jax.shard_map(lambda w, x: jnp.exp(jnp.sin(x @ w)), mesh=mesh, in_specs=specs, out_specs=specs[1])
    program = after("body_residuals", jax.grad(lambda w, x: jnp.sum(jnp.sin(rows(w, x)))), W[:, 0], np.tile(X, (8, 1)))
    forward = next(e for e in program.equations if e.name == "shard_map")
    assert [program.avals[n].str_short(short_dtypes=True) for n in forward.results] == ["f32[16]", "f16[16]"]


def test_body_residuals_keeps_what_has_effects():
    def printing(w, x):
        def layer(h, w):
            jax.debug.print("{}", h[0, 0])
            return jnp.exp(h @ w), None

        return jnp.sum(lax.scan(layer, x, w)[0])

    program = after("body_residuals", jax.grad(printing), LAYERS, X)
    forward = next(e for e in program.equations if e.name == "scan")
    assert any(e.node.eqn.effects for e in forward.bodies[0].equations)


def mean_of_a_grid(x):
    """The mean over both axes of a grid of 10 by 12 rows."""
    return jnp.mean(x.reshape(2, 10, 12, 4), (1, 2))


def joined_gates(w, x):
    """A recurrence whose two gates are the halves of one dot."""

    def step(h, row):
        forget, gate = jnp.split(row @ w, 2, -1)
        return jax.nn.sigmoid(forget) * h + gate, None

    return lax.scan(step, x[:, :4], jnp.stack([x, x]))[0]


def loss_on_devices(w, x):
    """The mean over two devices, differentiated outside of them."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(w, x):
        return lax.pmean(jnp.mean(jax.nn.gelu(x @ w) ** 2), "data")

    return jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())(w, x)


REWRITTEN = {
    "joined_shard_maps": (jax.grad(loss_on_devices), W, X),
    "sums_of_one": (jax.grad(lambda w, x: jnp.sum(jnp.tanh(x + w[None]) @ LAYERS[0])), W[:, 0], X[:1]),
    "relu_mask": (jax.grad(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w.T)), W, X),
    "leaky_relus": (
        jax.grad(lambda w, x: jnp.sum(jax.nn.leaky_relu(scaled(x @ w, 0) + w[0]) @ w)),
        LAYERS[0],
        np.arange(32.0, dtype=np.float32).reshape(4, 8) % 7,
    ),
    "max_pools": (
        jax.grad(lambda w, x: jnp.sum(x * lax.reduce_window(x * w, -np.inf, lax.max, (1, 2), (1, 1), "SAME"))),
        RNG.normal(size=(2, 8)).astype(np.float32),
        X,
    ),
    "one_hot_scatter": (
        jax.grad(lambda w, x: -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(x @ w), np.array([[1], [2]]), 1))),
        W,
        X,
    ),
    "dot_as_sums": (lambda w, x: x[:, :2] @ w[:2] @ w.T @ x.T[:, :2] + x[:, :3] @ x[:, :3].T, W, X),
    "fold_transposes": (jax.grad(squares), W, X),
    "swapped_dots": (
        jax.grad(lambda w, x: jnp.sum(lax.dot(x, w, dimension_numbers=(((1,), (0,)), ((), ()))) ** 2)),
        W.reshape(8, 2, 2),
        X,
    ),
    "hoist_weight_casts": (recurrent, LAYERS[0], X),
    "narrow_caches": (lookup, LAYERS[0], X),
    "narrow_transfers": (lambda w, x: jnp.tanh(x @ jax.device_put(w, jax.memory.Space.Device)), W, X),
    "softmax_gradient": (jax.grad(lambda w, x: jnp.sum(jax.nn.softmax(x @ w) @ w.T)), W, X),
    "sliced_dots": (joined_gates, LAYERS[0], X),
    "chained_casts": (jax.grad(residual_stream), LAYERS, X),
    "window_sums": (
        jax.grad(lambda w, x: jnp.sum(lax.reduce_window(x @ w, 0.0, lax.add, (1, 2), (1, 1), "SAME") ** 2)),
        W,
        X,
    ),
    "wide_biases": (lambda w, x: jnp.tanh(x @ w + w[0]) @ w.T, W, X),
    "two_step_sums": (lambda w, x: mean_of_a_grid(jnp.tanh(x @ w)), W, RNG.normal(size=(240, 8)).astype(np.float32)),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_rewrite_can_be_left_out_and_the_gradients_are_the_same(name):
    fn, *args = REWRITTEN[name]
    others = [rewrite for rewrite in REWRITES if rewrite.name != name]
    assert len(others) == len(REWRITES) - 1
    dtype = "bfloat16" if name == "swapped_dots" else "float16"
    *_, (_, program) = stages(fn, *args, policy=f"mixed_{dtype}")
    *_, (_, without) = stages(fn, *args, policy=f"mixed_{dtype}", rewrites=others)
    assert format_program(program) != format_program(without)  # or the comparison below is of equal programs
    with jax.disable_jit(name == "swapped_dots"):  # without the rewrite, CPUs cannot run the program
        got, want = jax.jit(lambda *args: [emit(each, args) for each in (program, without)])(*args)
    assert_two_programs_agree(got, want, dtype)


def test_every_rewrite_is_left_out_once():
    assert sorted(REWRITTEN) == sorted(rewrite.name for rewrite in REWRITES)


@pytest.mark.parametrize("name", REWRITTEN)
def test_no_rewrite_changes_what_the_user_keeps_as_recorded(name):
    fn, *args = REWRITTEN[name]
    ours = autocast(fn, "mixed_float16", rules=DEFAULT_RULES.with_scopes({".": "float32"}))
    both = jax.jit(ours), jax.jit(fn)
    found, recorded = (primitives_of(each.trace(*args).jaxpr) for each in both)
    assert found <= recorded  # fewer, because dead code is dropped
    got, want = (each(*args) for each in both)
    assert_two_programs_agree(got, want, "float32")


@pytest.mark.parametrize(
    ("fn", "name", "dtype"),
    [
        (lambda w, x: x @ w + w[0], "add", "float32"),
        (lambda w, x: x @ w * w[0, 0], "mul", "float32"),
        (lambda w, x: w[0] - x @ w, "sub", "float32"),
        (lambda w, x: x @ w / w[:1], "div", "float32"),
        (lambda w, x: x @ w * 3, "mul", "float16"),
        (lambda w, x: x @ w + w[:2], "add", "float16"),
        (lambda w, x: x @ w + (x @ w)[:1], "add", "float16"),
        (lambda w, x: jnp.maximum(x @ w, w[0]), "max", "float16"),
    ],
    ids=["bias", "scalar", "difference", "scale", "literal", "residual", "activation", "bound"],
)
def test_wide_biases_are_parameters_that_are_broadcast(fn, name, dtype):
    program = after("rewrite_lowered", lambda w, x: jnp.tanh(fn(w, x)) @ w.T, W, X)
    (equation,) = (e for e in program.equations if e.name == name)
    assert {program.avals[number].dtype.name for number in (*equation.operands, *equation.results)} == {dtype}
    read = {number for e in program.equations for number in e.operands}.union(program.outputs)
    assert all(result in read for e in program.equations if e.name == "cast" for result in e.results)


def test_what_meets_a_wide_bias_is_rounded_in_every_kernel():
    program = after("rewrite_lowered", lambda w, x: jnp.tanh(x @ w + w[0]) @ w.T, W, X)
    producers = program.producers()
    (total,) = (e for e in program.equations if e.name == "add")
    rounded = producers[total.operands[0]]
    assert [rounded.name, producers[rounded.operands[0]].name] == ["rounded", "cast"]
    assert producers[total.operands[1]].name == "broadcast_in_dim"  # of the parameter, in float32
    assert rounded.params["dtype"] == program.low


def test_a_rematerialized_wide_bias_is_cast_where_it_is_added_again():
    def fn(w, x):
        h = x @ w + w[0]
        return h + jnp.sin(h) @ w @ w

    program = after("rewrite_lowered", fn, LAYERS[0], np.tile(X, (8, 1)))
    producers = program.producers()
    (again,) = (e for e in program.equations if e.name == "add" and e.remat)
    assert again.at is not again.node and producers[again.operands[0]].node is again.at


def test_wide_biases_are_left_to_the_backward_pass_where_there_is_one():
    gradient = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w + w[0]) @ w.T))
    others = [rewrite for rewrite in REWRITES if rewrite.name != "wide_biases"]
    with_it, without = (after("rewrite_lowered", gradient, W, X, rewrites=each) for each in (REWRITES, others))
    assert format_program(with_it) == format_program(without)


def relu_mask(program: Program) -> set[str]:
    (mask,) = (e for e in program.equations if e.name == "gt")
    return {e.name for e in program.equations if mask.operands[0] in e.results}


def test_relu_mask_compares_what_the_relu_returns():
    fn, *args = REWRITTEN["relu_mask"]
    assert relu_mask(after("insert_casts", fn, *args)) == {"custom_jvp_call"}
    assert relu_mask(after("insert_casts", fn, *args, rewrites=())) == {"dot_general"}


def scaled(y, axis, mean=True):
    centered = y - y.mean(axis, keepdims=True) if mean else y
    return centered * (lax.rsqrt(jnp.mean(centered**2, axis, keepdims=True) + 1e-6) * jnp.arange(1.0, y.shape[-1] + 1))


@pytest.mark.parametrize(
    ("norm", "source"),
    [
        (lambda y: scaled(y, -1), "mul"),
        (lambda y: scaled(y, -1) + 1, "add"),
        (lambda y: scaled(y, -1, mean=False), "mul"),
        (lambda y: y / (1e-6 + jnp.linalg.norm(y, axis=-1, keepdims=True)), "div"),
        (lambda y: scaled(y, 0), "custom_jvp_call"),
        (lambda y: y * jnp.mean(y**2), "custom_jvp_call"),
        (lambda y: scaled(y, -1) + y, "custom_jvp_call"),
        (lambda y: jnp.sin(scaled(y, -1)), "custom_jvp_call"),
        (lambda y: y[:, :1] * y.mean(-1, keepdims=True), "custom_jvp_call"),
    ],
    ids=["LayerNorm", "bias", "RMSNorm", "unit", "columns", "whole", "residual", "function of it", "rows of one"],
)
def test_the_mask_behind_a_norm_over_rows_is_of_what_the_relu_is_given(norm, source):
    gradient = jax.grad(lambda w, x: jnp.sum((y := jax.nn.relu(norm(x @ w))) @ w[: y.shape[1]]))
    assert relu_mask(after("insert_casts", gradient, W, X)) == {source}


@pytest.mark.parametrize(
    ("parts", "saved"),
    [
        (lambda y: jnp.split(y, 2, -1), 1),
        (lambda y: (y[:, :4], y[:, 4:]), 1),
        (lambda y: jnp.split(y + 1, 2, -1), 1),
        (lambda y: jnp.split(jnp.tanh(y), 2, -1), 0),
        (lambda y: jnp.split(jnp.abs(y), 2, -1), 0),
        (lambda y: (y[:, :4], y[:, 4:] + jnp.sum(y)), 0),
    ],
    ids=["split", "slices", "behind a bias", "of a function", "of magnitudes", "and whole"],
)
def test_sliced_dots_are_saved_where_only_parts_are_read(parts, saved):
    def step(h, row, w):
        forget, gate = parts(row @ w)
        return forget * h + gate, None

    def names(program):
        (body,) = next(e for e in program.equations if e.name == "scan").bodies
        return Counter(e.name for e in body.equations)

    def in_a_scan(w, x):
        return lax.scan(lambda h, row: step(h, row, w), x[:, :4], jnp.stack([x, x]))[0]

    assert names(after("rewrite_lowered", in_a_scan, LAYERS[0], X))["saved"] == saved
    alone = after("rewrite_lowered", lambda w, x: step(x[:, :4], x, w)[0], LAYERS[0], X)
    assert "saved" not in [e.name for e in alone.equations]  # one kernel reads it, and XLA may fuse it with the dot


def test_fold_transposes_swaps_the_operands_of_a_gradients_dot():
    fn, *args = REWRITTEN["fold_transposes"]
    assert Counter(e.name for e in after("insert_casts", fn, *args, rewrites=()).equations)["transpose"] == 1
    assert Counter(e.name for e in after("insert_casts", fn, *args).equations)["transpose"] == 0


@pytest.mark.parametrize(
    "rules",
    [
        DEFAULT_RULES.replace({"transpose": "high"}),
        DEFAULT_RULES.replace({"transpose": "recorded"}),
        DEFAULT_RULES.with_scopes({"moved": "float32"}),
    ],
    ids=["an edit", "as recorded", "a scope"],
)
def test_fold_transposes_leaves_a_transpose_in_another_dtype_than_its_dots(rules):
    def fn(w, x):
        y = x @ w
        with jax.named_scope("moved"):
            y = y.T
        return jnp.tanh(y) * 2.0

    program = after("insert_casts", fn, W, X, rules=rules)
    (transpose,) = (e for e in program.equations if e.name == "transpose")
    assert program.avals[transpose.results[0]].dtype == np.float32
    assert run(fn, W, X, rules=rules)[0].shape == (4, 2)


def test_hoist_weight_casts_leaves_no_cast_of_the_weight_in_the_loop():
    fn, *args = REWRITTEN["hoist_weight_casts"]
    (scan,) = (e for e in after("rewrite_lowered", fn, *args).equations if e.name == "scan")
    weight, copy, *_ = scan.bodies[0].inputs
    assert [e.name for e in scan.bodies[0].equations if weight in e.operands] == ["copy_of"]
    assert scan.bodies[0].avals[copy].dtype == np.float16


def test_narrow_caches_writes_16_bit_numbers_without_casts():
    fn, *args = REWRITTEN["narrow_caches"]
    (scan,) = (e for e in after("rewrite_lowered", fn, *args).equations if e.name == "scan")
    body = scan.bodies[0]
    (update,) = (e for e in body.equations if e.name == "dynamic_update_slice")
    assert body.producers()[update.operands[1]].name == "dot_general"


def sums_of_windows(window, strides, padding, **params):
    dims = len(window)
    return functools.partial(
        lax.reduce_window_sum_p.bind,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
        base_dilation=params.get("base_dilation", (1,) * dims),
        window_dilation=params.get("window_dilation", (1,) * dims),
    )


# Each value: a window, its strides, the padding, and the shape of the operand.
WINDOWS = {
    "disjoint": ((2, 2), (2, 2), ((0, 0), (0, 0)), (6, 8)),
    "overlapping": ((3, 3), (2, 2), ((0, 1), (1, 1)), (6, 8)),
    "strides beyond the window": ((2, 1), (3, 2), ((0, 0), (0, 0)), (7, 8)),
    "a last part that no window has": ((2, 2), (2, 2), ((0, 0), (0, 0)), (7, 9)),
    "padded further than a window": ((2, 2), (1, 1), ((3, 0), (0, 4)), (3, 3)),
    "cut by the padding": ((2, 2), (1, 1), ((-1, 0), (0, -2)), (6, 8)),
    "sixteen places": ((4, 4), (1, 1), ((1, 2), (2, 1)), (6, 8)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_window_sums_adds_one_slice_a_place(name):
    window, strides, padding, shape = WINDOWS[name]
    x = RNG.normal(size=shape).astype(np.float32)
    fn = sums_of_windows(window, strides, padding)
    ours = jax.jit(lambda x: run(fn, x)[0])
    names = Counter(eqn.primitive.name for eqn in ours.trace(x).jaxpr.eqns)
    assert names["reduce_window_sum"] == 0 and names["pad"] == names["add"] + 1 == np.prod(window)
    padded = np.zeros([n + max(low, 0) + max(high, 0) for n, (low, high) in zip(shape, padding, strict=True)])
    padded[tuple(slice(max(low, 0), max(low, 0) + n) for n, (low, _) in zip(shape, padding, strict=True))] = x
    cut = [slice(max(-low, 0), n - max(-high, 0)) for n, (low, high) in zip(padded.shape, padding, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(padded[tuple(cut)], window)[:: strides[0], :: strides[1]]
    np.testing.assert_allclose(ours(x), windows.sum((-2, -1)), rtol=1e-6, atol=1e-6)


# Each value: a window that spans some axes of the operand entirely, and the shape of the operand.
ONE_WINDOW = {
    "an image": ((1, 4, 5, 1), (2, 4, 5, 3)),
    "an image of many rows": ((1, 10, 20, 1), (2, 10, 20, 3)),
    "one axis": ((1, 40), (3, 40)),
}


@pytest.mark.parametrize("name", ONE_WINDOW)
def test_the_sum_of_one_window_is_a_sum(name):
    window, shape = ONE_WINDOW[name]
    x = RNG.normal(size=shape).astype(np.float32)
    fn = sums_of_windows(window, window, ((0, 0),) * len(window))
    ours = jax.jit(lambda x: run(fn, x)[0])
    names = {name for name, _ in primitives_of(ours.trace(x).jaxpr)}
    assert "reduce_sum" in names and "reduce_window_sum" not in names
    axes = tuple(axis for axis, size in enumerate(window) if size > 1)
    want = x.astype(np.float64).sum(axes, keepdims=True)
    np.testing.assert_allclose(ours(x), want, rtol=1e-5, atol=1e-5)


# Each value: the shape of an operand, the axes summed over, and those among them that are summed over first.
FIRST_AXES = {
    "of images": ((8, 28, 28, 64), (1, 2), [2]),
    "of images, the longer axis": ((32, 56, 14, 64), (1, 2), [1]),
    "of a batch, two axes at once": ((32, 7, 7, 512), (0, 1, 2), [1, 2]),
    "of one row": ((8, 1, 784, 64), (1, 2), []),
    "of a batch of few places": ((32, 4, 4, 256), (0, 1, 2), [1, 2]),
    "of a batch of few places and more": ((32, 2, 9, 12, 64), (0, 1, 2, 3), [1, 3]),
    "of a batch of tokens": ((32, 128, 768), (0, 1), [1]),
    "whose results are too few for the longest axis": ((8, 196, 4, 64), (1, 2), [2]),
    "whose results are too few but for the batch": ((8, 128, 768), (0, 1), []),
    "too few for any axis": ((40, 40, 8), (0, 1), []),
    "one axis": ((8, 784, 64), (1,), []),
    "the last axis": ((8, 28, 28, 64), (1, 2, 3), []),
    "few rows": ((8, 9, 9, 64), (1, 2), []),
    "many rows": ((32, 16, 16, 64), (0, 1, 2), []),
    "many results": ((256, 28, 28, 64), (1, 2), []),
    "a hundred rows": ((8, 10, 10, 64), (1, 2), [2]),
    "a row less": ((8, 9, 11, 64), (1, 2), []),
    "2**13 rows": ((2, 64, 128, 64), (1, 2), []),
    "some rows less": ((2, 63, 130, 64), (1, 2), [1]),
    "64 rows in each axis, times 2**14": ((2, 64, 64, 128), (1, 2), [2]),
    "32 rows in an axis": ((8, 40, 32, 4), (1, 2), [2]),
    "33 rows in each axis, or more": ((8, 40, 33, 4), (1, 2), []),
    "a symbolic batch": ((*export.symbolic_shape("b"), 28, 28, 64), (1, 2), []),
}


@pytest.mark.parametrize("name", FIRST_AXES)
def test_which_axes_are_summed_over_first(name):
    shape, axes, expected = FIRST_AXES[name]
    assert first_axes(shape, axes) == expected


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 20, 10, 3), (1, 2)), ((2, 10, 20, 3), (2, 1)), ((5, 5, 5, 3), (0, 1, 2)), ((9, 6, 3, 4), (2, 0, 1))],
)
def test_a_sum_in_two_steps_is_the_sum(shape, axes):
    x = RNG.normal(size=shape).astype(np.float32)
    names = {name for name, _ in primitives(lambda x: sum_over(x, axes), x)}
    assert names == {"reduce_sum", "optimization_barrier"}
    np.testing.assert_allclose(sum_over(x, axes), x.astype(np.float64).sum(axes), rtol=1e-5, atol=1e-5)


def grid(x):
    return x.reshape(2, 10, 12, 4)


def sliced(y, start):
    return lax.dynamic_slice(y, (*np.zeros(3, np.uint32), start), (2, 10, 12, 3))


# Each value: what is summed of `y`, the result of a dot, and whether the sum is taken in two steps.
SUMMED = {
    "as it is": (lambda y: y, False),
    "one operation": (lambda y: y * 2, False),
    "two operations": (lambda y: y * 2 + 1, True),
    "an expensive one": (jnp.tanh, True),
    "one operation, moved": (lambda y: (y * 2)[::-1], False),
    "two operations, moved": (lambda y: (y * 2 + 1)[::-1], True),
    "two operations on what is broadcast": (lambda y: y * jnp.tanh(y[:1, :1, :1] * 2 + 1), False),
    "one operation on what is cast": (lambda y: y.astype(jnp.bfloat16).astype(jnp.float32) * 2, False),
    "one operation on what is cast and moved": (lambda y: y.astype(jnp.bfloat16)[::-1].astype(jnp.float32) * 2, False),
    "two operations behind a barrier": (lambda y: lax.optimization_barrier(y * 2 + 1), False),
    "two operations, then broadcast": (lambda y: y * jnp.broadcast_to(jnp.tanh(y[:1]), y.shape), False),
    "what a sum computed": (lambda y: y + jnp.cumsum(y * 2 + 1, 1), False),
    "two operations, sliced where one says": (
        lambda y: sliced(y * 2 + 1, lax.min(lax.argmax(y[0, 0, 0], 0, np.uint32), np.uint32(1))),
        True,
    ),
}


@pytest.mark.parametrize("name", SUMMED)
def test_what_takes_several_operations_is_summed_in_two_steps(name):
    fn, expected = SUMMED[name]
    program = after(
        "mark_dead", lambda w, x: jnp.sum(fn(grid(x @ w)), (1, 2)), W, RNG.normal(size=(240, 8)).astype(np.float32)
    )
    (total,) = (equation for equation in program.equations if equation.node.name == "reduce_sum")
    assert (total.rewrite is sum_in_two_steps) == expected


def test_a_sum_over_one_axis_is_left_as_it_is():
    def fn(w, x):
        y = jnp.tanh(grid(x @ w))
        return jnp.sum(y, 1), jnp.sum(y, (1, 2))

    program = after("mark_dead", fn, W, RNG.normal(size=(240, 8)).astype(np.float32))
    sums = [equation.rewrite for equation in program.equations if equation.node.name == "reduce_sum"]
    assert sums == [None, sum_in_two_steps]


# Each value: what is summed, of a square root `y` that a dot reads in 16 bits, and whether in two steps.
BESIDE_A_DOT = {
    "the root": (lambda y, z: y, False),  # the sum reads the copy
    "one operation on it": (lambda y, z: y * 2, True),  # reads the root
    "one operation on its copy": (lambda y, z: y * z, False),
    "one operation on its rematerialized argument": (lambda y, z: (y - 1) * z, True),
}


@pytest.mark.parametrize("name", BESIDE_A_DOT)
def test_what_is_saved_takes_no_operations(name):
    summed, expected = BESIDE_A_DOT[name]

    def fn(w, x):
        y = jnp.sqrt(1 + (x @ w) ** 2).reshape(2, 10, 12, 32)
        z = y @ w.T
        return jnp.sum(summed(y, z), (1, 2)), z

    w, x = (RNG.normal(size=(rows, 32)).astype(np.float32) for rows in (32, 240))
    program = after("mark_dead", fn, w, x)
    (total,) = (equation for equation in program.equations if equation.node.name == "reduce_sum")
    assert (total.rewrite is sum_in_two_steps) == expected


def test_a_sum_that_says_how_it_is_sharded_is_left_as_it_is():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec(None, None))

    def fn(w, x):
        return lax.reduce_sum(jnp.tanh(grid(x @ w)), (1, 2), out_sharding=sharding)

    with jax.set_mesh(mesh):
        program = after("mark_dead", fn, W, RNG.normal(size=(240, 8)).astype(np.float32))
    (total,) = (equation for equation in program.equations if equation.node.name == "reduce_sum")
    assert total.rewrite is None


KERNELS = {
    "a window behind the operand": (sums_of_windows((1, 40), (1, 1), ((0, 0), (0, 1))), (3, 40)),
    "many places": (sums_of_windows((17,), (1,), ((0, 0),)), (32,)),
    "elements apart": (sums_of_windows((2,), (1,), ((0, 0),), window_dilation=(2,)), (8,)),
    "zeros between the operand's": (sums_of_windows((2,), (1,), ((0, 0),), base_dilation=(2,)), (8,)),
    "a window beside the operand": (sums_of_windows((1, 40), (1, 1), ((0, 0), (1, 0))), (3, 40)),
    "zeros between as many as a window has": (sums_of_windows((40,), (1,), ((0, 0),), base_dilation=(2,)), (40,)),
    "every second window": (sums_of_windows((1, 40), (2, 40), ((0, 0), (0, 0))), (3, 40)),
    "no window": (sums_of_windows((4, 1), (1, 1), ((0, 0), (0, 0))), (3, 2)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_window_sums_leaves_other_reductions_as_they_are(name):
    fn, shape = KERNELS[name]
    x = RNG.normal(size=shape).astype(np.float32)
    ours = jax.jit(lambda x: run(fn, x)[0])
    assert [eqn.primitive.name for eqn in ours.trace(x).jaxpr.eqns].count("reduce_window_sum") == 1
    np.testing.assert_array_equal(ours(x), fn(x))


@pytest.mark.parametrize("window, is_kept", [((1, 2), False), ((2, 2), True)])
def test_windows_are_not_written_out_where_there_may_be_none(window, is_kept):
    x = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 8"), np.float32)
    fn = sums_of_windows(window, (1, 1), ((0, 0), (0, 0)))
    names = {name for name, _ in primitives(lambda x: run(fn, x), x)}
    assert ("reduce_window_sum" in names) == is_kept


@pytest.mark.parametrize("axis, is_kept", [(0, False), (1, True)])
def test_windows_are_written_out_where_devices_split_another_axis(axis, is_kept):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    spec = PartitionSpec(*[None] * axis, "data")
    x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, spec))
    fn = sums_of_windows((1, 3), (1, 2), ((0, 0), (1, 0)))
    with jax.set_mesh(mesh):
        names = {name for name, _ in primitives(lambda x: run(fn, x), x)}
    assert ("reduce_window_sum" in names) == is_kept


@pytest.mark.parametrize("fn", [jax.grad(tanh_between_dots), jax.grad(softmax_between_dots), jax.grad(squares)])
def test_after_insert_casts_no_use_names_a_dtype_and_every_value_has_the_one_it_says(fn):
    program = after("insert_casts", fn, W, X)
    assert all(use == Use(use.value) for e in program.equations for use in e.uses)
    *_, (_, last) = stages(fn, W, X)
    ran = [aval.dtype for aval in jax.eval_shape(lambda *args: run(fn, *args), W, X)]
    assert ran == [last.avals[number].dtype for number in last.outputs]


def rematerialized(w, x):
    h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w) @ w.T)(x @ w @ w.T, w)
    return jnp.sum(jnp.exp(h) * w[jnp.argmax(h, 1), 0][:, None])


TYPED = {
    "two layers": (jax.grad(tanh_between_dots), W, X),
    "a softmax": (jax.grad(softmax_between_dots), W, X),
    "layers in a scan": (jax.grad(stack_of_layers), LAYERS, X),
    "a recurrence": (recurrent, LAYERS[0], X),
    "a residual stream": (jax.grad(residual_stream), LAYERS, X),
    "a rematerialized call": (jax.grad(rematerialized), W, X),
    "a branch": (lambda w, x: lax.cond(x[0, 0] > 0, lambda h: h @ w.T, lambda h: jnp.exp(h @ w.T), x @ w), W, X),
    "integers and what is cast by hand": (lambda w, n: jnp.exp((n @ w).astype(jnp.bfloat16)), W, X.astype(np.int32)),
}


@pytest.mark.parametrize("rewrites", [REWRITES, ()], ids=["rewritten", "as planned"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("name", TYPED)
def test_every_value_of_the_last_program_has_the_dtype_that_it_says(name, policy, rewrites, monkeypatch):
    fn, *args = TYPED[name]
    *_, (_, last) = stages(fn, *args, policy=policy, rewrites=rewrites)
    avals, pending, checked = {}, [last], []
    while pending:
        program = pending.pop()
        avals.update((id(equation), program.avals) for equation in program.equations)
        pending.extend(body for equation in program.equations for body in equation.bodies)
    run_equation = emit_module._run

    def run_and_check(equation, operands, traced):
        results = run_equation(equation, operands, traced)
        values = zip((*equation.operands, *equation.results), (*operands, *results), strict=True)
        for number, value in values:
            dtype = avals[id(equation)][number].dtype
            assert getattr(value, "dtype", dtype) == dtype, equation.name  # literals are Python numbers
        checked.append(equation)
        return results

    monkeypatch.setattr(emit_module, "_run", run_and_check)
    jax.eval_shape(lambda *args: emit_module.emit(last, args), *args)
    assert {id(equation) for equation in checked} == avals.keys()


def test_an_equation_without_results_is_printed_with_an_underscore():
    printed = format_program(after("insert_casts", lambda x: jax.debug.print("{}", x), X))
    assert re.search(r"^    _ = debug_\w+ a$", printed, re.MULTILINE)


def test_the_passes_are_those_of_the_planner_in_its_order():
    names = [name for name, _ in stages(squares, W, X)]
    assert names == [run.__name__ for run in (*PLANNING, *LOWERING)]


def two_layers(params, x):
    w, v = params
    return jnp.sum(tanh(tanh(x @ w) @ v) ** 2)


def test_the_architecture_page_shows_what_the_passes_print():
    shapes = [(16, 32), (32, 16), (64, 16)]
    w, v, x = (np.ones(shape, np.float32) for shape in shapes)
    shown = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    printed = {name: format_program(program).splitlines() for name, program in stages(jax.grad(two_layers), (w, v), x)}
    assert [name for name, _ in shown] == [name for name in printed if name in dict(shown)]
    for name, text in shown:
        assert set(text.splitlines()) <= set(printed[name]), name
    assert [len(text.splitlines()) for _, text in shown] == [22, 3, 3, 2, 3, 24]


def test_the_architecture_page_lists_the_passes():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == ["f32_accumulators", *(run.__name__ for run in (*PLANNING, *LOWERING))]


# Each value: how the axes of a batched product `[batch, rows, columns]` are moved, and how many transposes are left.
BATCHED = {
    "rows and columns": ([(0, 2, 1)], 0),
    "rows and columns, in two steps": ([(1, 0, 2), (1, 2, 0)], 0),
    "back again": ([(1, 2, 0), (2, 0, 1)], 0),
    "the batch as well": ([(2, 0, 1)], 1),
    "the batch as well, in two steps": ([(1, 0, 2), (2, 0, 1)], 2),
}


@pytest.mark.parametrize("name", BATCHED)
def test_fold_transposes_of_a_batched_product(name):
    moves, left = BATCHED[name]

    def fn(w, x):
        y = lax.dot_general(x, w, (((2,), (1,)), ((0,), (2,))))
        for axes in moves:
            y = y.transpose(axes)
        return jnp.tanh(y)

    w, x = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 8, 3), (3, 2, 8)))
    names = Counter(e.name for e in after("insert_casts", fn, w, x).equations)
    assert names["transpose"] == left
    got, want = jax.jit(lambda *args: (run(fn, *args), run(fn, *args, rewrites=())))(w, x)
    assert_two_programs_agree(got, want, "float16")


@pytest.mark.parametrize(
    "spec",
    ["nd,dhk->nhk", "nhk,ohk->no", "nd,dhk->hnk", "dn,hdk->nhk", "ecgf,hfcg->geh", "ech,geh->cg", "dch,fcd->hf"],
)
def test_weights_of_any_axes_train_in_bfloat16_on_a_cpu(spec):
    """Gradients of weights are bfloat16 products with a float32 result; for some layouts XLA has no kernel on CPUs."""
    left, right = spec.split("->")[0].split(",")
    sizes = dict(zip(sorted({*left, *right}), (3, 4, 5, 2, 6), strict=False))
    x, w = (RNG.normal(size=[sizes[axis] for axis in axes]).astype(np.float32) for axes in (left, right))
    gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(jnp.einsum(spec, x, w)) ** 2))
    got, want = (jax.jit(fn)(w, x) for fn in (autocast(gradient, "mixed_bfloat16"), gradient))
    assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("spec", "options", "swapped"),
    [
        ("nd,dhk->nhk", {}, 1),
        ("nd,dhk->nhk", {"policy": "mixed_float16"}, 0),
        ("nhk,ehk->ne", {}, 1),
        ("nhk,ehk->ne", {"rules": DEFAULT_RULES.replace({"dot_general": "high"})}, 0),
        ("dn,dhk->nhk", {}, 0),  # the forward pass has that layout, but a 16-bit result
        ("nde,dehk->nhk", {}, 0),
        ("nd,dh->nh", {}, 0),
    ],
)
def test_swapped_dots_are_those_that_no_cpu_runs(spec, options, swapped):
    sizes = dict(zip("ndehk", (32, 24, 20, 18, 16), strict=True))
    x, w = (np.ones([sizes[axis] for axis in axes], np.float32) for axes in spec.split("->")[0].split(","))
    gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(jnp.einsum(spec, x, w)) ** 2))
    program = after("rewrite_planned", gradient, w, x, **{"policy": "mixed_bfloat16", **options})
    assert [e.node.name for e in program.equations if e.rewrite].count("dot_general") == swapped


def test_swapped_dots_of_a_sharded_weight():
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,))
    split = NamedSharding(mesh, PartitionSpec(None, "heads"))
    w, x = RNG.normal(size=(8, 2, 3)).astype(np.float32), X
    gradient = jax.grad(lambda w, x: jnp.mean(jnp.tanh(jnp.einsum("nd,dhk->nhk", x, w)) ** 2))
    want = gradient(w, x)
    with jax.set_mesh(mesh):
        got = jax.jit(autocast(gradient, "mixed_bfloat16"))(jax.device_put(w, split), x)
    assert got.sharding.is_equivalent_to(split, 3)
    assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)


def grouped_scores(keys, queries):
    """The scores of two query heads for each key head, `[batch, key head, query head, query, key]`."""
    return jnp.tanh(jnp.einsum("bqgrd,bkgd->bgrqk", queries, keys))


def grouped_scores_in_two_steps(keys, queries):
    scores = lax.dot_general(keys, queries, (((3,), (4,)), ((0, 2), (0, 2))))
    return jnp.tanh(scores.transpose(0, 1, 4, 3, 2).transpose(0, 1, 3, 2, 4))


KEYS, QUERIES = (RNG.normal(size=shape).astype(np.float32) for shape in ((4, 6, 2, 8), (4, 5, 2, 3, 8)))


@pytest.mark.parametrize("scores, left", [(grouped_scores, 1), (grouped_scores_in_two_steps, 0)])
def test_fold_transposes_leaves_the_last_axis_of_grouped_scores_where_it_is(scores, left):
    program = after("insert_casts", scores, KEYS, QUERIES)
    moves = [e.params["permutation"] for e in program.equations if e.name == "transpose"]
    (dot,) = (e for e in program.equations if e.name == "dot_general")
    assert program.avals[dot.results[0]].shape == (4, 2, 5, 3, 6)
    assert len(moves) == left and all(axes[-1] == 4 for axes in moves)
    got, want = jax.jit(lambda *args: (run(scores, *args), run(scores, *args, rewrites=())))(KEYS, QUERIES)
    assert_two_programs_agree(got, want, "float16")


def test_fold_transposes_leaves_a_transpose_that_keeps_the_last_axis():
    """Swapping the operands of the dot would move the last axis."""

    def fn(w, x):
        return jnp.tanh(lax.dot_general(x, w, (((2,), (1,)), ((), ()))).transpose(1, 0, 2))

    w, x = KEYS[0, :, 0], QUERIES[0, :, 0]
    (before, now) = (after("insert_casts", fn, w, x, **o).equations for o in ({"rewrites": ()}, {}))
    assert [(e.name, e.operands) for e in before] == [(e.name, e.operands) for e in now]


def test_fold_transposes_leaves_what_goes_to_a_dot():
    """A dot reads its operands in any layout."""

    def fn(w, scores, values):
        heads = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)
        return heads.reshape(4, 24, 64) @ w

    args = tuple(np.ones(shape, np.float32) for shape in ((64, 16), (4, 2, 24, 24), (4, 24, 2, 32)))
    names = [
        [(e.name, e.params) for e in after("insert_casts", fn, *args, rewrites=r).equations] for r in ((), REWRITES)
    ]
    assert names[0] == names[1]


def test_fold_transposes_leaves_the_transpose_of_a_residual():
    """It reads the saved copy of what the dot computes, which is another value."""

    @jax.custom_vjp
    def total(w, x):
        return jnp.sum(x @ w)

    def forward(w, x):
        y = x @ w
        return jnp.sum(x), y

    def backward(y, cotangent):
        return W, jnp.tanh(y.T).T @ W.T * cotangent

    total.defvjp(forward, backward)
    gradient = jax.grad(lambda w, x: total(w, x) + jnp.sum(jnp.sin(x @ w @ w.T)), 1)
    equations = after("rewrite_planned", gradient, W, X).equations
    (left,) = (e for e in equations if e.name == "transpose" and e.uses[0].residual)
    assert not left.dead


@pytest.mark.parametrize("axes", [("batch",), (None, "batch")], ids=["batch", "queries"])
def test_grouped_scores_of_sharded_queries(axes):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        keys = jax.device_put(KEYS, NamedSharding(mesh, PartitionSpec(*axes[:1])))
        queries = jax.device_put(QUERIES[:, :4], NamedSharding(mesh, PartitionSpec(*axes)))
        got = jax.jit(autocast(grouped_scores, "mixed_float16"))(keys, queries)
        program = after("insert_casts", grouped_scores, keys, queries)
        (dot,) = (e for e in program.equations if e.name == "dot_general")
        aval = program.avals[dot.results[0]]
        assert aval.shape[aval.sharding.spec.index("batch")] == 4
        assert got.sharding.spec == jax.jit(grouped_scores)(keys, queries).sharding.spec
    assert_two_programs_agree([np.asarray(got)], run(grouped_scores, KEYS, QUERIES[:, :4]), "float16")


@pytest.mark.parametrize("spec", [("rows", "columns"), ("rows",)])
def test_fold_transposes_swaps_how_the_result_is_sharded(spec):
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)

    def fn(w, x):
        y = lax.dot_general(x, w, (((1,), (0,)), ((), ())), out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        return jnp.tanh(y.T)

    with jax.set_mesh(mesh):
        expected = jax.eval_shape(fn, W, X).sharding
        assert "transpose" not in str(jax.make_jaxpr(autocast(fn, "mixed_float16"))(W, X))
        assert jax.eval_shape(autocast(fn, "mixed_float16"), W, X).sharding == expected


def test_fold_transposes_leaves_a_product_that_is_written_as_sums():
    def fn(w, x):
        return (x[:, :2] @ w[:2]).T + 1.0

    np.testing.assert_allclose(jax.jit(lambda *args: run(fn, *args)[0])(X.T, X), fn(X.T, X), rtol=1e-5)


@pytest.mark.parametrize("pool", [lax.max, lax.min], ids=["largest", "smallest"])
@pytest.mark.parametrize("scale", [1, -1, np.inf, -np.inf, np.nan])
def test_the_gradient_of_a_pool_is_not_handed_to_the_padding(pool, scale):
    """Not even if no element of a window exceeds the zeros with which the window is padded."""
    x = (scale * RNG.uniform(1, 2, (5, 6))).astype(np.float32)
    empty = -np.inf if pool is lax.max else np.inf
    weights = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4)

    def loss(x):
        return jnp.sum(weights * lax.reduce_window(x, empty, pool, (3, 3), (2, 2), [(1, 1), (2, 2)]))

    ours = jax.jit(autocast(jax.grad(loss), "mixed_float16"))
    assert "select_and_scatter_add" not in str(ours.trace(x).jaxpr)
    got = np.asarray(ours(x))
    assert np.sum(got) == np.sum(weights)
    if np.isfinite(scale):
        np.testing.assert_array_equal(got, jax.jit(jax.grad(loss))(x))


def max_pool(x):
    return lax.reduce_window(x, -np.inf, lax.max, (1, 2), (1, 1), "VALID")


@pytest.mark.parametrize("rule", ["low", "follow"])
def test_max_pools_are_selections_whatever_their_gradients_dtype(rule):
    rules = DEFAULT_RULES.replace({"select_and_scatter_add": rule})
    gradient = autocast(jax.grad(lambda x: jnp.sum(max_pool(x) ** 2)), "mixed_float16", rules=rules)
    assert "select_and_scatter_add" not in str(jax.make_jaxpr(gradient)(np.ones((2, 8), np.float32)))


@pytest.mark.parametrize("places, is_kept", [(64, False), (65, True)])
def test_large_pools_keep_their_scatter_whatever_its_dtype(places, is_kept):
    def loss(x):
        return jnp.sum(lax.reduce_window(x, -np.inf, lax.max, (places,), (1,), "VALID") ** 2)

    rules = DEFAULT_RULES.replace({"select_and_scatter_add": "follow"})
    gradient = autocast(jax.grad(loss), "mixed_float16", rules=rules)
    assert ("select_and_scatter_add" in str(jax.make_jaxpr(gradient)(np.ones(80, np.float32)))) == is_kept


def test_a_pool_of_integers_stays_one_beside_a_gradient():
    def fn(x, n):
        largest = lax.reduce_window(n, np.int32(-(2**31)), lax.max, (1, 2), (1, 1), "VALID")
        return jax.grad(lambda x: jnp.sum(max_pool(x)))(x), largest

    n = np.full((2, 8), 2**24 + 1, np.int32)
    _, largest = jax.jit(autocast(fn, "mixed_float16"))(np.ones((2, 8), np.float32), n)
    np.testing.assert_array_equal(largest, n[:, 1:])


def test_sliced_dots_are_not_saved_where_the_scan_returns_them():
    def in_a_scan(w, x):
        def step(h, row):
            y = row @ w
            return y[:, :4] * h + y[:, 4:], y

        return lax.scan(step, x[:, :4], jnp.stack([x, x]))

    (scan,) = (e for e in after("rewrite_lowered", in_a_scan, LAYERS[0], X).equations if e.name == "scan")
    assert "saved" not in [e.name for e in scan.bodies[0].equations]


# Each value: the shapes of a product's operands, their contracted axes, and their batch axes.
PRODUCTS = {
    "two numbers": ((5, 2), (2, 7), ((1,), (0,)), ((), ())),
    "sixteen": ((5, 16), (16, 7), ((1,), (0,)), ((), ())),
    "seventeen": ((5, 17), (17, 7), ((1,), (0,)), ((), ())),
    "seventeen, of a larger left operand": ((9, 17), (17, 7), ((1,), (0,)), ((), ())),
    "seventeen, contracted first": ((17, 9), (17, 7), ((0,), (0,)), ((), ())),
    "seventeen, contracted last": ((9, 17), (7, 17), ((1,), (1,)), ((), ())),
    "two axes in another order": ((3, 9, 4, 6), (6, 7, 3, 2), ((3, 0), (0, 2)), ((), ())),
    "of a batch": ((2, 9, 17), (17, 7, 2), ((2,), (0,)), ((0,), (2,))),
    "of a batch, from the right": ((2, 5, 17), (17, 7, 2), ((2,), (0,)), ((0,), (2,))),
    "of vectors": ((17,), (17,), ((0,), (0,)), ((), ())),
}


@pytest.mark.parametrize("number", [1.5, 2, True])
def test_a_product_with_a_number_that_is_written_in_the_program(number):
    for w in (jnp.float32(3), jnp.arange(3.0)):
        fn = jax.value_and_grad(lambda w: jnp.sum(jnp.dot(w, number)))
        for one, other in zip(autocast(fn, "mixed_float16")(w), fn(w), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("shape", [(1, 1), (4, 8)])
@pytest.mark.parametrize("spec", [("data", None), (None, None)])
def test_a_product_along_a_split_axis_is_not_written_as_sums(shape, spec):
    """For example the gradient of a weight over few examples, on a mesh with explicit axes."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = RNG.normal(size=(8, shape[0])).astype(np.float32), RNG.normal(size=shape).astype(np.float32)
        x = jax.device_put(x, PartitionSpec(*spec))
        fn = jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)), (0, 1))
        found, expected = autocast(fn, "mixed_float16", argnums=(0,))(w, x), fn(w, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-3, atol=1e-3)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_written_as_sums_is_the_product(name):
    """Exactly, as operands are small integers; also with a left operand of integers under strict promotion."""
    left, right, *numbers = PRODUCTS[name]
    a, b = (RNG.integers(-4, 4, shape) for shape in (left, right))
    wide = a.astype(np.float32), b.astype(np.float32)
    product = functools.partial(lax.dot_general, dimension_numbers=tuple(numbers))
    scope: Any = None
    node = Node(jax.make_jaxpr(product)(*wide).eqns[0], (), (), scope, False)

    def sums(*args):
        with jax.numpy_dtype_promotion("strict"):
            return multiply_and_add(node, args)[0]

    want, *found = jax.jit(lambda a, b, n: (product(a, b), sums(a, b), sums(n, b)))(*wide, a)
    for each in found:
        assert each.dtype == np.float32
        np.testing.assert_array_equal(each, want)
    terms = np.prod([left[axis] for axis in numbers[0][0]])
    assert any(name == "reduce_sum" for name, _ in primitives(sums, *wide)) == (terms > 16)


@pytest.mark.parametrize("name", ["seventeen, contracted first", "seventeen, contracted last"])
def test_a_product_written_as_sums_reads_its_larger_operand_as_it_lies_in_memory(name):
    left, right, *numbers = PRODUCTS[name]
    product = functools.partial(lax.dot_general, dimension_numbers=tuple(numbers))
    eqn = jax.make_jaxpr(product)(np.ones(left, np.float32), np.ones(right, np.float32)).eqns[0]
    scope: Any = None
    node = Node(eqn, (), (), scope, False)
    jaxpr = jax.make_jaxpr(lambda *args: multiply_and_add(node, args))(*(var.aval for var in eqn.invars)).jaxpr
    transposed = [eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "transpose"]
    assert jaxpr.invars[0] not in transposed


def test_a_product_written_as_sums_is_traced_like_its_terms():
    """Sixteen terms are a hundred equations: their `jax.numpy` operators would be a third of the tracing time."""
    x, y = np.ones((4, 16), np.float32), np.ones((16, 3), np.float32)
    scope: Any = None
    node = Node(jax.make_jaxpr(jnp.dot)(x, y).eqns[0], (), (), scope, False)

    def terms(x, y):
        each = zip(*([lax.index_in_dim(a, i, keepdims=False) for i in range(16)] for a in (x, y)), strict=True)
        return functools.reduce(lax.add, list(itertools.starmap(lax.mul, each)))

    written = tracing_calls(lambda: lambda x, y: terms(x, y), x.T[:, :, None], y[:, None])
    assert tracing_calls(lambda: lambda x, y: multiply_and_add(node, [x, y]), x, y) <= 1.1 * written


# `order`: the order of the operand's batch axes in the indices.
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_hot_scatter_picks_each_rows_own_index(order):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(2,),
        scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1),
        scatter_indices_batching_dims=order,
    )
    rng = np.random.default_rng(0)
    places, updates = rng.integers(0, 5, (2, 3)), rng.normal(size=(2, 3)).astype(np.float32)
    want = updates[..., None] * (places[..., None] == np.arange(5))

    def fn(zeros, updates):
        return lax.scatter_add(zeros, places.transpose(order)[..., None], updates, numbers)

    args = np.zeros((2, 3, 5), np.float32), updates.transpose(order)
    (scatter,) = [e for e in after("rewrite_planned", fn, *args).equations if e.node.name == "scatter-add"]
    assert (scatter.rewrite is not None) == (order == (0, 1))
    np.testing.assert_array_equal(run(fn, *args)[0], want)


# Scatters of one number to each of two rows of five: with a window of one number, without an index.
@pytest.mark.parametrize("window, indexed, shape", [((1,), (1,), (2, 1)), ((), (), (2,)), ((1,), (), (2, 1))])
def test_one_hot_scatter_leaves_windows_and_scatters_without_an_index(window, indexed, shape):
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=window,
        inserted_window_dims=() if window else (1,),
        scatter_dims_to_operand_dims=indexed,
        operand_batching_dims=(0,),
        scatter_indices_batching_dims=(0,),
    )
    places = np.array([[3], [1]])[:, : len(indexed)]

    def fn(zeros, updates):
        return lax.scatter_add(zeros, places, updates, numbers)

    args = np.zeros((2, 5), np.float32), np.ones(shape, np.float32)
    np.testing.assert_array_equal(run(fn, *args)[0], fn(*args))


def test_one_hot_scatter_clips_unsigned_indices():
    rows = {"operand_batching_dims": (0,), "scatter_indices_batching_dims": (0,)}
    numbers = lax.ScatterDimensionNumbers((), (1,), (1,), **rows)
    places = np.array([[2**32 - 1], [1]], np.uint32)

    def fn(zeros, updates):
        return lax.scatter_add(zeros, places, updates, numbers, mode="clip")

    args = np.zeros((2, 5), np.float32), np.ones(2, np.float32)
    np.testing.assert_array_equal(run(fn, *args)[0], fn(*args))
