"""The rule of every primitive, one row of the table at a time, and a user's edits of it.

Each row's primitive reads the result of a dot, which is in the compute dtype, so that its dtype shows the rule.
"""

# Half of the cases of some tests are arguments of the wrong type.
# pyright: reportArgumentType=false

import re

import jax
import jax.ad_checkpoint
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from jmp_train import DEFAULT_RULES, Rule, Rules, autocast, dot_product_attention, explain
from jmp_train._autocast.primitives import TABLE

X = jnp.full((8, 8), 0.5, jnp.float32)


def bound(name):
    """Binds a primitive that has no parameters to its operand."""
    return lambda x: getattr(primitives, f"{name}_p").bind(x)


def window(name):
    """Windows of 25 places, too many for their sum to be written as additions."""
    padding = {"window_dimensions": (5, 5), "window_strides": (2, 2), "padding": ((0, 0), (0, 0))}
    dilation = {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    return lambda x: getattr(primitives, f"{name}_p").bind(x, **padding, **dilation)


def solve(x):
    return lax.linalg.triangular_solve(x, x, left_side=True)


def select_and_scatter(x):
    """Windows of 81 places, too many to be written as selections."""
    tiled = jnp.tile(x, (2, 2))
    return jax.vjp(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (9, 9), (1, 1), "VALID"), tiled)[1](x)[0]


def attend(x):
    return dot_product_attention(*[x[:, None]] * 3)


ROWS = jnp.zeros((8, 1), jnp.int32)
SAMPLES = {
    "dot_general": lambda x: x @ x,
    "ragged_dot_general": lambda x: lax.ragged_dot(x, x[None], jnp.array([8], jnp.int32)),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "pow": lambda x: lax.pow(x, x),
    "integer_pow": lambda x: lax.integer_pow(x, 3),
    "polygamma": lambda x: lax.polygamma(x, x),
    "igamma": lambda x: lax.igamma(x, x),
    "igammac": lambda x: lax.igammac(x, x),
    "igamma_grad_a": lambda x: lax.igamma_grad_a(x, x),
    "random_gamma": lambda x: jax.random.gamma(jax.random.key(0), x),
    "zeta": lambda x: lax.zeta(x + 2, x),
    "regularized_incomplete_beta": lambda x: lax.betainc(x, x, x),
    "select_and_gather_add": lambda x: jax.jvp(
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), (x,), (x,)
    )[1],
    "scatter-max": lambda x: x.at[ROWS[:, 0]].max(x),
    "scatter-min": lambda x: x.at[ROWS[:, 0]].min(x),
    "scatter-mul": lambda x: x.at[ROWS[:, 0]].mul(x),
    "scatter-add": lambda x: x.at[ROWS[:, 0]].add(x),
    "scatter-sub": lambda x: x.at[ROWS[:, 0]].subtract(x),
    "scatter": lambda x: x.at[ROWS[:, 0]].set(x),
    "reduce_sum": lambda x: jnp.sum(x, 0),
    "reduce_prod": lambda x: jnp.prod(x, 0),
    "reduce_max": lambda x: jnp.max(x, 0),
    "reduce_min": lambda x: jnp.min(x, 0),
    "argmax": lambda x: jnp.argmax(x, 0),
    "argmin": lambda x: jnp.argmin(x, 0),
    "cumsum": lambda x: lax.cumsum(x),
    "cumprod": lambda x: lax.cumprod(x),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x),
    "cummax": lambda x: lax.cummax(x),
    "cummin": lambda x: lax.cummin(x),
    "reduce_window_sum": window("reduce_window_sum"),
    "reduce_window_max": window("reduce_window_max"),
    "reduce_window_min": window("reduce_window_min"),
    "select_and_scatter_add": select_and_scatter,
    "cholesky": lambda x: lax.linalg.cholesky(x),
    "lu": lambda x: lax.linalg.lu(x)[0],
    "qr": lambda x: lax.linalg.qr(x),
    "svd": lambda x: lax.linalg.svd(x),
    "eigh": lambda x: lax.linalg.eigh(x),
    "eig": lambda x: jnp.linalg.eigvals(x),
    "hessenberg": lambda x: lax.linalg.hessenberg(x)[0],
    "schur": lambda x: lax.linalg.schur(x)[0],
    "householder_product": lambda x: lax.linalg.householder_product(x, x[0]),
    "triangular_solve": solve,
    "tridiagonal": lambda x: lax.linalg.tridiagonal(x)[0],
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[0], x[0] + 1, x[0], x),
    "symmetric_product": lambda x: lax.linalg.symmetric_product(x, x),
    "fft": lambda x: jnp.fft.rfft(x).real,
    "round": lambda x: lax.round(x),
    "sort": lambda x: jnp.sort(x),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "approx_top_k": lambda x: lax.approx_max_k(x, 2)[0],
    "reshape": lambda x: x.reshape(64),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x, (2, 8, 8)),
    "transpose": lambda x: (x + x).T,
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "rev": lambda x: x[::-1],
    "tile": lambda x: lax.tile(x, (2, 1)),
    "slice": lambda x: lax.slice(x, (0, 0), (2, 2)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (ROWS[0, 0], 0), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2], (ROWS[0, 0], 0)),
    "gather": lambda x: x[ROWS[:, 0]],
    "split": lambda x: jnp.split(x, 2)[0],
    "name": lambda x: jax.ad_checkpoint.checkpoint_name(x, "kept"),
    "optimization_barrier": lambda x: lax.optimization_barrier(x),
    "stop_gradient": lambda x: lax.stop_gradient(x),
    "copy": bound("copy"),
    "device_put": lambda x: jax.device_put(x, jax.memory.Space.Device),
    "clamp": lambda x: lax.clamp(x, x, x),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "pad": lambda x: jnp.pad(x, 1),
    "select_n": lambda x: jnp.where(x > 0, x, x),
    "jmp_attention": lambda x: attend(x),
    "jmp_attention_tangent": lambda x: jax.jvp(attend, (x,), (x,))[1],
    "jmp_attention_backward": lambda x: jax.vjp(attend, x)[1](x[:, None])[0],
    "add_any": lambda x: jax.vjp(lambda x: (x, x), x)[1]((x, x))[0],
}
UNARY = (
    "exp exp2 expm1 log log1p square sqrt rsqrt cbrt sin cos tan asin acos atan sinh cosh asinh acosh atanh erf_inv "
    "lgamma digamma bessel_i0e bessel_i1e neg sign abs floor ceil is_finite tanh logistic erf erfc"
).split()
BINARY = "sub div rem max min atan2 nextafter eq ne lt le gt ge add mul".split()
SAMPLES |= {name: getattr(lax, name) for name in UNARY}
# The operands differ, because a square is a power: HIGH.
SAMPLES |= {name: lambda x, name=name: getattr(lax, name)(x, x[::-1]) for name in BINARY}

