"""Products that stay in float32 under a 16-bit policy have a precision; without it, GPUs would compute them in TF32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.scheduling_groups import scheduling_group
from jax.scipy.sparse.linalg import cg
from pass_tools import after, stages

import jmp_train as jmp
from jmp_train import DEFAULT_RULES, autocast, dot_product_attention, full_precision, get_policy
from jmp_train._attention import ATTENTION_TANGENT
from jmp_train._autocast.primitives import DOTS
from jmp_train._jaxpr import open_jaxpr, sub_jaxprs
from jmp_train.diagnostics import gpu_report

RNG = np.random.default_rng(0)
W = (RNG.normal(size=(32, 32)) / 8).astype(np.float32)
X = RNG.normal(size=(64, 32)).astype(np.float32)
HIGHEST = (lax.Precision.HIGHEST,) * 2
PRODUCTS = DOTS | {ATTENTION_TANGENT}


def layers(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))


def in_scope(w, x):
    with jax.named_scope("head"):
        return layers(w, x)


def convolution(w, x):
    return jnp.sum(lax.conv_general_dilated(x.reshape(1, 8, 8, 32), w[None, None], (1, 1), "SAME", (1, 1), (1, 1),
                                            ("NHWC", "HWIO", "NHWC")) ** 2)  # fmt: skip


def ragged(w, x):
    return jnp.sum(lax.ragged_dot(x, w[None], jnp.array([64])))


def scanned(w, x):
    return jnp.sum(lax.scan(jax.checkpoint(lambda c, _: (jnp.tanh(c @ w), None)), x, None, length=3)[0])


def branches(w, x):
    return jnp.sum(lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.sin(x @ w), x))


@jax.custom_vjp
def with_rule(w, x):
    return layers(w, x)


with_rule.defvjp(lambda w, x: (layers(w, x), (w, x)), lambda saved, g: (g * saved[0], g * saved[1] @ saved[0]))


def attention(w, x):
    query = (x @ w).reshape(2, 32, 4, 8)
    return jnp.sum(full_precision(dot_product_attention)(query, query, query))


def tangent(w, x):
    query = (x @ w).reshape(2, 32, 4, 8)
    return jax.jvp(dot_product_attention, (query, query, query), (query, query, query))[1].sum()


def solver(w, x):
    matrix = w @ w.T + 4 * jnp.eye(32)
    return jnp.sum(cg(lambda v: matrix @ v, x[0], tol=1e-5)[0] ** 2)


def until_small(w, x):
    return jnp.sum(lax.while_loop(lambda h: jnp.max(jnp.abs(h)) > 1e-3, lambda h: 0.1 * h @ w, x))


edit = DEFAULT_RULES.replace
CASES = {
    "region": (full_precision(layers), {}),
    "region with a loop": (full_precision(scanned), {}),
    "region with branches": (full_precision(branches), {}),
    "region with a derivative rule": (full_precision(with_rule), {}),
    "region in a loop": (lambda w, x: lax.fori_loop(0, 3, lambda _, h: full_precision(jnp.matmul)(h, w), x).sum(), {}),
    "scope": (in_scope, {"rules": DEFAULT_RULES.with_scopes({"head": "float32"})}),
    "edit, high": (layers, {"rules": edit({"dot_general": "high"})}),
    "edit, recorded": (layers, {"rules": edit({"dot_general": "recorded"})}),
    "edit, recorded, in a loop": (scanned, {"rules": edit({"dot_general": "recorded"})}),
    "edited scan": (scanned, {"rules": edit({"scan": "recorded"})}),
    "convolution": (convolution, {"rules": edit({"conv_general_dilated": "high"})}),
    "ragged": (ragged, {"rules": edit({"ragged_dot_general": "recorded"})}),
    "attention": (attention, {}),
    "attention's tangent": (tangent, {}),
    "attention's tangent in a region": (full_precision(tangent), {}),
    "solver": (solver, {}),
    "call with metadata": (full_precision(scheduling_group(name="1")(layers)), {}),
    "loop that products decide": (until_small, {}),
}
FORWARD_ONLY = {"loop that products decide", "attention's tangent"}


def products(jaxpr, found, also_kernels=False):
    """The products of a program and those inside it: primitive, dtype of the operands, precision."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            precision = eqn.params["settings"].precision if "settings" in eqn.params else eqn.params["precision"]
            found.append((eqn.primitive.name, eqn.invars[0].aval.dtype, precision))
        for inner in sub_jaxprs(eqn.params) if also_kernels or eqn.primitive.name != "pallas_call" else ():
            products(open_jaxpr(inner), found, also_kernels)
    return found


def wide_products(fn, policy, args, **options):
    found = products(jax.make_jaxpr(autocast(fn, policy, **options))(*args).jaxpr, [])
    return [(name, precision) for name, dtype, precision in found if dtype == np.float32]


