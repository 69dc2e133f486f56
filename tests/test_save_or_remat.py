"""Whether the backward pass saves a value, rematerializes it or reads it as recorded, in programs of a few lines."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pass_tools import after, stages

from jmp_train import DEFAULT_RULES, autocast

RNG = np.random.default_rng(0)
W, A, B = (RNG.normal(size=(16, 16)).astype(np.float32) for _ in range(3))
X, DATA = (RNG.normal(size=(2, 16)).astype(np.float32) for _ in range(2))


def decisions(fn, *args, **options):
    """The decision on each result, in the order of the program: `saved`, `remat`, or `read` (as recorded)."""
    program = after("save_or_remat", fn, *args, **options)
    residuals = program.residuals
    named = [(equation.name, number) for equation in program.equations for number in equation.results]
    return [
        (name, "saved" if number in residuals.saved else "remat" if number in residuals.remat else "read")
        for name, number in named
    ]


def decided(name, fn, *args, **options):
    return [found for each, found in decisions(fn, *args, **options) if each == name]


def rematerialized(fn, *args):
    """The names of the rematerialized equations, in the order of the program."""
    *_, (_, program) = stages(fn, *args)
    return [equation.name for equation in program.equations if equation.remat]


def across(value, w, x):
    """Reads `value` again after two dots."""
    return jnp.sum(value * (x @ w @ w))


def test_what_an_argument_is_multiplied_with_costs_reading_the_argument():
    def once(w, x, data):
        return across(jnp.exp(x @ w) * data, w, x)

    def twice(w, x, data, other):
        return across(jnp.exp(x @ w) * data * other, w, x)

    assert decided("mul", once, W, X, DATA)[0] == "remat"  # 2 bytes and 4 in place of 8
    assert decided("mul", twice, W, X, DATA, X)[:2] == ["remat", "read"]  # 2 bytes and 4 and 4


ROWS = np.arange(32) % 2


@pytest.mark.parametrize("rows, decision", [(ROWS, "remat"), (ROWS[:1], "read")], ids=["more", "fewer"])
def test_rows_of_an_activation_are_gathered_again_where_they_are_more(rows, decision):
    def fn(w, x, data):
        return jnp.sum(jnp.tanh(x @ w)[rows] * (data[: len(rows)] @ w @ w))

    data = np.ones((32, 16), np.float32)
    assert decided("gather", fn, W, X if len(rows) > 1 else data, data) == [decision]


def test_rows_of_an_embedding_are_not_gathered_again():
    """The table is float32: with rows gathered again, a Transformer would move 0.5 to 3 % more bytes on an H200."""

    def fn(params, data):
        return jnp.sum(jnp.exp(params[0][ROWS] * (data @ params[1])) * (data @ params[1] @ params[1]))

    data = np.ones((32, 16), np.float32)
    assert decided("gather", fn, (W[:2], W), data) == decided("exp", fn, (W[:2], W), data) == ["read"]


@pytest.mark.parametrize(
    "made, digits, dtype",
    [(jnp.dot, 23, "float16"), (jnp.dot, 20, "float32"), (lambda x, w: jnp.exp(x), 23, "float32")],
    ids=["of a dot", "of fewer digits", "of data"],
)
def test_what_a_checkpoint_saves_of_a_dot_is_handed_on_in_16_bits(made, digits, dtype):
    """A checkpoint marks a saved dot by `reduce_precision` to float32's 23 bits. Readers before it read float32."""
    again = jax.checkpoint(lambda h, w, x: jnp.sin(h) @ w * x, policy=jax.checkpoint_policies.nothing_saveable)

    def loss(w, x):
        saved = lax.reduce_precision(made(x, w), exponent_bits=8, mantissa_bits=digits)
        return jnp.sum(again(saved, w, jnp.tanh(saved) @ w))

    program = after("insert_casts", loss, W, X)
    (tanh,) = (equation for equation in program.equations if equation.name == "tanh")
    (call,) = (equation for equation in program.equations if equation.name == "remat2")
    assert program.avals[tanh.operands[0]].dtype == np.float32
    assert program.avals[call.operands[0]].dtype == np.dtype(dtype)


def test_results_of_dots_cost_their_bytes_in_the_compute_dtype():
    def exp_of_three(w, a, b, x):
        return across(jnp.exp(x @ w + x @ a + x @ b), w, x)

    assert decided("exp", exp_of_three, W, A, B, X) == ["remat"]  # three times 2 bytes in place of 8


def test_what_is_computed_from_a_saved_value_costs_reading_that():
    def three_times_three(w, a, b, x):
        return jnp.sum((3 * (x @ w + x @ a + x @ b) + x @ w @ w @ a) @ w)

    found = decisions(three_times_three, W, A, B, X)
    assert [decision for name, decision in found if name == "add"][:2] == ["remat", "saved"]  # of three: 6 bytes for 4
    assert [decision for name, decision in found if name == "mul"] == ["remat"]  # 2 bytes in place of 4