# Rows without a small program that runs on one device and in every release, each with the reason.
NOT_SHOWN = {
    "needs a mesh": "all_gather all_gather_invariant all_gather_reduced ppermute all_to_all "
    "ragged_all_to_all psum psum_invariant "
    "reduce_scatter unreduced_psum unreduced_reduce_scatter preduced pmax pmin unreduced_pmax unreduced_pmin pvary "
    "pbroadcast reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p sharding_constraint "
    "reshard relayout layout_constraint with_memory_space_constraint",
    "not in every release": "log2 one_minus_square polynomial reciprocal unstack stack tie broadcast_to",
    "made only inside other operations": "geqrf geqp3 ormqr cholesky_update eq_to le_to lt_to",
    "complex operands only": "real imag",
}
SHOWN = {name for name, entry in TABLE.items() if entry.rule not in (Rule.ENTER, Rule.RECORDED)} - {
    name for names in NOT_SHOWN.values() for name in names.split()
}
NARROW = {Rule.LOW: "float16", Rule.FOLLOW: "float16", Rule.SHAPE: "float16", Rule.WIDEST: "float16"}


def operations(fn, *args, rules=DEFAULT_RULES, policy="mixed_float16"):
    return explain(fn, policy, rules)(*args).operations


def reads(name, fn, *args, **options):
    """The dtypes that the operations of one primitive read, in float32 programs."""
    found = [op.dtype for op in operations(fn, *args, **options) if op.primitive == name and op.recorded == "float32"]
    assert found, f"{name} is not in the program"
    return found


def after_dot(fn):
    return lambda w: fn(w @ w)


