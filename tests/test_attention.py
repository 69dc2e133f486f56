"""`dot_product_attention`: `jax.nn`'s in float32, one equation forward and one backward under autocast.

The fused kernels are emulated here as cuDNN documents them: logits and sums in float32, weights and the gradient of the
logits rounded for the products that read them. `test_gpu_attention.py` tests the compiled modules.
"""

import functools
import itertools
import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import TOLERANCE
from jax.interpreters import ad
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jmp_train as jmp
from jmp_train import autocast, dot_product_attention, explain
from jmp_train._attention import _cudnn, _reference
from jmp_train._attention._partition import _rule, partitioned
from jmp_train._attention._settings import EXTRAS, Settings

B, T, N, K, H = 2, 16, 4, 2, 8
PRIMITIVES = ("jmp_attention", "jmp_attention_backward")


def draw(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32) * np.float32(scale))


def operands(seed=0, heads=K):
    return draw(B, T, N, H, seed=seed), draw(B, T, heads, H, seed=seed + 1), draw(B, T, heads, H, seed=seed + 2)


ALL = np.ones((T, T), bool)
MASK = np.random.default_rng(0).random((B, 1, T, T)) > 0.3
MASK[0, 0, 3] = False  # attends to nothing
LENGTHS = jnp.array([5, T], jnp.int32)
CASES = {
    "plain": {},
    "scale": {"scale": 0.5},
    "causal": {"is_causal": True},
    "bias": {"bias": draw(1, N, T, T)},
    "bias of one head": {"bias": draw(B, 1, 1, T)},
    "mask": {"mask": jnp.asarray(MASK)},
    "bias, mask, causal": {"bias": draw(1, N, T, T), "mask": jnp.asarray(MASK), "is_causal": True},
    "bias beyond what causality allows": {
        "bias": draw(1, N, T, T) + 3e6 * jnp.triu(jnp.ones((T, T)), 1),
        "is_causal": True,
    },
    "bias beyond what a mask allows": {
        "bias": draw(1, N, T, T) + 3e6 * ~jnp.asarray(MASK),
        "mask": jnp.asarray(MASK),
    },
    "bias of keys, causal": {"bias": draw(1, 1, 1, T), "is_causal": True},
    "keys' lengths": {"key_value_seq_lengths": LENGTHS},
    "mask, keys' lengths": {"mask": jnp.asarray(MASK).at[0, 0, 2, :5].set(False), "key_value_seq_lengths": LENGTHS},
    "both lengths, causal": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1], "is_causal": True},
    "window": {"local_window_size": (3, 0)},
    "window to both sides": {"local_window_size": 2},
}


def loss(attend, case):
    """A loss of query, key, value and the case's bias."""
    rest = {name: value for name, value in CASES[case].items() if name != "bias"}
    has_bias = "bias" in CASES[case]

    def of(query, key, value, bias):
        return jnp.sum(jnp.sin(attend(query, key, value, bias if has_bias else None, **rest)))

    return of


def bias_of(case):
    return CASES[case].get("bias", jnp.zeros(()))


def error(got, want):
    """The largest relative error of several arrays, in the Euclidean norm; NaN if any number is NaN."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    norm = lambda x: np.linalg.norm(np.asarray(x, np.float64))  # noqa: E731
    errors = [norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / max(norm(b), 1e-30) for a, b in pairs]
    return np.max(errors)


def of_both(compute):
    """The results of `compute` with our attention and with JAX's, in one program."""
    return jax.jit(lambda: (compute(dot_product_attention), compute(jax.nn.dot_product_attention)))()


@pytest.mark.parametrize("case", CASES)
def test_in_float32_it_is_attention_written_out(case):
    """Value and gradients."""
    got = jax.jit(jax.value_and_grad(loss(dot_product_attention, case), (0, 1, 2, 3)))(*operands(), bias_of(case))
    out, gradients = written_out_case(case, *operands())
    assert error(got[0], np.sum(np.sin(out))) <= TOLERANCE["float32"].gradient
    assert error(got[1][: len(gradients)], gradients) <= TOLERANCE["float32"].gradient


# All operands, and each size of a first axis, once; the other settings of a case are not operands.
@pytest.mark.parametrize(
    "case", ["plain", "bias of one head", "bias, mask, causal", "mask, keys' lengths", "both lengths, causal"]
)
def test_a_batch_of_problems_is_the_attention_of_jax(case):
    query, key, value = operands()
    query, key = np.stack([query, 2 * query, query - 1], 2), np.stack([key, -key, key + 1])

    def compute(attend):
        gradients = jax.vmap(jax.value_and_grad(loss(attend, case), (0, 1, 2, 3)), (2, 0, None, None))
        return gradients(query, key, value, bias_of(case))

    assert error(*of_both(compute)) <= TOLERANCE["float32"].gradient


@pytest.mark.parametrize("case", ["scale", "window", "window to both sides"])
def test_keywords_mean_what_they_mean_to_jax(case):
    got, want = of_both(lambda attend: attend(*operands(), **CASES[case]))
    assert error(got, want) <= TOLERANCE["float32"].value


def test_derivatives_of_any_order_and_direction():
    """Forward mode, reverse mode, and each of the other; under `vmap` over the bias alone."""
    case = "bias, mask, causal"
    query, key, value = operands()

    def compute(attend):
        of = loss(attend, case)
        gradient = jax.grad(of, (0, 3))
        push = lambda fn: jax.jvp(fn, (query, bias_of(case)), (key.sum() * query, bias_of(case)))[1]  # noqa: E731
        return (
            push(lambda q, b: of(q, key, value, b)),
            push(lambda q, b: gradient(q, key, value, b)),
            jax.grad(lambda q: jnp.sum(gradient(q, key, value, bias_of(case))[0] ** 2))(query),
            jax.vmap(gradient, (None, None, None, 0))(query, key, value, jnp.stack([bias_of(case), -bias_of(case)])),
        )

    got, want = of_both(compute)
    assert error(got, want) <= TOLERANCE["float32"].gradient


def test_without_a_batch_and_one_head_for_all():
    query, key, value = (x[0] for x in operands(heads=1))
    got, want = of_both(lambda attend: attend(query, key, value))
    assert error(got, want) <= TOLERANCE["float32"].value
    assert got.shape == query.shape


def test_rows_that_a_bias_masks_throughout():
    """A float32 log-sum-exp of -1e9 would have lost the logits."""
    query, key, value = operands()
    bias = np.zeros((B, 1, T, T), np.float32)
    bias[:, :, :4], bias[:, :, 5] = -1e9, -np.inf

    def compute(attend):
        given = jnp.asarray(bias) if attend is dot_product_attention else None
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(attend(*args, given))), (0, 1, 2))(query, key, value)

    assert error(*of_both(compute)) < 1e-4


# Under autocast.


def model(params, x, **kwargs):
    query, key, value = jnp.split((x @ params["in"]).reshape(*x.shape[:2], 3 * N, H), 3, axis=2)
    return x + dot_product_attention(query, key, value, **kwargs).reshape(x.shape) @ params["out"]


def model_loss(params, x, **kwargs):
    return jnp.mean(model(params, x, **kwargs) ** 2)


PARAMS = {"in": draw(N * H, 3 * N * H, scale=0.25), "out": draw(N * H, N * H, scale=0.25)}
X = draw(B, T, N * H)