def test_what_no_barrier_is_behind_is_read_as_it_is():
    assert decided("sin", lambda w, x: across(jnp.sin(x), w, x), W, X) == ["read"]  # XLA merges equal expressions
    assert decided("sin", lambda w, x: across(jnp.sin(x @ w), w, x), W, X) == ["remat"]


def test_the_zeros_and_ones_of_a_mask_are_left_to_xla():
    """XLA saves the booleans of the comparison, and converts them in every kernel that reads them."""

    def masked(w, x):
        return across((x @ w > 0.5).astype(jnp.float32), w, x)

    def beside_what_is_masked(w, x):
        h = x @ w
        return across((h > 0.5).astype(jnp.float32), w, x) + across(h, w, x)

    assert decided("gt", masked, W, X) == decided("gt", beside_what_is_masked, W, X) == ["saved"]
    assert decided("convert_element_type", masked, W, X) == ["read"]


def test_a_mask_of_an_argument_is_saved():
    def masked(w, x, data):
        h = x @ w
        return across(jnp.exp(h) * data * jnp.where(h > data, h, 0.5), w, x)

    assert decided("gt", masked, W, X, DATA) == ["saved"]


def test_a_mask_that_is_joined_with_one_of_integers_is_saved():
    def masked(w, x):
        return across(jnp.where((x @ w > 0.5) & (jnp.arange(16) > 3), x, 1), w, x)

    assert decided("and", masked, W, X) == ["saved"]


def test_parts_and_concatenations_fuse_with_their_readers():
    def half(w, x):
        return jnp.sum(jnp.exp(x @ w)[:, :8] * (x @ w @ w)[:, :8])

    def both(w, x):
        return jnp.sum(jnp.concatenate([jnp.exp(x @ w), x @ w], 1) * jnp.concatenate([x @ w @ w, x], 1))

    def halves(w, x):
        left, right = jnp.split(jnp.exp(x @ w), 2, 1)
        return jnp.sum(jnp.sin(left * right) * (x @ w @ w)[:, :8])

    assert decided("slice", half, W, X) == ["remat", "remat"]
    assert decided("split", halves, W, X) == ["remat", "remat"]
    assert rematerialized(halves, W, X).count("split") == 1
    assert decided("concatenate", both, W, X)[0] == "remat"


def test_parts_of_a_cotangent_cost_the_bytes_of_the_part():
    """Those of an activation, and what is computed from a part, cost the whole."""

    def joined(w, x):
        h = jax.nn.silu(x @ w)
        return jnp.sum((jnp.concatenate([h, x, jnp.sin(h @ w)], 1) @ jnp.ones((48, 16))) ** 2)

    def parts(w, x):
        left, middle, right = jnp.split(x @ jnp.tile(w, 3), 3, 1)
        return across(left, w, x) + across(middle, w, x) + across(right, w, x)

    def scaled(w, x):
        h = x @ w
        return jnp.sum((jnp.concatenate([2 * h, x, x], 1) @ jnp.ones((48, 16)) + jnp.sin(h @ w)) ** 2)

    assert decided("split", jax.grad(joined), W, X)[0] == "remat"
    assert decided("mul", jax.grad(scaled), W, X)[-1] == "read"
    assert decided("split", parts, W, X) == ["saved"] * 3


def test_a_choice_of_elementwise_functions_is_saved():
    def loss(w, x):
        return across(lax.cond(jnp.sum(x) > 0, jnp.tanh, jnp.negative, x @ w), w, x)

    assert decided("cond", loss, W, X) == ["saved"]


def test_what_has_a_low_copy_is_read_as_that_and_computed_again_for_what_is_rematerialized_from_it():
    def exp_that_a_dot_reads(w, x):
        h = jnp.exp(x @ w)
        y = h @ w @ w
        return jnp.sum(y * (h * h) + y * (1 - h))

    assert decided("exp", exp_that_a_dot_reads, W, X) == ["saved"]
    assert decided("mul", exp_that_a_dot_reads, W, X)[0] == "remat"  # 2 bytes of x @ w, in place of 8
    assert decided("sub", exp_that_a_dot_reads, W, X)[0] == "remat"