def test_every_row_is_shown_or_excused():
    assert SHOWN == set(SAMPLES)


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_row(name):
    expected = NARROW.get(TABLE[name].rule, "float32")
    fn = after_dot(SAMPLES[name])
    assert reads(name, fn, X)[-1] == expected
    # The emitted program agrees, and runs.
    emitted = [op for op in explain(fn, "mixed_float16")(X).emitted if op.primitive == name]
    floating = {dtype for op in emitted[-1:] for dtype in op.operands if dtype and "float" in dtype}
    if name == "jmp_attention_backward":
        floating.remove("float32")  # the log-sum-exp
    assert floating == {expected}
    wanted = jax.eval_shape(fn, X)
    got = jax.eval_shape(autocast(fn, "mixed_float16"), X)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(lambda a: (a.shape, a.dtype), wanted)


# Edits of the table


@pytest.mark.parametrize(
    ("name", "rule", "expected"),
    [
        ("exp", "follow", "float16"),
        ("exp", Rule.LOW, "float16"),
        ("pow", "follow", "float16"),
        ("tanh", "high", "float32"),
        ("tanh", "recorded", "float32"),
        ("add", "high", "float32"),
        ("dot_general", "high", "float32"),
        ("dot_general", Rule.RECORDED, "float32"),
        ("conv_general_dilated", "high", "float32"),
        ("reduce_sum", "follow", "float16"),
        ("gather", "low", "float16"),
        ("top_k", "high", "float32"),
        ("qr", "recorded", "float32"),
    ],
)
def test_replace(name, rule, expected):
    rules = DEFAULT_RULES.replace({name: rule})
    fn = after_dot(SAMPLES[name])
    assert reads(name, fn, X, rules=rules)[-1] == expected
    row = next(op for op in reversed(operations(fn, X, rules=rules)) if op.primitive == name)
    assert row.rule == Rule(rule).value
    jax.eval_shape(autocast(fn, "mixed_float16", rules=rules), X)


@pytest.mark.parametrize(
    "primitive, fn",
    [
        ("select_and_scatter_add", lambda y: jax.grad(lambda y: jnp.sum(nn.max_pool(y[..., None], (2, 2), (2, 2))))(y)),
        ("reduce_sum", lambda y: jnp.sum(y[None], 0)),
    ],
)
def test_an_edit_holds_where_a_rewrite_would_not_need_float32(primitive, fn):
    (edited,), (found,) = (
        [op.rule for op in operations(after_dot(fn), X, rules=rules) if op.primitive == primitive]
        for rules in (DEFAULT_RULES.replace({primitive: "high"}), DEFAULT_RULES)
    )
    assert edited == "high" != found


@pytest.mark.parametrize("name", ["add", "select_n", "concatenate", "atan2", "clamp", "pow"])
@pytest.mark.parametrize("rule", ["follow", "shape", "low", "widest"])
def test_an_edited_operation_still_has_one_dtype(name, rule):
    """One operand is in the compute dtype and one is data; `lax` does not accept two dtypes."""
    fns = {
        "add": lambda a, b: a + b,
        "select_n": lambda a, b: jnp.where(a > 0, a, b),
        "concatenate": lambda a, b: jnp.concatenate([a, b]),
        "atan2": jnp.atan2,
        "clamp": lambda a, b: lax.clamp(b, a, b),
        "pow": lambda a, b: lax.pow(a, b),
    }
    rules = DEFAULT_RULES.replace({name: rule})
    got = autocast(lambda w, x: fns[name](w @ w, x), "mixed_float16", rules=rules)(X, X)
    assert got.dtype == jnp.float32


def test_replace_accumulates_and_is_a_value():
    one = DEFAULT_RULES.replace({"exp": "low"}).replace({"log": "low"})
    other = DEFAULT_RULES.replace({"log": Rule.LOW, "exp": Rule.LOW})
    assert one == other and hash(one) == hash(other) and one != DEFAULT_RULES
    assert one.replace({"exp": "high"}).entry("exp").rule is Rule.HIGH


def test_a_loop_set_to_recorded_is_not_entered():
    def fn(w):
        return lax.scan(lambda c, _: (c @ c, None), w, None, length=2)[0]

    assert reads("dot_general", fn, X) == ["float16"]
    assert reads("dot_general", fn, X, rules=DEFAULT_RULES.replace({"scan": "recorded"})) == ["float32"]


def test_with_residuals():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.exp(x @ w) @ w))

    def far_reads(rules):
        return explain(jax.grad(loss), "mixed_float16", rules)(X, X)

    low, wide = far_reads(DEFAULT_RULES), far_reads(DEFAULT_RULES.with_residuals("float32"))
    assert dict(wide.kept_bytes)["float32"] > dict(low.kept_bytes).get("float32", 0)
    assert DEFAULT_RULES.with_residuals("float32").with_residuals(None) == DEFAULT_RULES