@functools.cache
def gradient_in_float32(fn):
    """The gradient of `model_loss` or `stacked` in float32."""
    return jax.jit(jax.grad(fn))(PARAMS if fn is model_loss else STACK, X)


def equations(jaxpr, found=None):
    """The equations of attention in a program and in the programs inside of it."""
    found = [] if found is None else found
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name.startswith("jmp_attention"):
            found.append(eqn)
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                equations(inner, found)
    return found


def stacked(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (model(w, x), None), x, params)[0] ** 2)


def remat(params, x):
    return jnp.mean(jax.checkpoint(model)(params, x) ** 2)


STACK = jax.tree.map(lambda w: np.stack([w, w]), PARAMS)
PLACES = {
    # name: (a function, the same as written, its parameters)
    "plain": (model_loss, model_loss, PARAMS),
    "scan": (stacked, stacked, STACK),
    "remat": (remat, model_loss, PARAMS),
    "scan of remat": (
        lambda w, x: jnp.mean(jax.lax.scan(lambda x, w: (jax.checkpoint(model)(w, x), None), x, w)[0] ** 2),
        stacked,
        STACK,
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ["of a gradient", "differentiated"])
def test_autocast_narrows_the_whole_attention(place, order):
    fn, written, params = PLACES[place]
    gradient = autocast(jax.grad(fn), "mixed_float16") if order == "of a gradient" else None
    traced = jax.jit(gradient or jax.grad(autocast(fn, "mixed_float16"))).trace(params, X)
    found = equations(traced.jaxpr)
    assert {eqn.primitive.name for eqn in found} == set(PRIMITIVES)
    for eqn in found:
        floating = [var.aval.dtype for var in (*eqn.invars, *eqn.outvars)]
        assert floating.count(jnp.float32) == 1  # the log-sum-exp
        assert floating.count(jnp.float16) == len(floating) - 1
    shapes = {v.aval.shape for eqn in traced.jaxpr.eqns for v in eqn.outvars}
    assert not any(shape[-2:] == (T, T) for shape in shapes)
    got = traced.lower().compile()(params, X)
    assert error(got, gradient_in_float32(written)) <= TOLERANCE["float16"].gradient


def test_the_log_sum_exp_crosses_to_the_backward_pass_as_it_is():
    """Its rounding to 16 bits would be a relative error of every weight."""
    found = equations(jax.make_jaxpr(autocast(jax.grad(model_loss), "mixed_bfloat16"))(PARAMS, X))
    forward, backward = (next(eqn for eqn in found if eqn.primitive.name == name) for name in PRIMITIVES)
    assert backward.invars[-2] is forward.outvars[1]


def test_under_vmap_and_on_eight_devices():
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    x = draw(16, T, N * H)
    want = jax.jit(jax.grad(model_loss))(PARAMS, x)
    each = jax.jit(jax.vmap(autocast(jax.grad(model_loss), "mixed_bfloat16"), (None, 0)))(PARAMS, x[:, None])
    means = jax.tree.map(lambda g: np.asarray(g).mean(0), each)
    assert error(means, want) <= TOLERANCE["bfloat16"].gradient
    for check_vma in (True, False):
        value_and_grad = jmp.value_and_grad(model_loss, "mixed_bfloat16", axis_name="data")
        specs = PartitionSpec(), PartitionSpec("data")
        step = jax.shard_map(
            lambda w, x, f=value_and_grad: f(w, x)[1],
            mesh=mesh,
            in_specs=specs,
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        assert error(jax.jit(step)(PARAMS, x), want) <= TOLERANCE["bfloat16"].gradient


def test_a_shared_bias_in_a_shard_map_has_the_gradient_of_all_devices():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,))
    bias, (query, key, value) = draw(1, N, T, T), operands()

    def total(bias, query, key, value):
        return jax.lax.psum(jnp.sum(jnp.sin(dot_product_attention(query, key, value, bias))), "data")

    specs = (PartitionSpec(), *[PartitionSpec("data")] * 3)
    mapped = jax.shard_map(jax.grad(total), mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    _, _, (*_, want) = written_out(query, key, value, ALL, bias)
    assert error(jax.jit(mapped)(bias, query, key, value), want) <= TOLERANCE["float32"].gradient


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_are_those_of_the_same_attention_written_out(dtype):
    """Errors of output and gradient against float64, over seeds, rows that attend to nothing included."""
    mask = CASES["mask"]["mask"]

    def errors(attend):
        def fn(query, key, value):
            of = lambda *args: attend(*args, mask=mask)  # noqa: E731
            gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(of(*args))), (0, 1, 2))
            return of(query, key, value), gradients(query, key, value)

        run, found = jax.jit(autocast(fn, f"mixed_{dtype}")), []
        for seed in range(0, 40, 4):
            got, (out, _, (*gradients, _)) = run(*operands(seed)), written_out(*operands(seed), mask)
            want = out, tuple(gradients)
            found.append([error(got[0], want[0]), error(got[1], want[1])])
        return np.median(found, axis=0)

    ours, plain = errors(dot_product_attention), errors(jax.nn.dot_product_attention)
    assert np.all(ours <= 1.1 * plain), (ours, plain)


def written_out(query, key, value, mask, bias: Any = 0.0, scale=H**-0.5, rows: Any = True):
    """Output, log-sum-exp, and the gradients of the sum of the output's sines, the bias's last; in NumPy.

    `rows` selects the rows of the query over which the sum is taken.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    groups, bias = N // key.shape[2], np.array(bias, np.float64, ndmin=4)
    keys, values = (np.repeat(x, groups, axis=2) for x in (key, value))
    logits = scale * np.einsum("btnh,bsnh->bnts", query, keys) + bias
    logits = np.where(mask, logits, np.where(mask.any(-1, keepdims=True), -np.inf, 0))
    lse = np.logaddexp.reduce(logits, axis=-1)
    weights = np.exp(logits - lse[..., None])
    out = np.where(rows, np.einsum("bnts,bsnh->btnh", weights, values), 0)
    of_out = np.where(rows, np.cos(out), 0)
    of_weights = np.einsum("btnh,bsnh->bnts", of_out, values)
    of_logits = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    of_logits = np.where(mask, of_logits, 0)
    of_bias = of_logits.sum(tuple(axis for axis in range(4) if bias.shape[axis] == 1), keepdims=True)
    of_logits = scale * of_logits
    of_query = np.einsum("bnts,bsnh->btnh", of_logits, keys)
    of_key = np.einsum("bnts,btnh->bsnh", of_logits, query)
    of_value = np.einsum("bnts,btnh->bsnh", weights, of_out)
    sums = lambda x: x.reshape(*x.shape[:2], -1, groups, H).sum(3)  # noqa: E731
    return out, lse, (of_query, sums(of_key), sums(of_value), of_bias)


def written_out_case(case, query, key, value):
    """(output, gradients); the bias's gradient only if the case has a bias."""
    given, mask, rows = CASES[case], ALL, True
    distance = np.arange(T)[:, None] - np.arange(T)
    left, right = np.broadcast_to(given.get("local_window_size", (T, T)), 2)
    mask = np.asarray(given.get("mask", ALL)) & (distance <= left) & (-distance <= right)
    if given.get("is_causal"):
        mask = mask & (distance >= 0)
    if "key_value_seq_lengths" in given:
        mask = mask & (np.arange(T) < np.asarray(given["key_value_seq_lengths"])[:, None, None, None])
    if "query_seq_lengths" in given:
        rows = (np.arange(T) < np.asarray(given["query_seq_lengths"])[:, None])[..., None, None]
    bias = np.asarray(given.get("bias", 0.0))
    out, _, gradients = written_out(query, key, value, mask, bias, given.get("scale", H**-0.5), rows)
    return out, gradients if "bias" in given else gradients[:3]