@pytest.mark.parametrize("grid, decision", [(8, "remat"), (1, "saved")])
def test_what_has_a_low_copy_is_computed_again_from_much_smaller_values(grid, decision):
    def basis_that_a_dot_reads(w, x):
        h = jnp.exp((x @ w)[..., None] - jnp.arange(grid, dtype=np.float32)).reshape(len(x), -1)
        return jnp.sum((h @ jnp.ones((16 * grid, 16)) @ w) * h[:, :16])

    def dots(program):
        return [equation for equation in program.equations if equation.is_narrow_dot]

    assert decided("exp", basis_that_a_dot_reads, W, X) == [decision]
    program = after("save_or_remat", jax.grad(basis_that_a_dot_reads), W, X)
    assert not any([use.residual and use.value in program.residuals.remat for e in dots(program) for use in e.uses])


def test_only_distances_are_rematerialized_from_a_low_copy():
    """Other functions of a rounded number may be off by more than one rounding; so may `1 - y` beside `y`."""

    def read(of):
        def exp_that_a_dot_reads(w, x):
            h = jnp.exp(x @ w)
            return jnp.sum((h @ w @ w) * of(h))

        return rematerialized(exp_that_a_dot_reads, W, X)

    assert read(lambda h: 1 - h) == ["sub"] and read(lambda h: 1 + h) == ["add"]
    assert read(lambda h: h * (1 - h)) == ["exp", "sub", "mul"]
    assert read(jnp.cos) == ["exp", "cos"]
    assert read(lambda h: jnp.cos(jnp.cos(h))) == ["exp", "cos", "cos"]
    assert read(lambda h: X + h) == ["exp", "add"]


def test_a_distance_is_rematerialized_from_a_low_copy_if_nothing_is_read_in_full():
    def loss(w, x):
        h = jnp.exp(x @ w)
        return jnp.sum((h @ w @ w) * (1 - h)) + jnp.sum(jnp.cos(h))

    assert rematerialized(loss, W, X) == ["sub"]


def test_what_is_under_an_exponential_has_no_low_copy_and_is_computed_again_itself():
    def loss(w, x):
        h = jnp.sin(x @ w)
        return jnp.sum((h @ w @ w) * jnp.exp(h))

    assert decided("sin", loss, W, X) == ["remat"]


def test_what_no_barrier_is_behind_is_not_computed_again():
    """XLA would merge the two equal expressions, and store the result."""

    def loss(w, x):
        h = jnp.exp(x)
        return jnp.sum((h @ w @ w) * jnp.cos(h))

    assert decided("cos", loss, W, X) == ["read"]


def test_what_a_relu_passes_on_to_a_dot_is_in_memory():
    """In DenseNets a relu is computed from many results of dots, each much smaller."""

    def loss(w, x):
        few = [x @ w[:, :2], x @ w[:, 2:4], x @ w[:, 4:6], x @ w[:, 6:8], x @ w[:, 8:10], x @ w[:, 10:]]
        r = jax.nn.relu(jnp.exp(jnp.concatenate(few, 1)) - 1)
        return jnp.sum((r @ w @ w) * r)

    assert decided("custom_jvp_call", loss, W, np.ones((64, 16), np.float32)) == ["saved"]


@pytest.mark.parametrize("activation, name", [(jax.nn.relu, "custom_jvp_call"), (lambda h: jnp.maximum(h, 0), "max")])
def test_dots_of_both_sides_compute_a_relu_in_their_kernels(activation, name):
    """If the backward dot read the relu behind a barrier, the relu would be stored."""

    def loss(w, x):
        return jnp.sum((activation(x @ w) @ w) ** 2)

    program = after("insert_casts", jax.grad(loss), W, X)
    (relu,) = (equation.results[0] for equation in program.equations if equation.name == name)
    readers = [equation.name for equation in program.equations if relu in equation.operands]
    assert readers.count("dot_general") == 2


def test_dots_of_both_sides_read_one_concatenation():
    """It is rematerialized for other readers only; for the second dot it would be written to memory a second time."""

    def loss(params, x):
        w, v = params
        h = jnp.concatenate([x @ w, jnp.sin(x[:, :2])], 1)
        return jnp.sum((h @ v) ** 2)

    params = (W, np.ones((18, 16), np.float32))
    assert decided("concatenate", jax.grad(loss), params, X) == ["remat"]
    program = after("insert_casts", jax.grad(loss), params, X)
    (joined,) = (equation.results[0] for equation in program.equations if equation.name == "concatenate")
    readers = [equation.name for equation in program.equations if joined in equation.operands]
    assert readers.count("dot_general") == 2


def test_a_dot_computes_a_relu_of_an_argument_in_its_kernel():
    program = after("insert_casts", lambda w, x: jax.nn.relu(x) @ w, W, X)
    assert "saved" not in [equation.name for equation in program.equations]


