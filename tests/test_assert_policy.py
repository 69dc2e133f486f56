"""`assert_policy` finds each planted fault, reports all in one error, and passes programs without faults."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train import (
    DEFAULT_RULES,
    Policy,
    assert_policy,
    dot_product_attention,
    full_precision,
    get_policy,
    low_precision,
)
from jmp_train.checks import float32_loss, no_float64, no_narrow_sums, no_wide_dots, output_dtypes

W, X = np.full((8, 8), 0.5, np.float32), np.ones((4, 8), np.float32)
HALF = X.astype(np.float16)
POLICY = "mixed_float16"


def faults(fn, *args, checks=(), policy: Policy | str = POLICY, **options):
    """The messages of the error that is raised, without their numbers; an empty list without an error."""
    try:
        assert_policy(fn, policy, *checks, **options)(*args)
    except AssertionError as error:
        first, *lines = str(error).splitlines()
        assert re.match(rf"{len(lines)} faults? under ", first)
        return [line.strip().partition(". ")[2] for line in lines]
    return []


def only_fault(*args, **kwargs):
    (fault,) = faults(*args, **kwargs)
    # The line number of this file, whatever it is.
    return re.sub(r"at \S*test_assert_policy\.py:\d+:\d+ \([^)]*\)", "at LINE", fault)


def loss(w, x):
    with jax.named_scope("Layer"):
        y = jax.nn.gelu(x @ w)
    return jnp.mean(jax.nn.log_softmax(y @ w) ** 2)


def test_what_is_right_passes_and_returns_the_report():
    report = assert_policy(jax.grad(loss), POLICY)(W, X)
    assert report.low_flop_share == 1
    for fn in (loss, jax.value_and_grad(loss), jax.jit(jax.grad(loss))):
        assert faults(fn, W, X) == []
    assert assert_policy(lambda w, *, x: x @ w, POLICY)(W, x=X).low_flop_share == 1


# No wide dot


def test_a_wide_dot_is_found_with_its_reason():
    def fn(w, x):
        with jax.named_scope("Router"):
            y = full_precision(lambda x: x @ w)(x)
        return y @ w

    assert only_fault(fn, W, X) == (
        "no_wide_dots: dot_general reads float32, float32 at LINE, scope 'Router' (full_precision region); let it "
        "narrow, or except its scope: no_wide_dots(except_scopes=('Router',))."
    )
    assert faults(fn, W, X, checks=[no_wide_dots(except_scopes=("Router",))]) == []
    assert faults(fn, W, X, checks=[no_wide_dots(except_scopes=("Rout*",))]) == []
    assert faults(fn, W, X, checks=[no_wide_dots(except_scopes=("Layer",))]) != []
    assert faults(fn, W, X, checks=[no_narrow_sums(), no_float64(), float32_loss()]) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c @ w, x),
        lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: w @ v, x[0])[0],
        lambda w, x: lax.scan(lambda c, _: (full_precision(jnp.matmul)(c, w), None), x, None, length=2)[0],
        lambda w, x: lax.conv(x[None, None], full_precision(lambda w: w)(w)[None, None], (1, 1), "SAME")
        + full_precision(lambda x: lax.conv(x, x, (1, 1), "SAME"))(x[None, None]),
    ],
)  # fmt: skip
def test_wide_products_inside_other_programs(fn):
    assert all(fault.startswith("no_wide_dots: ") for fault in faults(fn, W, X)) and faults(fn, W, X)


def test_a_scope_set_to_float32_is_seen_too():
    rules = DEFAULT_RULES.with_scopes({"Layer": "float32"})
    found = faults(jax.grad(loss), W, X, rules=rules)
    assert found and all("(with_scopes: float32)" in fault for fault in found)
    assert faults(jax.grad(loss), W, X, rules=rules, checks=[no_wide_dots(except_scopes=["Layer"])]) == []


def test_equal_faults_are_one_sentence():
    def fn(w, x):
        for _ in range(3):
            x = full_precision(jnp.matmul)(x, w)
        return x

    assert ", 3 times (full_precision region)" in only_fault(fn, W, X)
    product = full_precision(lambda x: x @ x)
    fault = only_fault(lambda w: lax.fori_loop(0, 3, lambda _, x: product(x), product(w)), W)
    assert ", 2 times (full_precision region)" in fault and "(except_scopes=('a jax.named_scope around it',))" in fault
    assert ", 2 times (full_precision region)" in only_fault(
        lambda w: jnp.stack([full_precision(jnp.matmul)(w, w) for _ in "ab"]), W
    )
    assert ", 3 times (full_precision region)" in only_fault(  # one forward, two backward
        jax.grad(lambda w, x: jnp.sum(full_precision(lambda x: x @ w)(jnp.sin(x @ w)) ** 2)), W, X
    )


@pytest.mark.parametrize("precisions", [("highest", None), (None, "highest")])
def test_the_reason_is_that_of_the_wide_dot(precisions):
    def fn(w, x):
        for precision in precisions:
            x = jnp.dot(x, w, precision=precision)
        return x

    fault = only_fault(fn, W, X)
    assert "reads float32, float32 at LINE (its precision was set to float32); " in fault


def test_of_two_wide_dots_at_one_place_the_reason_is_that_of_the_first():
    def fn(w):
        return [jnp.dot(one, other, precision=how) for one, other, how in ((w, w + 1, "highest"), (w, w.T, None))]

    assert "at LINE, 2 times (its precision was set to float32); " in only_fault(fn, W)


def test_a_dot_of_one_wide_operand_and_one_of_float64():
    def mixed(w, x):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    assert "dot_general reads float16, float32 " in only_fault(full_precision(mixed), W, HALF)
    with jax.enable_x64(True):
        assert "dot_general reads float64, float64 " in only_fault(
            jnp.matmul, np.float64(W), np.float64(W), checks=[no_wide_dots()]
        )


def test_the_globs_may_come_from_anywhere():
    scopes = (name for name in ["Layer"])
    rules = DEFAULT_RULES.with_scopes({"Layer": "float32"})
    assert faults(jax.grad(loss), W, X, rules=rules, checks=[no_wide_dots(except_scopes=scopes)]) == []  # type: ignore[arg-type]


def test_argnums_says_what_is_data():
    def added(**options):
        found = assert_policy(lambda x, w: x @ jnp.ones((8, 8)) + w, POLICY, **options)(X, W[0]).operations
        return next(op.dtype for op in found if op.primitive == "add")

    assert (added(), added(argnums=1)) == ("float32", "float16")


# No narrow sum


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("reduce_sum", lambda x: lax.reduce_sum(x, (0,))),
        ("cumsum", lax.cumsum),
        ("reduce_prod", lambda x: lax.reduce_prod(x, (0,))),
        ("scatter-add", lambda x: jnp.zeros_like(x).at[jnp.array([0, 0, 1, 1])].add(x)),
        ("reduce_window_sum", lambda x: lax.reduce_window(x, np.float16(0), lax.add, (2, 2), (1, 1), "VALID")),
    ],
)
def test_narrow_sums_by_hand_are_widened_and_found_where_they_cannot_be(name, fn):
    # Outside of a loop, autocast runs it in float32; a loop that runs as recorded keeps it in 16 bits.
    assert faults(fn, HALF, checks=[no_narrow_sums()]) == []

    def recorded(x):
        def body(carry):
            return carry[0] - jnp.mean(jnp.float32(fn(carry[1]))), carry[1]

        return lax.while_loop(lambda carry: carry[0] > 0, body, (jnp.float32(1), x))[0]

    assert only_fault(recorded, HALF, checks=[no_narrow_sums()]) == (
        f"no_narrow_sums: {name} accumulates in float16 at LINE; cast its operand to float32 before, or except its "
        f"scope: no_narrow_sums(except_scopes=('a jax.named_scope around it',))."
    )


def test_narrow_sums_in_other_formats_under_other_policies_and_in_a_scope():
    def recorded(x):
        with jax.named_scope("Counter"):
            return full_precision(lax.cumsum)(x)

    bfloat16 = jnp.asarray(X, jnp.bfloat16)
    assert "cumsum accumulates in bfloat16 " in only_fault(recorded, bfloat16, checks=[no_narrow_sums()])
    assert faults(recorded, bfloat16, checks=[no_narrow_sums(except_scopes=["Counter"])]) == []
    policy = get_policy(POLICY).replace(reduce_dtype="float16")  # for sums over devices, not for these
    assert "cumsum accumulates in float16 " in only_fault(recorded, HALF, policy=policy, checks=[no_narrow_sums()])


@pytest.mark.parametrize("add", [lax.add, lambda a, b: a + jnp.abs(b)], ids=["sum", "of magnitudes"])
def test_a_sum_given_as_a_function(add):
    def fn(x):
        return lax.reduce(x, jnp.float16(0) * x[0, 0], add, (0,))

    assert "reduce accumulates in float16" in only_fault(fn, HALF, checks=[no_narrow_sums()])
    assert faults(lambda x: lax.reduce(x, x[0, 0], lax.max, (0,)), HALF, checks=[no_narrow_sums()]) == []


def test_a_carried_sum():
    @full_precision  # as recorded; elsewhere autocast carries sums in float32
    def narrow(x):
        return lax.scan(lambda c, x: (c + x, None), HALF[0], HALF)[0] + x

    def plain(x):
        return lax.scan(lambda c, x: (c + x, None), HALF[0], HALF)[0] + x

    assert faults(plain, HALF[0], checks=[no_narrow_sums()]) == []

    @full_precision
    def the_second_of_two(w, x):
        carry = lax.scan(lambda c, row: ((jnp.sin(c[0]), c[1] + row * w), None), (x, x), HALF)[0]
        return carry[0] + carry[1]

    assert "carries a sum in float16" in only_fault(the_second_of_two, HALF[0], HALF[0], checks=[no_narrow_sums()])
    fault = only_fault(narrow, HALF[0], checks=[no_narrow_sums()])
    assert fault.startswith("no_narrow_sums: scan carries a sum in float16 at LINE; start the carry in float32, or ")

    def residual_stream(w, x):
        stream = lax.scan(lambda c, _: (c + jnp.tanh(c @ w), None), x @ w, None, length=2)[0]
        return stream @ w

    def accumulated(w, xs):
        def step(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, x)), None

        return lax.scan(step, jnp.zeros_like(w), xs)[0]

    assert faults(residual_stream, W, X) == [] and faults(accumulated, W, X[None]) == []


@pytest.mark.parametrize("reduce_dtype", ["float32", "float16"])
def test_sums_across_devices(reduce_dtype):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def reduced(x):
        return lax.psum(x, "d")

    fn = jax.shard_map(reduced, mesh=mesh, in_specs=spec("d"), out_specs=spec())
    policy = get_policy(POLICY).replace(reduce_dtype=reduce_dtype)
    assert faults(fn, X, policy=policy, checks=[no_narrow_sums()]) == []

    # In a loop that runs as recorded, a sum that the user cast stays in 16 bits: a fault unless the policy allows it.
    def loop(x):
        def body(carry):
            return carry[0] - jnp.mean(jnp.float32(reduced(carry[1]))), carry[1]

        return lax.while_loop(lambda carry: carry[0] > 0, body, (jnp.float32(1), x))[0][None]

    by_hand = jax.shard_map(loop, mesh=mesh, in_specs=spec("d"), out_specs=spec("d"), check_vma=False)
    found = faults(by_hand, HALF, policy=policy, checks=[no_narrow_sums()])
    assert bool(found) == (reduce_dtype == "float32")


# float64, the loss, the outputs, the scopes


def test_float64_is_found():
    with jax.enable_x64(True):
        fault = only_fault(lambda x: jnp.sin(x), jnp.float64(1), checks=[no_float64()])
        assert fault == "no_float64: sin computes with float64 at LINE; cast what enters it to float32."
        for fn, x, dtypes in (
            (lambda x: x.astype(jnp.float64), jnp.float32(1), "float32, float64"),
            (lambda x: x.astype(jnp.float32), jnp.float64(1), "float64, float32"),
            (lambda x: jnp.sin(x), jnp.complex128(1), "complex128"),
        ):
            assert f"computes with {dtypes} at LINE" in only_fault(fn, x, checks=[no_float64()])
        casts = lambda x: [x.astype(dtype) for dtype in ("float32", "float16")]  # noqa: E731
        narrowed = faults(casts, jnp.float64(1), checks=[no_float64()])
        assert [re.findall("with (.*) at", fault) for fault in narrowed] == [["float64, float32"], ["float64, float16"]]
    assert faults(loss, W, X, checks=[no_float64()]) == []


def test_the_loss_is_wide():
    assert only_fault(lambda w, x: jnp.max(x @ w), W, X) == (
        "float32_loss: the scalar result is computed in float16 and returned in float32; cast what it is made of to "
        "float32, or wrap the end of the loss in full_precision."
    )
    fault = only_fault(lambda w, x: {"loss": jnp.mean(x @ w).astype(jnp.float16)}, W, X)
    assert fault.startswith("float32_loss: the scalar result 'loss' is computed in float16 and returned in float16; ")
    assert faults(lambda w, x: low_precision(lambda x: x[0] * 2)(x @ w), W, X) == []  # no scalar


def test_output_dtypes():
    assert only_fault(lambda x: [x, x.astype(jnp.bfloat16), 1], X, checks=[output_dtypes("float32")]) == (
        "output_dtypes: result '1' is bfloat16, not float32; autocast leaves results as the function returns them, so "
        "cast it there."
    )
    assert faults(lambda x: x, X, checks=[output_dtypes("f32")]) == []


def test_gradients_of_integers_are_no_floats():
    gradients = jax.grad(lambda w, n: jnp.sum(w * n), argnums=(0, 1), allow_int=True)
    assert faults(gradients, W, jnp.arange(8), checks=[output_dtypes("float32")]) == []


def test_a_scope_with_brackets_is_excepted_as_the_sentence_says():
    def fn(w, x):
        with jax.named_scope("block[1]"):
            return full_precision(jnp.matmul)(x, w)

    fault = only_fault(fn, W, X, checks=[no_wide_dots()])
    assert fault.endswith("no_wide_dots(except_scopes=('block[[]1]',)).")
    assert faults(fn, W, X, checks=[no_wide_dots(except_scopes=("block[[]1]",))]) == []
    narrow_sum = jax.named_scope("block[1]")(full_precision(lax.cumsum))
    fault = only_fault(narrow_sum, HALF, checks=[no_narrow_sums()])
    assert fault.endswith("(except_scopes=('block[[]1]',)).")


def test_a_scope_that_matches_nothing_is_always_a_fault():
    rules = DEFAULT_RULES.with_scopes({"Lajer": "float32"})
    for checks in ((), [no_float64()]):
        assert faults(loss, W, X, rules=rules, checks=checks) == [
            "scopes_match: the scope glob 'Lajer' (did you mean 'Layer'?) of the rules matches no operation; "
            "explain(...) lists the scopes, and only jax.named_scope and Linen modules make one."
        ]
    assert len(faults(loss, W, X, rules=rules.with_scopes({"Lbyer": "float32"}))) == 2


# All faults in one error, and checks of the user


def test_everything_that_failed_is_raised_at_once():
    def fn(w, x):
        return jnp.max(x @ w), full_precision(jnp.matmul)(x, w), full_precision(lambda x: jnp.exp(x) @ w)(x)

    with pytest.raises(AssertionError) as caught:
        assert_policy(fn, POLICY)(W, X)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 faults under params=float32,compute=float16,output=float32:"
    assert [line[:19] for line in lines[1:]] == ["  1. no_wide_dots: ", "  2. no_wide_dots: ", "  3. float32_loss: "]


def test_all_four_are_checked_by_default():
    with jax.enable_x64(True):

        def fn(w, half, double):
            return full_precision(lax.cumsum)(half), full_precision(jnp.matmul)(w, w), jnp.sin(double), half[0, 0]

        found = faults(fn, W, HALF, jnp.float64(1))
    assert {fault.partition(":")[0] for fault in found} == {
        "no_wide_dots",
        "no_narrow_sums",
        "no_float64",
        "float32_loss",
    }


def test_the_log_sum_exp_of_an_attention_is_no_wide_operand():
    x = jnp.ones((2, 8, 4, 8))
    assert faults(jax.grad(lambda x: jnp.mean(dot_product_attention(x, x, x))), x) == []


def test_a_check_of_ones_own():
    def few_casts(report):
        return [f"few_casts: {report.casts} casts"] if report.casts > 2 else []

    assert faults(lambda w, x: x @ w, W, X, checks=[few_casts]) == ["few_casts: 3 casts"]
    assert faults(lambda w: w @ w, W, checks=[few_casts]) == []

    def generator(report):
        yield from few_casts(report)

    assert faults(lambda w, x: x @ w, W, X, checks=[generator]) == ["few_casts: 3 casts"]
    assert faults(lambda w, x: x @ w, W, X, checks=[lambda report: tuple(few_casts(report))]) == ["few_casts: 3 casts"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: assert_policy(3, POLICY),  # pyright: ignore[reportArgumentType]
         "`fn` must be callable, got 3; pass the function whose precision is to be explained."),
        (lambda: assert_policy(loss, POLICY, "no_float64"),  # pyright: ignore[reportArgumentType]
         "`checks` must be functions of an Explanation, got 'no_float64'; see jmp_train.checks."),
        (lambda: assert_policy(loss, POLICY, no_float64),  # pyright: ignore[reportArgumentType]
         "`checks` holds no_float64 itself; call it: no_float64(...) returns the check."),
        (lambda: assert_policy(loss, POLICY, lambda report: True)(W, X),  # pyright: ignore[reportArgumentType]
         "the check <lambda> must return a list of sentences, empty if all is well; got True."),
        (lambda: assert_policy(loss, POLICY, lambda report: "fine")(W, X),
         "the check <lambda> must return a list of sentences, empty if all is well; got 'fine'."),
        (lambda: no_wide_dots(except_scopes=3),  # pyright: ignore[reportArgumentType]
         "`except_scopes` must be a sequence of globs, got 3; write ('head',)."),
        (lambda: no_narrow_sums(except_scopes=["Layer", 3]),  # pyright: ignore[reportArgumentType]
         "`except_scopes` must be a sequence of globs, got ['Layer', 3]; write ('head',)."),
        (lambda: no_wide_dots(except_scopes="Layer"),
         "`except_scopes` must be a sequence of globs, got 'Layer'; write ('Layer',)."),
        (lambda: assert_policy(loss, POLICY, rules=3),  # pyright: ignore[reportArgumentType]
         "`rules` must be a Rules, got 3; edit the default: DEFAULT_RULES.replace({...}). "
         "Arguments of the function belong to the one that is returned: explain(fn, policy)(*args)."),
    ],
)  # fmt: skip
def test_bad_input(call, message):
    with pytest.raises(TypeError, match="^" + re.escape(message) + "$"):
        call()


@pytest.mark.parametrize("maker", [no_wide_dots, no_narrow_sums, no_float64, float32_loss, output_dtypes])
def test_what_makes_a_check_is_none(maker):
    with pytest.raises(TypeError, match=f"^`checks` holds {maker.__name__} itself; call it: "):
        assert_policy(loss, POLICY, maker)


def test_a_check_without_a_name_is_shown():
    with pytest.raises(TypeError, match=r"^the check functools\.partial\("):
        assert_policy(loss, POLICY, functools.partial(lambda report: None))(W, X)  # pyright: ignore[reportArgumentType]


def test_a_wrong_output_dtype():
    with pytest.raises(ValueError, match=r"^`dtype`: unknown dtype 'float33' "):
        output_dtypes("float33")