LEFT_PADDING = np.where(np.arange(T) < 3, -1e9, 0.0).astype(np.float32)[None, None, None]
CAUSAL = np.tril(np.ones((T, T), bool))[None, None]
EXTREME = {
    "padding on the left, causal": (LEFT_PADDING, CAUSAL),
    "padding where a mask is": (LEFT_PADDING, np.arange(T)[None, None, None] < 3),
    "large": (np.full((1, 1, 1, T), 1e8, np.float32), CAUSAL),
    "beyond float16": (np.where(np.arange(T) < 4, 1e5, 1e5 - 1).astype(np.float32)[None, None, None], CAUSAL),
    "-inf": (np.where(np.arange(T) < 3, -np.inf, 0.0).astype(np.float32)[None, None, None], ALL),
}


@pytest.mark.parametrize("case", EXTREME)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_biases_of_any_size(case, dtype):
    """A large bias neither rounds the log-sum-exp, nor ties with masked positions, nor is infinite in float16.

    A row of which all allowed positions have a bias of -1e9 has the softmax of its logits.
    """
    bias, mask = EXTREME[case]

    def fn(query, key, value, bias):
        extras: Any = {"is_causal": True} if mask is CAUSAL else {"mask": jnp.asarray(mask).reshape(1, 1, -1, T)}
        of = lambda q, k, v: dot_product_attention(q, k, v, bias, **extras)  # noqa: E731
        gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(of(*args))), (0, 1, 2))
        return of(query, key, value), gradients(query, key, value)

    run = autocast(fn, "mixed_float16") if dtype == "float16" else fn
    got = jax.jit(run)(*operands(), jnp.asarray(bias))
    out, _, (*gradients, _) = written_out(*operands(), mask, bias)
    assert error(got, (out, tuple(gradients))) <= TOLERANCE[dtype].gradient


@pytest.mark.parametrize("scale", [2000.0, np.float32(2000.0), "traced"])
def test_a_scale_of_any_kind(scale):
    """Also where a float16 query times the scale would be infinite; and the derivative with respect to the scale."""
    query, key, value = (np.asarray(x) * factor for x, factor in zip(operands(), (100, 1 / 4000, 1 / 40), strict=True))

    def fn(scale):
        return jnp.sum(jnp.sin(dot_product_attention(query, key, value, scale=scale)))

    want, negative = (np.sum(np.sin(written_out(query, key, value, ALL, 0.0, s)[0])) for s in (2000.0, -2000.0))
    traced = jax.jit(autocast(jax.jit(fn), "mixed_float16"))
    got = traced(jnp.float32(2000.0)) if scale == "traced" else fn(scale)
    assert abs(got - want) <= 2e-2 * abs(want)
    assert abs(traced(jnp.float32(-2000.0)) - negative) <= 2e-2 * abs(negative)
    assert np.isfinite(float(jax.jit(jax.grad(fn))(0.0)))


def test_what_a_mask_hides_in_float64_has_no_weight_however_large_its_logit():
    with jax.enable_x64(True):
        query, value = np.ones((1, 1, 1, 1)), np.array([1.0, 2.0]).reshape(1, 2, 1, 1)
        key = np.array([-500.0, 500.0]).reshape(1, 2, 1, 1)
        got = dot_product_attention(query, key, value, mask=np.array([[True, False]]))
        assert got.dtype == np.float64 and got.item() == 1


def test_by_hand_in_16_bits_the_bias_keeps_a_dtype_of_its_own():
    """On CUDA, too, where the kernel returns the bias's gradient in the query's dtype; lowered, not run."""
    low = [x.astype(jnp.float16) for x in operands()]
    total = lambda bias, q, k, v: jnp.sum(dot_product_attention(q, k, v, bias)).astype(jnp.float32)  # noqa: E731
    fn = jax.jit(jax.grad(total))
    assert fn(draw(1, N, T, T), *low).dtype == jnp.float32
    text = fn.trace(draw(1, N, T, T), *low).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


def test_no_keys_no_implicit_ranks_and_numpy_integers():
    query, key, value = operands()
    assert not np.any(dot_product_attention(query, key[:, :0], value[:, :0]))
    with jax.numpy_rank_promotion("raise"):
        attend = functools.partial(dot_product_attention, is_causal=True, query_seq_lengths=LENGTHS)
        jax.eval_shape(jax.grad(lambda query: jnp.sum(attend(query, key, value))), query)
    sizes: Any = (np.int64(3), np.int64(0))
    window, want = of_both(lambda attend: attend(query, key, value, local_window_size=sizes))
    assert error(window, want) <= TOLERANCE["float32"].value


def test_a_float16_bias_of_minus_1e9_masks():
    """The 16-bit copy of the bias is minus infinity; nothing becomes NaN, and no gradient is lost."""
    bias = jnp.asarray(np.where(MASK, 0, -1e9).astype(np.float32))
    gradient = autocast(jax.grad(lambda w, x, bias: model_loss(w, x, bias=bias)), "mixed_float16")
    got = jax.jit(gradient)(PARAMS, X, bias)
    rows = np.where(MASK | ~MASK.any(-1, keepdims=True), 0, -1e9).astype(np.float32)
    want = jax.jit(jax.grad(lambda w, x: model_loss(w, x, bias=jnp.asarray(rows))))(PARAMS, X)
    assert error(got, want) <= TOLERANCE["float16"].gradient


def test_full_precision_and_edits_keep_it_in_float32():
    rules = jmp.DEFAULT_RULES.replace(dict.fromkeys(PRIMITIVES, "high"))
    whole = jmp.full_precision(dot_product_attention)
    for fn in (
        autocast(lambda q, k, v: dot_product_attention(q, k, v), "mixed_float16", rules=rules),
        autocast(lambda q, k, v: whole(q, k, v), "mixed_float16"),
    ):
        (equation,) = equations(jax.make_jaxpr(fn)(*operands()))
        assert {var.aval.dtype for var in equation.invars} == {np.dtype(np.float32)}


def test_queries_known_to_be_beyond_float16_run_in_float32():
    huge = lambda q, k, v: dot_product_attention(jnp.full_like(q, 1e6), k, v)  # noqa: E731
    (equation,) = equations(jax.make_jaxpr(autocast(huge, "mixed_float16"))(*operands()))
    assert equation.invars[0].aval.dtype == jnp.float32
    found = explain(huge, "mixed_float16")(*operands()).operations
    assert [op.reason for op in found if op.primitive == "jmp_attention"] == [
        "some of its numbers are infinite in float16"
    ]


def test_a_bias_known_to_be_beyond_float16_masks_in_16_bits():
    masked = lambda q, k, v: dot_product_attention(q, k, v, bias=jnp.where(MASK, 0, -1e9))  # noqa: E731
    (equation,) = equations(jax.make_jaxpr(autocast(masked, "mixed_float16"))(*operands()))
    assert equation.invars[0].aval.dtype == jnp.float16