CONVOLVED = {
    "relu of a convolution": (lambda h, x: jax.nn.relu(h), True),
    "relu of a biased one": (lambda h, x: jax.nn.relu(h + 1), True),
    "relu of a residual sum": (lambda h, x: jax.nn.relu(h + 1 + x), True),
    "relu of a scaled one": (lambda h, x: jax.nn.relu(2 * h), False),
    "leaky relu": (lambda h, x: jax.nn.leaky_relu(h), False),
}


@pytest.mark.parametrize("case", CONVOLVED)
def test_the_mask_of_a_relu_in_a_convolutions_kernel_reads_what_the_relu_made(case):
    """XLA would simplify `max(a, 0) > 0` to `a > 0`, and store `a`."""
    activation, reads_saved = CONVOLVED[case]

    def loss(w, x):
        conv = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME")
        x = conv(x, w)
        return jnp.sum(conv(activation(conv(x, w), x), w) ** 2)

    program = after("insert_casts", jax.grad(loss), W[None].T[:, :16], np.ones((4, 16, 8), np.float32))
    producers = {number: equation for equation in program.equations for number in equation.results}
    masks = [e for e in program.equations if e.name in ("gt", "ge")]
    assert [producers[e.operands[0]].name == "saved" for e in masks] == [reads_saved]
    if reads_saved:
        (relu,) = (producers[e.operands[0]].operands[0] for e in masks)
        assert producers[relu].name in ("custom_jvp_call", "max")


def test_what_read_a_low_copy_across_a_dot_finds_that_again():
    def loss(w, x):
        h = jnp.exp(x @ w)
        s = jnp.log(h @ w) + h  # reads the copy
        return jnp.sum((s @ w @ w) * jnp.cos(s) * jnp.cos(h))

    *_, (_, program) = stages(loss, W, X)
    producers = {number: equation.name for equation in program.equations for number in equation.results}
    again = [equation for equation in program.equations if equation.remat]
    assert [equation.name for equation in again].count("exp") == 1
    assert [[producers[n] for n in e.operands] for e in again if e.name == "add"] == [["log", "cast"]]


def test_what_cannot_be_computed_again_in_full_is_no_source():
    def sum_that_a_dot_reads(w, x):
        h = jnp.cumsum(jnp.exp(x @ w), 1)  # not elementwise
        return jnp.sum((h @ w @ w) * jnp.cos(h))

    assert decided("cos", sum_that_a_dot_reads, W, X) == ["read"]


def test_on_a_mesh_the_one_of_a_derivative_is_a_reshard():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    w, x = (jax.device_put(array, NamedSharding(mesh, P())) for array in (W, X))

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    recorded = [equation.name for equation in after("save_or_remat", jax.grad(loss), w, x).equations]
    assert "reshard" in recorded
    found = rematerialized(jax.grad(loss), w, x)
    assert found and found == rematerialized(jax.grad(loss), W, X)


def test_tests_for_infinities_are_made_again_and_other_equalities_are_not():
    def softplus(w, x):
        h = jax.nn.softplus(x @ w)
        return jnp.sum(h @ w)

    def ties(w, x):
        h = jnp.maximum(jnp.tanh(x @ w), 0.5)
        return jnp.sum(h @ w)

    again = rematerialized(jax.grad(softplus), W, X)
    assert again.count("eq") == 2 and "exp" in again
    assert "eq" not in rematerialized(jax.grad(ties), W, X)


def test_masks_that_are_joined_are_made_again_from_what_they_compare():
    def loss(w, x):
        h = x @ w
        return jnp.sum(jax.nn.hard_swish(h) @ w)

    assert rematerialized(jax.grad(loss), W, X).count("and") == 1
    assert "saved" not in [d for name, d in decisions(jax.grad(loss), W, X) if name == "and"]


@pytest.mark.parametrize(
    ("name", "read", "expected"),
    [
        ("cos", lambda h, x: jnp.cos(h), "remat"),
        ("add", lambda h, x: x + h, "remat"),
        ("sub", lambda h, x: jnp.log(1 - h), "remat"),  # a logarithm's operand has no low copy
    ],
)
def test_what_is_computed_from_a_value_with_a_low_copy_is_rematerialized(name, read, expected):
    def exp_that_a_dot_reads(w, x):
        h = jnp.exp(x @ w)
        return jnp.sum((h @ w @ w) * read(h, x))

    assert decided(name, exp_that_a_dot_reads, W, X) == [expected]


def test_what_reads_a_low_copy_across_a_dot_is_rematerialized_from_it():
    """The rematerialized sum of a residual connection reads the low copy of its operand, here and in later passes."""

    def fn(w, x):
        h = jnp.exp(x @ w)  # a dot reads its copy
        s = jnp.log(h @ w) + h
        return jnp.sum((jnp.cos(s) @ w) * s)

    assert decided("add", fn, W, X) == ["remat"]
    assert not after("save_or_remat", fn, W, X).residuals.in_full