@pytest.mark.parametrize("case", CASES)
def test_what_stays_in_float32_is_no_tf32(case):
    fn, options = CASES[case]
    for program in (fn, *([] if case in FORWARD_ONLY else [jax.grad(fn)])):
        wide = wide_products(program, "mixed_float16", (W, X), **options)
        assert wide and {precision for _, precision in wide} <= {HIGHEST, "highest"}
        got, want = (jax.jit(f)(W, X) for f in (autocast(program, "mixed_float16", **options), program))
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("case", ["region", "scope", "edit, high", "convolution", "attention", "edited scan"])
@pytest.mark.parametrize("precision", ["default", "tensorfloat32"])
def test_the_precision_of_the_policy_holds(case, precision):
    fn, options = CASES[case]
    policy = get_policy("mixed_float16").replace(matmul_precision=precision)
    wide = wide_products(jax.grad(fn), policy, (W, X), **options)
    assert wide and not {HIGHEST, "highest"} & {precision for _, precision in wide}


def test_a_precision_of_its_own_holds():
    def fn(w, x):
        return full_precision(lambda x: jnp.dot(x, w, precision="default"))(x)

    assert wide_products(fn, "mixed_float16", (W, X)) == [("dot_general", (lax.Precision.DEFAULT,) * 2)]


def test_float32_policies_and_other_dtypes_are_left_alone():
    plain = jmp.Policy("float32", "float32", "float32")
    assert wide_products(full_precision(layers), plain, (W, X)) == [("dot_general", None)] * 2
    found = products(jax.make_jaxpr(autocast(full_precision(jnp.matmul), "mixed_float16"))(X, W + 0j).jaxpr, [])
    assert [precision for *_, precision in found] == [None]  # a complex one
    found = products(
        jax.make_jaxpr(autocast(full_precision(jnp.matmul), "mixed_float16"))(*map(np.int8, (X, W))).jaxpr, []
    )
    assert [precision for *_, precision in found] == [None]


def test_a_region_without_products_runs_the_program_that_was_recorded():
    region = full_precision(lambda w, x: jnp.sum(jnp.sin(w)) + jnp.sum(x))
    recorded, planned = (
        next(e for e in program.equations if e.name == "jit")
        for name, program in stages(region, W, X)
        if name in ("assign_dtypes", "without_tf32")
    )
    assert recorded.params == planned.params == {}


def test_only_products_of_float32_operands_are_given_a_precision():
    equations = after("without_tf32", lambda w, x: (x @ w, x @ x.T), W, X).equations
    narrow, square = (equation.params for equation in equations if equation.name == "dot_general")
    assert narrow == {"preferred_element_type": np.float16} and square == {"precision": HIGHEST}


def test_the_printed_program_shows_it():
    text = jmp.explain(lambda w, x: (x @ w, x @ x.T), "mixed_float16")(W, X).program()
    assert [line.split(" = ")[1].split()[0] for line in text.splitlines() if "dot_general" in line] == [
        "dot_general", "dot_general[highest]"
    ]  # fmt: skip


def test_planned_twice_it_is_planned_once():
    once = autocast(jax.grad(full_precision(layers)), "mixed_float16")
    assert wide_products(once, "mixed_float16", (W, X)) == [("dot_general", HIGHEST)] * 5


def test_rules_that_jax_calls_after_autocast_are_left_alone():
    jaxpr = jax.make_jaxpr(jax.grad(autocast(full_precision(with_rule), "mixed_float16")))(W, X)
    assert {precision for *_, precision in products(jaxpr.jaxpr, [])} == {None}


@pytest.mark.parametrize("mark", [full_precision, lambda fn: fn], ids=["in a region", "in none"])
def test_kernels_are_left_alone(mark):
    def kernel(x, w, out):
        out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct(X.shape, np.float32)
    call = mark(lambda w, x: pl.pallas_call(kernel, shape, interpret=True)(x, w))
    jaxpr = jax.make_jaxpr(autocast(call, "mixed_float16"))(W, X)
    assert [precision for *_, precision in products(jaxpr.jaxpr, [], also_kernels=True)] == [None]


def test_a_program_that_calls_share_stays_one():
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def net(w, x):
        for _ in range(8):
            x = layer(w, x)
        return jnp.sum(x)

    text = jax.jit(autocast(full_precision(net), "mixed_float16")).lower(W, X).as_text()
    assert text.count("func.func") == jax.jit(full_precision(net)).lower(W, X).as_text().count("func.func")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["region", "region with a loop", "scope", "edit, recorded", "convolution", "attention"]
)
def test_compiled_for_a_gpu_they_are_computed_in_float32(case):
    fn, options = CASES[case]
    units = gpu_report(jax.jit(autocast(jax.grad(fn), "mixed_float16", **options)))(W, X).unit_flops
    assert units["float32"] > 0 and "tf32" not in units
    assert gpu_report(jax.jit(jax.grad(fn)))(W, X).unit_flops["tf32"] > 0  # as JAX has it