# What it says.


def test_explain_says_which_attention_is_fused_and_why_not():
    def reason(**kwargs):
        found = explain(functools.partial(model_loss, **kwargs), "mixed_float16")(PARAMS, X)
        return next(op for op in found.operations if op.primitive == "jmp_attention")

    fused = reason(is_causal=True)
    assert fused.reason == "fused by cuDNN on GPUs from Ampere on"
    assert "test_attention.py" in fused.source and "(model)" in fused.source
    assert (fused.rule, fused.dtype, fused.flops) == ("low", "float16", 2 * 2 * B * T * T * N * H)
    assert reason(local_window_size=4).reason == (
        "in jax.numpy, every sum in float32: cuDNN has no window to the right"
    )


def test_explain_compares_how_many_queries_and_keys_there_are():
    query, key, value = operands()
    attend = functools.partial(dot_product_attention, is_causal=True)
    found = explain(lambda q, k, v: attend(q, k, v), "mixed_float16")(query, key[:, :8], value[:, :8])
    (reason,) = [op.reason for op in found.operations if op.primitive == "jmp_attention"]
    assert reason.endswith("equal lengths, and these are 16 and 8")


LIMITS = {
    "size": (((B, T, N, 12), (B, T, N, 12)), {}, {}, "heads of a multiple of 8 up to 256, and these have 12"),
    "large": (((B, T, N, 264), (B, T, N, 264)), {}, {}, "and these have 264"),
    "odd": (((B, 15, N, 8), (B, 16, N, 8)), {"mask": (B, 1, 15, 16)}, {}, "even lengths, and these are 15 and 16"),
    "lengths": (((B, 8, N, 8), (B, 16, N, 8)), {}, {"is_causal": True}, "equal lengths, and these are 8 and 16"),
    "window": (((B, T, N, 8), (B, T, N, 8)), {}, {"window": (2, 2)}, "no window to the right"),
    "both": (((B, T, N, 8),) * 2, {"key_value_seq_lengths": (B,)}, {"window": (2, 0)}, "a window and lengths"),
    "odd keys": (((B, 16, N, 8), (B, 15, N, 8)), {"bias": (B, 1, 16, 15)}, {}, "even lengths, and these are 16 and 15"),
    "window, lengths": (((B, 8, N, 8), (B, 16, N, 8)), {}, {"window": (2, 0)}, "equal lengths, and these are 8 and 16"),
    "both, queries": (((B, T, N, 8),) * 2, {"query_seq_lengths": (B,)}, {"window": (2, 0)}, "a window and lengths"),
    "empty": (((0, T, N, 8), (0, T, N, 8)), {}, {}, "it is empty"),
    "symbolic": (((*jax.export.symbolic_shape("b"), T, N, 8),) * 2, {}, {}, "its dimensions are symbolic"),
    "fused": (((B, T, N, 64), (B, T, 1, 64)), {"bias": (1, N, T, T)}, {"window": (2, 2), "is_causal": True}, None),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_what_cudnn_takes(limit):
    shapes, extras, fields, want = LIMITS[limit]
    query, key, *rest = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in (*shapes, *extras.values()))
    got = _cudnn.why_not_fused(query, key, rest, Settings(tuple(extras), **fields))
    assert got is None if want is None else want in got


@pytest.mark.parametrize("size, name", [(8, "Ampere"), (128, "Ampere"), (136, "Hopper"), (256, "Hopper")])
def test_from_which_gpus_on_heads_are_fused(size, name):
    assert _cudnn.generation(jax.ShapeDtypeStruct((B, T, N, size), jnp.float16)) == name


def test_what_is_lowered_for_a_gpu_that_is_not_there():
    """It is lowered as for the oldest GPU that has the kernels, and never in float32."""
    for size, dtype, fused in (
        (128, jnp.float16, True),
        (136, jnp.float16, False),
        (12, jnp.float16, False),
        (128, jnp.float32, False),
    ):
        x = jax.ShapeDtypeStruct((B, T, N, size), dtype)
        text = jax.jit(dot_product_attention).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
        assert ("__cudnn$fmha" in text) is fused


def test_dropout_zeroes_its_share_of_the_weights_and_is_planned_like_any_code():
    query, key, value = operands(heads=N)
    value = np.broadcast_to(np.eye(T, dtype=np.float32)[None, :, None, :H], value.shape)
    run = functools.partial(dot_product_attention, query, key, value, dropout_rate=0.25)
    outs = np.asarray(jax.jit(jax.vmap(lambda key: run(dropout_key=key)))(jax.random.split(jax.random.key(0), 400)))
    plain = written_out(query, key, value, ALL)[0]
    assert abs((outs == 0).mean() - 0.25) < 0.01
    np.testing.assert_allclose(outs.mean(0), plain, atol=6 * 0.6 * plain.max() / 20)
    kept = outs != 0
    np.testing.assert_allclose(outs[kept], np.broadcast_to(plain, outs.shape)[kept] / 0.75, rtol=1e-5)


# Emulation of the fused kernels.


class EmulatedForward:
    """cuDNN's forward pass, as documented."""

    @staticmethod
    def logits(query, key, bias, query_lengths, key_lengths, params):
        groups = query.shape[2] // key.shape[2]
        logits = jnp.einsum("btnh,bsnh->bnts", *(x.astype(jnp.float32) for x in (query, jnp.repeat(key, groups, 2))))
        logits = logits * params["scale"]
        if params["variadic_args"][0]:
            assert bias.dtype == query.dtype and bias.shape[2:] == logits.shape[2:]
            logits = logits + bias.astype(jnp.float32)
        row, column = jnp.arange(logits.shape[2])[:, None], jnp.arange(logits.shape[3])
        inside, kind = jnp.ones(logits.shape, bool), params["mask_type"].name
        if "CAUSAL" in kind:
            inside &= row >= column
        if params["sliding_window_length"]:
            assert kind == "CAUSAL"
            inside &= row - column < params["sliding_window_length"]
        if "PADDING" in kind:
            inside &= (row < query_lengths[:, None, None, None]) & (column < key_lengths[:, None, None, None])
        return jnp.where(inside, logits, -jnp.inf)

    @classmethod
    def bind(cls, query, key, value, bias, query_lengths, key_lengths, *rest, is_training, **params):
        assert is_training and query.dtype == key.dtype == value.dtype and query.dtype.itemsize == 2
        logits = cls.logits(query, key, bias, query_lengths, key_lengths, params)
        top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30)
        weights = jnp.exp(logits - top)
        total = jnp.sum(weights, axis=-1)
        values = jnp.repeat(value, query.shape[2] // key.shape[2], 2).astype(jnp.float32)
        out = jnp.einsum("bnts,bsnh->btnh", weights.astype(query.dtype).astype(jnp.float32), values)
        out = out / jnp.moveaxis(total, 1, 2)[..., None]  # NaN where nothing is attended to: not documented
        return out.astype(query.dtype), top[..., 0] + jnp.log(total)


class EmulatedBackward:
    """cuDNN's backward pass, as documented."""

    @staticmethod
    def bind(query, key, value, bias, query_lengths, key_lengths, *rest, **params):
        *_, lse, out, gradient = rest
        wide = lambda x: x.astype(jnp.float32)  # noqa: E731
        groups = query.shape[2] // key.shape[2]
        logits = EmulatedForward.logits(query, key, bias, query_lengths, key_lengths, params)
        weights = jnp.where(jnp.isfinite(logits), jnp.exp(logits - lse[..., None]), 0)
        if "PADDING" in params["mask_type"].name:  # its results at padded positions are not documented
            beyond = jnp.arange(query.shape[1]) >= query_lengths[:, None]
            lost = beyond & jnp.any(gradient != 0, axis=(2, 3))
            empty = ~beyond & (key_lengths == 0)[:, None]
            weights = jnp.where((lost | empty)[:, None, :, None], jnp.nan, weights)
        keys, values = (wide(jnp.repeat(x, groups, 2)) for x in (key, value))
        low = lambda x: wide(x.astype(query.dtype))  # noqa: E731
        delta = jnp.moveaxis(jnp.sum(wide(gradient) * wide(out), -1), 1, 2)[..., None]
        of_logits = weights * (jnp.einsum("btnh,bsnh->bnts", wide(gradient), values) - delta)
        scaled = params["scale"] * low(of_logits)
        sums = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3).astype(key.dtype)  # noqa: E731
        found = [
            jnp.einsum("bnts,bsnh->btnh", scaled, keys).astype(query.dtype),
            sums(jnp.einsum("bnts,btnh->bsnh", scaled, wide(query))),
            sums(jnp.einsum("bnts,btnh->bsnh", low(weights), wide(gradient))),
        ]
        if params["variadic_args"][1]:
            found.append(_reference.sum_to(of_logits, bias.shape).astype(query.dtype))
        return found