def largest_of_two(y):
    return lax.reduce_window(y, -np.inf, lax.max, (1, 2), (1, 1), "SAME")


# Each value: what reads `y = relu(h)` in float16, where `h` is float32, and the decision on `y`.
SHARED = {
    "the dot's operand": (lambda y, w: y @ w @ w + y, "saved"),
    "what no dot reads": (lambda y, w: (y * 2) @ w @ w + y, "remat"),
    "what no other equation reads": (lambda y, w: y @ w @ w, "read"),
    "what other dots read": (lambda y, w: y @ w @ w + y @ w, "read"),
    "what a dot reads the largest of": (lambda y, w: largest_of_two(y) @ w @ w + y, "read"),
    "what is read before the dot": (lambda y, w: (y @ w) + jnp.sum(jnp.cos(y)), "read"),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_rounded_value_that_a_dot_reads_is_saved_for_others_across_a_dot(name):
    fn, expected = SHARED[name]
    found = decided("custom_jvp_call", lambda w, x: fn(jax.nn.relu(jnp.sqrt(x @ w) - 2), w), W, X)
    assert found == [expected]


def test_dots_of_both_sides_read_one_low_copy():
    def times(x, y):
        return lax.dot_general(x, y, (((1,), (1,)), ((), ())))

    def fn(w, x):
        h, y = jnp.exp(x @ w), x @ w
        return times(h @ w, h), times(y @ w, y)

    program = after("save_or_remat", fn, W, X)
    uses = [e.uses for e in program.equations if e.name == "dot_general" and e.depth == 2]
    assert [[use.residual for use in pair] for pair in uses] == [[False, False], [False, True]]
    assert {use.dtype for pair in uses for use in pair} == {np.dtype(np.float16)}


def test_a_difference_of_two_values_with_low_copies_is_rematerialized():
    def two_that_dots_read(w, x):
        h, k = jnp.exp(x @ w), jnp.exp(x @ A)
        return jnp.sum((h @ w @ w + k @ w) * (h - k))

    assert decided("sub", two_that_dots_read, W, X) == ["remat"]
    assert rematerialized(two_that_dots_read, W, X) == ["exp", "exp", "sub"]


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))