def test_padding_with_a_literal_does_not_widen():
    assert reads("pad", after_dot(lambda x: jnp.pad(x, 1)), X) == ["float16"]
    assert reads("pad", after_dot(lambda x: jnp.pad(x, 1, constant_values=1e5)), X) == ["float32"]


@pytest.mark.parametrize(
    ("fill_value", "dtype"), [(None, "float16"), (0, "float16"), (-1e9, "float32"), (1e-9, "float32")]
)
def test_a_gather_is_as_wide_as_what_it_fills_with(fill_value, dtype):
    def beyond(x):
        return jnp.take(x, jnp.array([0, 99]), axis=0, mode="fill", fill_value=fill_value)

    assert reads("gather", after_dot(beyond), X) == [dtype]
    for program in (after_dot(beyond), beyond):  # a parameter would narrow to what it meets
        filled = autocast(lambda x, program=program: program(x)[1] + jnp.sum(x @ x.T, 1)[:1] * 0, "mixed_float16")
        np.testing.assert_array_equal(filled(X), np.float32(np.nan if fill_value is None else fill_value))


# What `Rules` refuses, as whole sentences


def sentence(text):
    return "^" + re.escape(text) + "$"


def test_bad_edits():
    with pytest.raises(
        ValueError,
        match=sentence(
            "`edits` names 'dot_genral', which is no primitive of the table (did you mean 'dot_general'?); use a name "
            "as `jax.make_jaxpr` prints it."
        ),
    ):
        DEFAULT_RULES.replace({"dot_genral": "low"})
    with pytest.raises(
        ValueError,
        match=sentence(
            "`edits['exp']` is 'hihg', which is no rule (did you mean 'high'?); use one of ['low', 'high', 'follow', "
            "'shape', 'widest', 'recorded']."
        ),
    ):
        DEFAULT_RULES.replace({"exp": "hihg"})
    for name, rule in (("psum", "low"), ("scan", "high"), ("exp", "enter"), ("exp", "collective")):
        with pytest.raises(
            ValueError,
            match=sentence(
                f"`edits[{name!r}]` is {Rule(rule)}, but {name} is {TABLE[name].rule} in the table: a collective, or a "
                f"primitive with a program inside, can only be set to Rule.RECORDED, and no other primitive can "
                f"become one."
            ),
        ):
            DEFAULT_RULES.replace({name: rule})


@pytest.mark.parametrize(
    "edits",
    ["exp", ["exp"], {lax.exp_p: "low"}, (("exp", "low", "high"),), (1,), None],
    ids=["a name", "a list", "a primitive", "two rules for a name", "a number", "none"],
)
def test_edits_that_are_no_dictionary(edits):
    message = "`edits` must be a dictionary from names, such as {'exp': 'follow'}; got "
    with pytest.raises(TypeError, match=sentence(message + f"{edits!r}.")):
        DEFAULT_RULES.replace(edits)
    with pytest.raises(TypeError, match=sentence(message + f"{edits!r}.")):
        Rules(edits=edits)


def test_scopes_that_are_no_globs():
    message = "`scopes` must be a dictionary from names, such as {'LayerNorm*': 'float32'}; got {1: 'float32'}."
    with pytest.raises(TypeError, match=sentence(message)):
        DEFAULT_RULES.with_scopes({1: "float32"})
    for glob in ("", "a//b"):
        with pytest.raises(ValueError, match=sentence(f"`scopes`: the glob {glob!r} has an empty segment; ")[:-1]):
            DEFAULT_RULES.with_scopes({glob: "float32"})


def test_the_constructor_takes_what_the_methods_take():
    made = DEFAULT_RULES.replace({"tanh": "high", "exp": "low"}).with_scopes({"Dense_0": "float32"})
    assert Rules(edits={"exp": "low", "tanh": "high"}, scopes={"Dense_0": "float32"}) == made
    assert Rules(edits=(("tanh", "high"), ("exp", "low")), scopes=(("Dense_0", "float32"),)) == made
    with pytest.raises(ValueError, match="'hihg', which is no rule"):
        Rules(edits=(("exp", "hihg"),))


def test_bad_residuals():
    with pytest.raises(
        ValueError, match=sentence("`dtype` is 'float16'; use 'float32', or None for the policy's compute dtype.")
    ):
        DEFAULT_RULES.with_residuals("float16")