@pytest.mark.parametrize("case", [case for case in CASES if case != "window to both sides"])
def test_the_kernels_are_called_for_the_same_attention(case, monkeypatch):
    """Called with our operands, masks and lengths, the kernels compute the attention of each case."""
    monkeypatch.setattr(_cudnn, "_FORWARD", EmulatedForward)
    monkeypatch.setattr(_cudnn, "_BACKWARD", EmulatedBackward)
    names = {"bias": "bias", "mask": "mask", "query_seq_lengths": "", "key_value_seq_lengths": ""}
    extras = {name: CASES[case][name] for name in names if name in CASES[case]}
    settings = Settings(
        tuple(extras),
        CASES[case].get("scale", H**-0.5),
        CASES[case].get("is_causal", False),
        CASES[case].get("local_window_size"),
        bias_has_gradient="bias" in extras,
    )
    low = [np.float16(x) for x in operands()]
    with np.errstate(over="ignore"):
        given = [*low, *(np.float16(x) if name == "bias" else x for name, x in extras.items())]
    assert _cudnn.why_not_fused(given[0], given[1], given[3:], settings) is None

    def run():
        out, lse = _cudnn.forward(*given, settings=settings)
        return out, _cudnn.backward(*given, out, lse, jnp.cos(out), settings=settings)

    got, want = jax.jit(run)(), written_out_case(case, *given[:3])
    assert error(got, want) <= TOLERANCE["float16"].value


def test_an_example_without_keys_averages_all_values_as_jax_does(monkeypatch):
    monkeypatch.setattr(_cudnn, "_FORWARD", EmulatedForward)
    monkeypatch.setattr(_cudnn, "_BACKWARD", EmulatedBackward)
    lengths = jnp.array([0, T], jnp.int32)
    given, settings = [*map(np.float16, operands()), lengths], Settings(EXTRAS[3:], H**-0.5)
    of = lambda *args: jax.nn.dot_product_attention(*args, key_value_seq_lengths=lengths)  # noqa: E731

    def run():
        out, lse = _cudnn.forward(*given, settings=settings)
        want, pull = jax.vjp(of, *operands())
        gradient = jnp.cos(want)
        return (out, _cudnn.backward(*given, out, lse, low(gradient), settings=settings)), (want, pull(gradient))

    low = lambda x: x.astype(jnp.float16)  # noqa: E731
    got, want = jax.jit(run)()
    assert error(got, want) <= TOLERANCE["float16"].gradient


def test_lengths_that_are_not_given_are_all(monkeypatch):
    query, key = (jax.ShapeDtypeStruct((B, length, N, H), jnp.float16) for length in (8, T))
    for name, want in ((EXTRAS[3], ([8, 8], LENGTHS)), (EXTRAS[2], (LENGTHS, [T, T]))):
        (_, *lengths, _, _, _, _), _ = _cudnn._arguments(query, key, [LENGTHS], Settings((name,)))
        np.testing.assert_array_equal(lengths, want)


def test_lengths_make_no_bias_for_each_example():
    query, key = (jax.ShapeDtypeStruct((B, T, N, H), jnp.float16) for _ in range(2))
    settings = Settings((EXTRAS[0], EXTRAS[3]))
    (bias, *_), _ = _cudnn._arguments(query, key, [draw(1, N, T, T), LENGTHS], settings)
    assert bias.shape == (1, N, T, T)


def test_large_gradients_of_an_average(monkeypatch):
    """The gradients' sum over the positions is beyond float16's range, their mean is not."""
    monkeypatch.setattr(_cudnn, "_FORWARD", EmulatedForward)
    monkeypatch.setattr(_cudnn, "_BACKWARD", EmulatedBackward)
    given, settings = [*map(np.float16, operands()), np.zeros(B, np.int32)], Settings(EXTRAS[3:])
    gradient = np.full((B, T, N, H), 1e4, np.float16)

    def run(*given):
        return _cudnn.backward(*given, *_cudnn.forward(*given, settings=settings), gradient, settings=settings)[2]

    of_value = jax.jit(run)(*given)
    np.testing.assert_allclose(of_value, np.full((B, T, K, H), 1e4 * N / K), rtol=1e-3)