KERNEL, BIAS = RNG.normal(size=(3, 8, 8)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
SIGNALS, SHIFT = (RNG.normal(size=(2, 16, 8)).astype(np.float32) for _ in range(2))


def test_of_a_convolution_the_sum_with_its_bias_is_saved():
    """One cuDNN kernel computes convolution and bias, if nothing else reads the convolution."""

    def biased(params, x, _):
        kernel, bias = params
        h = convolve(x, kernel) + bias
        return jnp.sum(jnp.sin(h) * convolve(jnp.tanh(h), kernel))

    def scaled(params, x, _):
        kernel, scale = params
        return jnp.sum(jnp.tanh(scale * convolve(x, kernel)) * convolve(convolve(x, kernel), kernel))

    def shifted(params, x, shift):
        kernel, _ = params
        h = convolve(x, kernel) + convolve(shift, kernel)
        return jnp.sum(jnp.sin(h) * convolve(jnp.tanh(h), kernel))

    params = KERNEL, BIAS
    program = after("save_or_remat", biased, params, SIGNALS, SHIFT)
    assert decided("add", biased, params, SIGNALS, SHIFT) == ["saved"]
    assert decided("sin", biased, params, SIGNALS, SHIFT) == ["remat"]
    saved = [e for e in after("insert_casts", biased, params, SIGNALS, SHIFT).equations if e.name == "saved"]
    (total,) = (number for e in program.equations if e.name == "add" for number in e.results)
    assert [e.operands for e in saved if program.avals[e.operands[0]].shape == (2, 16, 8)] == [(total,)]
    assert decided("mul", scaled, params, SIGNALS, SHIFT)[0] == "remat"
    assert decided("add", shifted, params, SIGNALS, SHIFT) == ["remat"]  # two results of kernels, both in memory


def test_a_dense_layers_bias_is_added_again():
    def biased(params, x):
        w, bias = params
        return across(jnp.sin(x @ w + bias), w, x)

    assert decided("add", biased, (W, B[0]), X) == ["remat"]


def test_what_a_biased_convolution_is_added_to_is_saved_and_what_a_dot_reads_of_it_needs_no_barrier():
    def residual(params, x, _):
        kernel, bias = params
        h = jnp.exp(convolve(x, kernel))
        h = h + (convolve(h, kernel) + bias)
        return jnp.sum(jnp.sin(h) * convolve(jnp.tanh(h), kernel))

    def rectified(params, x, _):
        kernel, bias = params
        h = jnp.maximum(convolve(x, kernel) + bias, -1)
        return jnp.sum(h * convolve(h, kernel))

    params = KERNEL, BIAS
    assert decided("add", residual, params, SIGNALS, SHIFT) == ["saved", "saved"]
    assert decided("max", rectified, params, SIGNALS, SHIFT) == ["read"]


# Each value: what is read of `h` and `y`, results of one dot and two more, and the decision on each mask in it.
MASKS = {
    "a mask alone": (lambda h, y: jnp.where(h > 0.5, y, 0), ["saved"]),
    "beside its operand": (lambda h, y: jnp.where(h > 0.5, y * h, 0), ["remat"]),
    "beside what is rematerialized from its operand": (lambda h, y: jnp.where(h > 0.5, y * jnp.sin(h), 0), ["remat"]),
    "two of one value": (lambda h, y: jnp.where(h > 0.5, y, jnp.where(h < -0.5, 2 * y, 0)), ["remat", "remat"]),
    "of two values": (lambda h, y: jnp.where(h > jnp.tanh(y @ W), y @ W @ W, 0), ["saved"]),
    "of two values that are read": (lambda h, y: jnp.where(h > y, h * y * (y @ W), 0), ["remat"]),
    "of two values, one of which is read": (lambda h, y: jnp.where(h > y, h * (y @ W), 0), ["saved"]),
    "two of two values": (lambda h, y: jnp.where(h > y, y @ W, jnp.where(h + 1 < y, 1, 0)), ["saved", "saved"]),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_saved_only_where_nothing_else_says_the_same(name):
    read, expected = MASKS[name]

    def loss(w, x):
        return jnp.sum(read(x @ w, x @ w @ w))

    found = [decision for each, decision in decisions(loss, W, X) if each in ("gt", "lt")]
    assert found == expected


def test_a_mask_of_a_biased_dot_is_rematerialized_from_the_dot():
    def loss(params, x):
        w, bias = params
        h = x @ w + bias
        return jnp.sum(jnp.where(h > 0.5, jnp.sin(h), 0) * (x @ w @ w))

    assert decided("gt", jax.grad(loss), (W, B[0]), np.ones((16, 16), np.float32))[:1] == ["remat"]


def test_a_mask_of_a_float32_value_with_a_low_copy_is_saved():
    """A mask of the rounded copy might differ."""

    def loss(w, x):
        h = jnp.exp(x @ w)
        return jnp.sum(jnp.where(h > 0.5, h * (h @ w @ w), 0))

    assert decided("exp", loss, W, X) == decided("gt", loss, W, X) == ["saved"]


def test_a_mask_of_what_no_barrier_is_behind_is_saved():
    """XLA would merge a rematerialized comparison with the one in the forward pass."""

    def of_argument(w, x):
        return jnp.sum(jnp.where(x > 0.5, x * (x @ w @ w), 0))

    def of_operand(params, x, _):
        kernel, bias = params
        h = jnp.maximum(convolve(x, kernel) + bias, -1)
        y = convolve(h, kernel)
        return jnp.sum(jnp.where(h > 0.5, y, jnp.where(h > 0, 2 * y, 0)))

    assert decided("gt", of_argument, W, X) == ["saved"]
    assert decided("gt", of_operand, (KERNEL, BIAS), SIGNALS, SHIFT) == ["saved", "saved"]


def test_a_carry_in_float32_starts_with_what_was_computed_and_not_with_its_low_copy():
    def loop(w, x):
        h = jnp.exp(x @ w)
        y = h @ w @ w
        return jnp.sum(lax.scan(lambda c, _: (jnp.sin(c) * y, None), h, None, length=2)[0])

    program = after("save_or_remat", loop, W, X)
    (scan,) = (equation for equation in program.equations if equation.name == "scan")
    (h,) = (equation.results[0] for equation in program.equations if equation.name == "exp")
    assert h in program.residuals.saved
    assert [use.residual for use in scan.uses if use.value == h] == [False]


def test_a_carry_in_float32_that_no_dot_reads_starts_with_what_is_rematerialized():
    def loop(w, x):
        h, y = jnp.exp(x @ w), x @ w @ w
        return lax.scan(lambda c, _: (jnp.sin(c) * y, None), h, None, length=2)[0]

    program = after("save_or_remat", loop, W, X)
    (scan,) = (equation for equation in program.equations if equation.name == "scan")
    assert [bool(use.residual) for use in scan.uses if use.value in program.residuals.remat] == [True]


def test_a_carry_that_starts_in_16_bits_reads_the_copy_that_dots_read():
    def layers(w, x):
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), jnp.exp(x @ w), jnp.stack([w, w]))[0]

    program = after("save_or_remat", layers, W, X)
    (exponential,) = (equation for equation in program.equations if equation.name == "exp")
    (scan,) = (equation for equation in program.equations if equation.name == "scan")
    (start,) = (use for use in scan.uses if use.value == exponential.results[0])
    assert start.dtype == np.float16 and start.residual


def test_devices_add_what_was_computed_and_not_the_low_copy_that_a_dot_beside_them_reads():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def both(w, x):
        h = jnp.sin(x)
        return lax.psum(h, "data"), h @ w

    total, _ = jax.jit(autocast(both, "mixed_float16"))(W, X)
    np.testing.assert_array_max_ulp(total, jax.jit(jnp.sin)(X), maxulp=2)


def three(w, x):
    """A value in the compute dtype from three results of dots: reading these costs more than reading it."""
    return jnp.tanh(x @ w) - jnp.tanh(x @ A) - jnp.tanh(x @ B)


# Each value: a program, a primitive, and the decision on it by default and with float32 residuals.
WITH_AND_WITHOUT = {
    "the result of a dot": (lambda w, x: across(jnp.tanh(x @ w), w, x), "dot_general", "saved", "saved"),
    "a function of that": (lambda w, x: across(jnp.tanh(x @ w), w, x), "tanh", "remat", "saved"),
    "a float32 function of that": (lambda w, x: across(jnp.exp(x @ w), w, x), "exp", "remat", "read"),
    "that a dot reads": (lambda w, x: (lambda h: h * (h @ w))(jnp.exp(x @ w)), "exp", "saved", "read"),
    "of three results": (lambda w, x: (three(w, x) * (x @ w @ w)) @ w, "sub", "read", "saved"),
    "a moved result": (lambda w, x: across((x @ w)[:, ::-1], w, x), "rev", "saved", "saved"),
    "a result, moved twice": (lambda w, x: across((x @ w)[:, ::-1].T[::-1].T, w, x), "transpose", "saved", "saved"),
    "a running maximum of a function": (
        lambda w, x: (lax.cummax(jnp.tanh(x @ w)) * (x @ w @ w)) @ w, "cummax", "read", "read"),
    "that a dot reads, and a divisor": (
        lambda w, x: (lambda h: (across(h, w, x), h @ w, 1 / h))(jnp.exp((x @ w) * x)), "exp", "remat", "read"),
    "of three results that it reads reshaped": (
        lambda w, x: (reshaped(x @ w) - reshaped(x @ A) - reshaped(x @ B)) * reshaped(x @ w @ w),
        "sub", "read", "saved"),
    "moved data": (lambda w, x: across(x[:, ::-1], w, x), "rev", "read", "read"),
    "a sum over windows": (
        lambda w, x: jnp.sum(mean(x @ w) * (x @ w @ w)[:, ::2]), "reduce_window_sum", "read", "read"),
    "a mean over windows": (lambda w, x: jnp.sum(jnp.tanh(mean(x @ w)) @ w[::2]), "div", "saved", "saved"),
    "integers": (lambda w, x: jnp.sum(w[jnp.argmax(x @ w, 1)] * (x @ w @ w)), "argmax", "read", "read"),
    "a comparison": (lambda w, x: across(jnp.where(x @ w > 0.5, 1.0, 0.0), w, x), "gt", "saved", "read"),
    "zeros and ones": (
        lambda w, x: across((x @ w > 0.5).astype(np.float32), w, x), "convert_element_type", "read", "read"),
    "a comparison of integers": (
        lambda w, x: across(jnp.where(jnp.argmax(x @ w, 1) > 1, 1.0, 0.0)[:, None], w, x), "gt", "read", "read"),
    "a relu's, that a dot reads": (jax.grad(lambda w, x: across(jax.nn.relu(x @ w) @ w, w, x)), "gt", "read", "read"),
    "a relu's, that no dot reads": (jax.grad(lambda w, x: across(jax.nn.relu(x @ w), w, x)), "gt", "remat", "read"),
    "a relu's, of data": (
        jax.grad(lambda w, x: across(jax.nn.relu(jnp.exp(x @ w) - x) @ w, w, x)), "gt", "read", "read"),
    "a float32 relu's, that a dot reads": (
        lambda w, x: (lambda r: (across(jnp.where(r > 0, 1.0, 0.0), w, x), r @ w))(jnp.maximum(jnp.exp(x @ w) - x, 0)),
        "gt", "read", "read"),
}  # fmt: skip


def test_in_a_body_the_sum_of_an_argument_and_a_result_is_saved():
    """Outside of a body it is rematerialized from both."""

    def layer(h, w):
        y = h + h @ w
        return (y * (h @ w @ w)) @ w

    def kinds(program):
        saved, remat = program.residuals.saved, program.residuals.remat
        (total,) = (equation.results[0] for equation in program.equations if equation.name == "add")
        return "saved" if total in saved else "remat" if total in remat else "read"

    program = after("save_or_remat", lambda w, x: layer(x @ w, w), W, X)
    assert kinds(program) == "remat"
    program = after("save_or_remat", lambda w, x: jax.checkpoint(layer)(x @ w, w), W, X)
    (body,) = program.equations[-1].bodies
    assert kinds(body) == "saved"