DIVIDED = {
    # name: (sharding of the query, heads of key, batch and heads of bias, shapes of query and key on a device)
    "batch": (PartitionSpec("data"), N, (1, 1), (1, T, N, H), (1, T, N, H)),
    "a bias for each example": (PartitionSpec("data"), N, (B, 1), (1, T, N, H), (1, T, N, H)),
    "heads": (PartitionSpec(None, None, "model"), N, (1, N), (B, T, N // 2, H), (B, T, N // 2, H)),
    "both, a bias for all": (PartitionSpec("data", None, "model"), 2, (1, 1), (1, T, N // 2, H), (1, T, 1, H)),
    "one head of keys": (PartitionSpec("data", None, "model"), 1, (1, N), (1, T, N // 2, H), (1, T, 1, H)),
    "sequences": (PartitionSpec(None, "model"), 2, (1, 1), (B, T, N, H), (B, T, 2, H)),
    "heads by two axes": (PartitionSpec(None, None, ("data", "model")), N, (1, 1), (B, T, 1, H), (B, T, 1, H)),
    "fewer heads of keys": (PartitionSpec(None, None, ("data", "model")), 2, (1, 1), (B, T, N, H), (B, T, 2, H)),
}


@pytest.mark.parametrize("kind", DIVIDED)
def test_divided_among_devices_it_is_the_same(kind):
    """With the reference in place of the kernels, on devices that each have a part of the query."""
    spec, heads, of_bias, local_query, local_key = DIVIDED[kind]
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    settings = Settings(("bias", "key_value_seq_lengths"), H**-0.5, is_causal=True, bias_has_gradient=True)
    given = [*operands(heads=heads), draw(*of_bias, T, T), LENGTHS]

    seen = []

    def forward(query, key, *rest, settings):
        seen.append((query.shape, key.shape))
        return _reference.forward(query, key, *rest, settings=settings)

    def run(forward, backward, *given):
        out, lse = forward(*given)
        return out, lse, backward(*given, out, lse, jnp.cos(out))

    shapes = tuple(x.shape for x in given)
    divided = [
        partitioned(forward, settings, shapes),
        partitioned(_reference.backward, settings, (*shapes, given[0].shape, (B, N, T), given[0].shape)),
    ]
    sharded = [jax.device_put(given[0], NamedSharding(mesh, spec)), *given[1:]]
    replicated = [sharded[0], *(jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for x in sharded[1:])]
    got = jax.jit(functools.partial(run, *divided))(*replicated)
    mask = CAUSAL & (np.arange(T) < np.asarray(LENGTHS)[:, None, None, None])
    out, lse, gradients = written_out(given[0], given[1], given[2], mask, given[3])
    shifted = lse - np.max(np.where(mask, given[3], -np.inf), axis=-1)  # minus the largest bias of the row
    assert error(got, (out, shifted, gradients)) <= TOLERANCE["float32"].gradient
    assert (local_query, local_key) in seen


@pytest.mark.parametrize("is_backward", [False, True])
def test_shardy_is_told_which_axes_are_one(is_backward):
    """Axes of one factor have one size; axes that correspond share a factor; an axis of size one shares none."""
    shape_of = {
        **{"query": (2, 16, 4, 8), "key": (2, 6, 12, 8), "value": (2, 6, 12, 8), "bias": (1, 4, 16, 6)},
        **{"mask": (2, 1, 16, 6), "query_seq_lengths": (2,), "key_value_seq_lengths": (2,)},
        **{"out": (2, 16, 4, 8), "lse": (2, 4, 16), "d_out": (2, 16, 4, 8)},
    }
    names, results = tuple(shape_of), ("query", "key", "value", "bias")
    if not is_backward:
        names, results = names[:-3], ("out", "lse")
    sides = [side.split(", ") for side in _rule(names, results, shape_of).split(" -> ")]
    sizes = [[shape_of[name] for name in each] for each in (names, results)]
    found = [
        (factor, size)
        for factors, shapes in zip(sides, sizes, strict=True)
        for of_one, shape in zip(factors, shapes, strict=True)
        for factor, size in zip(of_one.split(), shape, strict=True)
    ]
    known = {pair for pair in found if pair[1] != 1}
    assert len(known) == len(dict(known)) == len({size for _, size in known}) == 6
    ones = [factor for factor, size in found if size == 1]
    assert len(ones) == len({*ones} - {*dict(known)}) == 2 + is_backward


ORDER = np.arange(T)
DISTANCE = ORDER[None] - ORDER[:, None]
BANDS = {
    # name: (mask, other keywords, the causal flag and window that replace it, or None)
    "causal": (DISTANCE <= 0, {}, (True, None)),
    "window": ((DISTANCE <= 0) & (DISTANCE > -4), {}, (True, (3, 0))),
    "everything": (DISTANCE < T, {}, (False, None)),
    "everything that is causal": (DISTANCE < T, {"is_causal": True}, (True, None)),
    "both sides, causal": ((DISTANCE <= 1) & (DISTANCE > -3), {"is_causal": True}, (True, (2, 1))),
    "causal with lengths": (DISTANCE <= 0, {"key_value_seq_lengths": LENGTHS}, (True, None)),
    "window with lengths": ((DISTANCE <= 0) & (DISTANCE > -4), {"key_value_seq_lengths": LENGTHS}, None),
    "the past and the next": (DISTANCE <= 1, {}, None),
    "both sides": ((DISTANCE <= 1) & (DISTANCE > -3), {}, None),
    "holes": ((DISTANCE <= 0) & (ORDER != 5), {}, None),
    "a hole inside": ((DISTANCE <= 0) & ((ORDER[:, None] != 10) | (ORDER != 4)), {}, None),
    "two documents": ((DISTANCE <= 0) & (ORDER // 8 == ORDER[:, None] // 8), {}, None),
    "a row that ends early": ((DISTANCE <= 0) & ((ORDER[:, None] != 8) | (ORDER < 6)), {}, None),
    "nothing": (DISTANCE > T, {}, None),
}


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("known", [True, False])
def test_a_mask_of_known_numbers_becomes_the_window_that_has_a_kernel(band, known):
    mask, keywords, becomes = BANDS[band]

    def attend(query, key, value, traced):
        given = (mask if known else traced)[None, None]
        return dot_product_attention(query, key, value, mask=given, **keywords)

    (equation,) = equations(jax.make_jaxpr(attend)(*operands(), jnp.asarray(mask)))
    settings = equation.params["settings"]
    is_window = known and becomes is not None
    assert ("mask" in settings.extras) is not is_window
    wanted = becomes if is_window else (keywords.get("is_causal", False), None)
    assert (settings.is_causal, settings.window) == wanted
    query, key, _, *extras = (variable.aval for variable in equation.invars)
    assert _cudnn.why_not_fused(query, key, extras, settings) is None
    want = jax.nn.dot_product_attention(*operands(), mask=jnp.asarray(mask)[None, None], **keywords)
    assert error(attend(*operands(), jnp.asarray(mask)), want) <= TOLERANCE["float32"].gradient


def test_dropout_outside_jit_is_compiled_once():
    compiled: Any = _reference.with_dropout
    compiled.clear_cache()
    first, second = (
        dot_product_attention(*operands(), dropout_rate=0.5, dropout_key=jax.random.key(seed)) for seed in range(2)
    )
    assert compiled._cache_size() == 1 and not np.array_equal(first, second)


def test_explain_says_that_an_attention_with_dropout_is_not_fused():
    fn = functools.partial(model_loss, dropout_rate=0.5, dropout_key=jax.random.key(0))
    for place in (fn, jax.checkpoint(fn)):
        found = explain(jax.grad(place), "mixed_float16")(PARAMS, X).operations
        reasons = [op.reason for op in found if op.primitive == "dot_general"]
        assert sum("an attention with dropout, which cuDNN does not take" in reason for reason in reasons) >= 6


def test_a_bias_of_one_row_stays_one_row():
    """The bias is saved for the backward pass as it was passed, not broadcast to each example or position."""
    bias = draw(1, N, 1, T)
    fn = jax.grad(lambda w, x, b: model_loss(w, x, bias=b, is_causal=True, key_value_seq_lengths=LENGTHS))
    found = equations(jax.make_jaxpr(autocast(fn, "mixed_float16"))(PARAMS, X, bias))
    assert all(eqn.invars[3].aval.shape == bias.shape for eqn in found)
    assert not any(eqn.params["settings"].bias_has_gradient for eqn in found)


def test_a_mask_for_all_examples_of_a_vmap_stays_one():
    mask = jnp.asarray(MASK[1:])
    fn = jax.vmap(lambda query: dot_product_attention(query, *operands()[1:], mask=mask))
    (equation,) = equations(jax.make_jaxpr(fn)(draw(3, B, T, N, H)))
    assert equation.invars[3].aval.shape == mask.shape


def test_without_jit():
    with jax.disable_jit():
        got = dot_product_attention(*operands(), is_causal=True)
    assert error(got, written_out(*operands(), CAUSAL)[0]) <= TOLERANCE["float32"].value


# Wrong arguments.

REFUSED = {
    "integers": (
        lambda q, k, v: (q.astype(int), k, v),
        {},
        TypeError("`query` must be floating, got int32."),
    ),
    "rank": (
        lambda q, k, v: (q[0, 0], k, v),
        {},
        ValueError("`query` must have the shape [batch, length, heads, size], or no batch, got (4, 8)."),
    ),
    "dtypes": (
        lambda q, k, v: (q.astype(jnp.float16), k, v),
        {},
        TypeError(
            "`query`, `key` and `value` must have one dtype, got float16, float32 and float32; cast them to one."
        ),
    ),
    "dtype of the value": (
        lambda q, k, v: (q, k, v.astype(jnp.bfloat16)),
        {},
        TypeError(
            "`query`, `key` and `value` must have one dtype, got float32, float32 and bfloat16; cast them to one."
        ),
    ),
    "value": (
        lambda q, k, v: (q, k, v[:, 1:]),
        {},
        ValueError("`key` and `value` must have one shape, got (2, 16, 2, 8) and (2, 15, 2, 8)."),
    ),
    "batch": (
        lambda q, k, v: (q[:1], k, v),
        {},
        ValueError(
            "`query` and `key` must agree in batch and head size, got (1, 16, 4, 8) and (2, 16, 2, 8): "
            "[batch, length, heads, size] each."
        ),
    ),
    "size": (
        lambda q, k, v: (q[..., :4], k, v),
        {},
        ValueError(
            "`query` and `key` must agree in batch and head size, got (2, 16, 4, 4) and (2, 16, 2, 8): "
            "[batch, length, heads, size] each."
        ),
    ),
    "no heads": (
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        {},
        ValueError("`query` must have a multiple of the heads of `key`, got 4 and 0 heads."),
    ),
    "heads": (
        lambda q, k, v: (q[:, :, :3], k, v),
        {},
        ValueError("`query` must have a multiple of the heads of `key`, got 3 and 2 heads."),
    ),
    "bias": (
        lambda *args: args,
        {"bias": jnp.zeros((3, 1, 1, 1))},
        ValueError("`bias` must be broadcastable to [batch, heads, T, S] = (2, 4, 16, 16), got (3, 1, 1, 1)."),
    ),
    "axes of a bias": (
        lambda *args: args,
        {"bias": jnp.zeros((1, 1, 1, 1, 1))},
        ValueError("`bias` must be broadcastable to [batch, heads, T, S] = (2, 4, 16, 16), got (1, 1, 1, 1, 1)."),
    ),
    "a bias of booleans": (
        lambda *args: args,
        {"bias": jnp.ones((T, T), bool)},
        TypeError("`bias` must be real numbers, got bool; what masks is the `mask`."),
    ),
    "scale": (
        lambda *args: args,
        {"scale": jnp.ones(2)},
        ValueError("`scale` must be one number, got the shape (2,)."),
    ),
    "mask": (
        lambda *args: args,
        {"mask": jnp.zeros((T, T))},
        TypeError("`mask` must be boolean, got float32; what is added to the logits is the `bias`."),
    ),
    "length": (
        lambda *args: args,
        {"query_seq_lengths": jnp.zeros(3, jnp.int32)},
        ValueError("`query_seq_lengths` must be int32[2], a length for each example, got int32[3]."),
    ),
    "floating lengths": (
        lambda *args: args,
        {"key_value_seq_lengths": jnp.ones(2)},
        ValueError("`key_value_seq_lengths` must be int32[2], a length for each example, got float32[2]."),
    ),
    "a window of one boolean": (
        lambda *args: args,
        {"local_window_size": True},
        ValueError("`local_window_size` must be one number of positions or (left, right), got True."),
    ),
    "a window of fractions": (
        lambda *args: args,
        {"local_window_size": (1.5, 2)},
        ValueError("`local_window_size` must be one number of positions or (left, right), got (1.5, 2)."),
    ),
    "window": (
        lambda *args: args,
        {"local_window_size": (1, -1)},
        ValueError("`local_window_size` must be one number of positions or (left, right), got (1, -1)."),
    ),
    "rate": (
        lambda *args: args,
        {"dropout_rate": 1.5},
        ValueError("`dropout_rate` must be at least 0 and less than 1, got 1.5."),
    ),
    "a rate of one": (
        lambda *args: args,
        {"dropout_rate": 1.0, "dropout_key": jax.random.key(0)},
        ValueError("`dropout_rate` must be at least 0 and less than 1, got 1.0."),
    ),
    "key": (
        lambda *args: args,
        {"dropout_rate": 0.5},
        ValueError("`dropout_rate` is 0.5, which needs a `dropout_key`, such as `jax.random.key(step)`."),
    ),
}


@pytest.mark.parametrize("argument", REFUSED)
def test_wrong_arguments(argument):
    change, kwargs, error = REFUSED[argument]
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
        dot_product_attention(*change(*operands()), **kwargs)


@pytest.mark.parametrize("name", ["is_causal", "dropout_rate"])
def test_what_has_to_be_static(name):
    with pytest.raises(TypeError, match=f"^`{name}` must be known while tracing, got .*; make it a static argument"):
        jax.jit(lambda x: dot_product_attention(*operands(), **{name: x}))(0.5)


def test_it_is_exported_and_takes_any_batch():
    (batch,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, T, N * H), jnp.float32)
    exported = jax.export.export(jax.jit(autocast(jax.grad(model_loss), "mixed_float16")))(PARAMS, x)
    assert error(exported.call(PARAMS, X), gradient_in_float32(model_loss)) <= TOLERANCE["float16"].gradient


def test_every_combination_of_operands_has_a_name_for_each():
    from jmp_train._attention import _primitives, names_of_operands

    for extras in itertools.chain.from_iterable(itertools.combinations(("bias", "mask"), n) for n in range(3)):
        settings = Settings(extras, bias_has_gradient="bias" in extras)
        assert names_of_operands(_primitives.ATTENTION_BACKWARD, settings)[-3:] == ("out", "lse", "d_out")


def test_dropout_leaves_padding_zero():
    query, key, value = (np.ones((1, 4, 2, 8), np.float32) for _ in range(3))
    options = {"dropout_rate": 0.25, "dropout_key": jax.random.key(0), "query_seq_lengths": np.array([3])}
    out = np.asarray(jax.jit(lambda: dot_product_attention(query, key, value, **options))())
    assert not np.any(out[:, 3:]) and np.all(np.any(out[:, :3], axis=-1))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_bias_of_any_size_stays_above_what_masks(dtype):
    bias, mask = jnp.array([[[[-1e38, 0.0, 3.0]]]]), jnp.array([[[[True, True, False]]]])
    merged: Any = np.asarray(jax.jit(lambda: _reference.merged(bias, mask, mask, dtype)[0])())
    assert np.all(np.isfinite(merged)) and merged[..., 0] > merged[..., 2]


def test_the_log_sum_exp_of_large_logits():
    query, key, value = (np.array(x, np.float32).reshape(1, 2, 1, 1) for x in ([1, 2], [30, 40], [0, 1]))
    _, found = jax.jit(functools.partial(_reference.forward, settings=Settings()))(query, key, value)
    logits = query[0, :, 0] * key[0, :, 0].T
    np.testing.assert_allclose(found[0, 0], np.logaddexp.reduce(logits, axis=-1), rtol=1e-6)


def test_products_of_gradient_and_output_beyond_float16():
    given = [np.full((1, 2, 1, 8), x, np.float16) for x in (1, 1, 256, 512)]

    @jax.jit
    def run(query, key, value, gradient):
        out, lse = _reference.forward(query, key, value, settings=Settings())
        return _reference.backward(query, key, value, out, lse, gradient, settings=Settings())

    assert all(np.all(np.isfinite(x)) for x in run(*given))


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_bias_of_fewer_axes_has_the_last_ones(axes):
    """Also a bias of integers."""
    whole = np.arange(N * T * T).reshape(1, N, T, T) % 5
    bias = whole[(0,) * (4 - axes)]
    got = jax.jit(dot_product_attention)(*operands(), bias)
    assert error(got, written_out(*operands(), ALL, bias)[0]) <= TOLERANCE["float32"].value


@pytest.mark.parametrize("window", [(T - 2, 0), (T, T - 2)])
def test_a_window_that_excludes_one_pair(window):
    got, want = of_both(lambda attend: attend(*operands(), local_window_size=window))
    assert error(got, want) <= TOLERANCE["float32"].value


def test_a_known_mask_beside_a_window_of_ones_own():
    keywords: Any = {"mask": jnp.asarray(CAUSAL), "local_window_size": (3, 3)}
    got, want = of_both(lambda attend: attend(*operands(), **keywords))
    assert error(got, want) <= TOLERANCE["float32"].value


def test_a_causal_mask_of_unequal_lengths_stays_one():
    """There is no kernel with a window for unequal lengths."""
    query, key, value = operands()
    fn = lambda query: dot_product_attention(query, key, value, mask=CAUSAL[:, :, :8])  # noqa: E731
    (equation,) = equations(jax.make_jaxpr(fn)(query[:, :8]))
    settings, avals = equation.params["settings"], [variable.aval for variable in equation.invars]
    assert settings.extras == ("mask",) and _cudnn.why_not_fused(avals[0], avals[1], avals[3:], settings) is None


def test_what_is_recorded_of_lengths_and_precision():
    with jax.default_matmul_precision("highest"):
        fn = lambda *args: dot_product_attention(*args, query_seq_lengths=np.array([5, T], np.int16))  # noqa: E731
        (equation,) = equations(jax.make_jaxpr(fn)(*operands()))
    assert equation.params["settings"].precision == "highest" and equation.invars[3].aval.dtype == jnp.int32


def test_a_window_of_symbolic_lengths():
    (length,) = jax.export.symbolic_shape("t")
    shapes = [jax.ShapeDtypeStruct((B, length, *x.shape[2:]), x.dtype) for x in operands()]
    fn = jax.jit(functools.partial(dot_product_attention, local_window_size=3))
    assert error(jax.export.export(fn)(*shapes).call(*operands()), fn(*operands())) <= TOLERANCE["float32"].value


def test_a_known_mask_of_no_queries():
    query, key, value = operands()
    attend = jax.jit(lambda query: dot_product_attention(query, key, value, mask=np.ones((1, 1, 0, T), bool)))
    assert attend(query[:, :0]).shape == (B, 0, N, H)


def test_what_is_beyond_the_lengths_of_queries_reaches_no_gradient():
    lengths = jnp.array([5, 0], jnp.int32)
    query, *rest = operands()
    inside = (jnp.arange(T) < lengths[:, None])[..., None, None]

    def gradients(query):
        attend = functools.partial(dot_product_attention, query_seq_lengths=lengths)
        return jax.grad(lambda *given: jnp.sum(jnp.sin(attend(*given))), (0, 1, 2))(query, *rest)

    got, want = (jax.jit(gradients)(jnp.where(inside, query, beyond)) for beyond in (np.float32(np.nan), 0))
    assert error(got, want) == 0


def test_a_row_that_masks_everything_has_the_log_of_its_length():
    """In float32 the log would be lost beside -2**126, which masks; the kernels' backward pass reads their sum."""
    settings, mask = Settings(("bias", "mask")), np.arange(T)[:, None] != 3
    given = *operands(), 5 + np.asarray(draw(1, 1, T, T)), np.broadcast_to(mask, (1, 1, T, T))
    _, found = jax.jit(functools.partial(_reference.forward, settings=settings))(*given)
    np.testing.assert_allclose(found[:, :, 3], np.log(T), rtol=1e-6)


def test_a_known_mask_for_each_head_is_no_mask_of_positions():
    query, key, value = (x[:, :4] for x in operands(heads=N))
    mask = np.tril(np.ones((4, 4), bool))[None, :, None]  # of four heads, and four positions
    # Of a query that is traced: without `jit` the numbers of masks are not looked at.
    got, want = of_both(lambda attend: jax.jit(lambda query: attend(query, key, value, mask=mask))(query))
    assert error(got, want) <= TOLERANCE["float32"].value


def test_forward_derivatives_of_forward_derivatives():
    query, key, value = operands()

    def twice(attend):
        once = lambda q: jax.jvp(lambda q: attend(q, key, value), (q,), (query,))[1]  # noqa: E731
        return jax.jvp(once, (query,), (query[::-1],))[1]

    got, want = of_both(twice)
    assert error(got, want) <= TOLERANCE["float32"].gradient


def test_forward_derivatives_along_many_directions():
    query, key, value = operands()
    bias = draw(1, N, T, T)

    def tangents(attend):
        push = lambda q, b: jax.jvp(lambda *given: attend(given[0], key, value, given[1]), (query, bias), (q, b))[1]  # noqa: E731
        return jax.vmap(push, (0, None))(jnp.stack([query, query[::-1]]), bias)

    got, want = of_both(tangents)
    assert error(got, want) <= TOLERANCE["float32"].gradient


def test_a_cotangent_that_is_zero_by_its_type():
    query, key, value = operands()
    _, pullback = jax.vjp(lambda q: (dot_product_attention(q, key, value), q), query)
    (found,) = pullback((ad.Zero(jax.typeof(query)), query))
    np.testing.assert_array_equal(found, query)


@pytest.mark.parametrize("missing", ["_FORWARD", "_BACKWARD"])
def test_another_jax_may_have_no_kernels(missing, monkeypatch):
    monkeypatch.setattr(_cudnn, missing, None)
    x = jax.ShapeDtypeStruct((B, T, N, 64), jnp.float16)
    assert "JAX 0.10 to 0.12, and this is JAX" in str(_cudnn.why_not_fused(x, x, (), Settings()))
    monkeypatch.setattr(_cudnn, "_dispatch", None)
    _cudnn.needs_devices(None)  # there is nobody to tell


def test_on_which_devices_a_program_is_lowered():
    hopper = SimpleNamespace(compute_capability="9.0")
    for context, capability in (
        (SimpleNamespace(device_assignment=(hopper,)), (9, 0)),
        (SimpleNamespace(device_assignment=None, mesh=SimpleNamespace(_flat_devices_tuple=(hopper,))), (9, 0)),
        (SimpleNamespace(device_assignment=None), (8, 0)),
    ):
        lowered: Any = SimpleNamespace(module_context=SimpleNamespace(axis_context=context))
        assert _cudnn._capability(lowered) == capability