@pytest.mark.parametrize(
    ("fn", "read_elsewhere", "expected"),
    [(jnp.exp, True, True), (jnp.exp, False, False), (jnp.square, True, False)],
)
def test_a_sum_on_the_near_side_reads_what_is_rematerialized_if_it_is_expensive(fn, read_elsewhere, expected):
    """If the sum read the exponential itself, XLA would store it in float32 for the sum and the readers across dots."""

    def loss(w, x):
        h = fn(x @ w)
        return jnp.sum(h), across(h if read_elsewhere else x, w, x)

    first, *_ = (e for e in after("save_or_remat", loss, W, X).equations if e.name == "reduce_sum")
    assert first.uses[0].residual == expected


@pytest.mark.parametrize("fill", [-1e4, -1e9], ids=["fits into float16", "overflows"])
def test_a_mask_costs_what_it_is_broadcast_from(fill):
    """Rematerialized logits read a row of the mask again, not the whole mask, which is cheaper than saving them."""

    def loss(w, x, mask):
        return across(jnp.exp(jnp.where(mask, x @ w, fill)), w, x)

    program = after("save_or_remat", loss, W, X, np.arange(W.shape[1]) < 3)
    masked, exponential = (n for e in program.equations if e.name in ("select_n", "exp") for n in e.results)
    assert {masked, exponential} <= program.residuals.remat


def reshaped(x):
    return x.reshape(4, 8)


def mean(x):
    return lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID") / 2


@pytest.mark.parametrize("name", WITH_AND_WITHOUT)
def test_float32_residuals_are_read_as_they_are(name):
    fn, primitive, *expected = WITH_AND_WITHOUT[name]
    rules = DEFAULT_RULES, DEFAULT_RULES.with_residuals("float32")
    assert [decided(primitive, fn, W, X, rules=each)[-1] for each in rules] == expected


@pytest.mark.parametrize(
    "name",
    "abs cbrt cos erf erf_inv erfc exp exp2 expm1 log log1p logistic neg rsqrt sign sin sqrt square tan tanh".split(),
)
def test_a_function_of_a_product_is_computed_again(name):
    assert decided(name, lambda w, x: across(getattr(lax, name)(x @ w), w, x), W, X) == ["remat"]


@jax.custom_jvp
def outside(x):
    return jnp.where(~((x > -1) & (x < 1)) | (x == jnp.inf), x, 0)


outside.defjvp(lambda primals, tangents: (outside(*primals), tangents[0]))


def test_a_choice_by_comparisons_in_a_rule_of_its_own_is_computed_again():
    assert decided("custom_jvp_call", lambda w, x: across(outside(x @ w), w, x), W, X) == ["remat"]


def fit(h, y):
    """Reads `h` as the operand of a float32 product."""
    return jnp.sum(jnp.linalg.solve(A[:2, :2], h @ y.T))


def solution(h, y):
    """Reads `h` as the operand of a solver."""
    return jnp.sum(lax.linalg.triangular_solve(h, y.T, left_side=True))


@pytest.mark.parametrize(("reader", "x"), [(fit, X), (solution, B)], ids=["product", "solver"])
@pytest.mark.parametrize(
    ("near", "far", "expected"), [(True, True, "read"), (True, False, "remat"), (False, True, "remat")]
)
def test_what_products_or_solvers_of_both_sides_read_in_float32_is_stored_once(reader, x, near, far, expected):
    def fn(w, x, data):
        h, y = jnp.exp(x @ w), x @ w @ w
        return reader(h if near else data, data) + reader(h if far else data, y) + jnp.sum(h * y)

    assert decided("exp", fn, W, x, x + 1) == [expected]


def test_what_is_computed_from_a_value_that_is_stored_in_float32_costs_reading_that():
    def fn(w, b, x, data):
        h, y = jnp.exp(x @ w), x @ w @ w
        return fit(h, data) + fit(h, y) + jnp.sum(h * jnp.expm1(x @ b) * y)

    assert decided("mul", fn, W, B, X, DATA)[0] == "remat"  # 4 bytes and 2 in place of 8


def test_what_they_read_in_16_bits_is_rematerialized():
    def fn(w, x, data):
        h, y = -(x @ w), x @ w @ w
        return fit(h, data) + fit(h, y) + jnp.sum(h * y)

    assert decided("neg", fn, W, X, DATA)[0] == "remat"
