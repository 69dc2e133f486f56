"""`gpu_report` finds every fault planted here, with place and cause, and nothing in the correct code beside it."""

import jax
import jax.numpy as jnp
import pytest
from gpu_report_tools import adam_arguments, adam_step, array, f16, f32, report
from jax import lax

pytestmark = pytest.mark.slow


def raw_sum(x):
    return lax.reduce(x, x.dtype.type(0), lax.add, (0,))


def pool(x):
    return lax.reduce_window(x, x.dtype.type(0), lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")


def scatter_add(table, ids, rows):
    return table.at[ids].add(rows)


def accumulate(xs, steps=10):
    return lax.scan(lambda total, x: (total + jnp.tanh(x), None), jnp.zeros_like(xs[0]), xs)[0]


@pytest.mark.parametrize("dtype", [f16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("fn", "shapes", "kind"),
    [
        (raw_sum, [(4096, 64)], "reduce"),
        (pool, [(8, 32, 32, 16)], "reduce-window"),
        (lambda x: lax.cumsum(x, axis=1), [(512, 64)], "reduce-window"),
        (scatter_add, [(1000, 64), None, (512, 64)], "scatter"),
        (accumulate, [(10, 64)], "scan carry"),
    ],
    ids=["reduce", "reduce_window", "cumsum", "scatter-add", "loop"],
)
def test_sums_in_16_bits(fn, shapes, kind, dtype):
    def args(dtype):
        return [array(512, dtype=jnp.int32) if shape is None else array(*shape, dtype=dtype) for shape in shapes]

    found = report(fn, *args(dtype))
    assert {each.kind for each in found.sixteen_bit_sums} == {kind}
    assert all("test_gpu_faults.py" in each.source for each in found.sixteen_bit_sums)
    assert "\n16-bit sums:\n" in str(found)
    assert all(each.result.startswith(("f16", "bf16", "float16", "bfloat16")) for each in found.sixteen_bit_sums)
    assert report(fn, *args(f32)).sixteen_bit_sums == ()


def test_a_widened_convolution():
    def conv(x, kernel, wider=None):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=wider
        )

    args = array(8, 32, 32, 16, dtype=f16), array(3, 3, 16, 32, dtype=f16)
    (narrow,) = report(conv, *args).products
    (widened,) = report(lambda x, kernel: conv(x, kernel, f32), *args).products
    assert (narrow.kind, narrow.operands, narrow.unit) == ("convolution", ("f16", "f16"), "16 bits")
    assert (widened.operands, widened.unit) == (("f32", "f32"), "tf32")


def test_a_donated_buffer_that_meets_the_wrong_result():
    def swapped(carry, grads):
        params, state = adam_step(carry, grads)
        return state, params

    good = report(adam_step, *adam_arguments(), donate_argnums=0)
    bad = report(jax.jit(swapped, donate_argnums=0), *adam_arguments())
    assert good.copies == () and bad.bytes > good.bytes
    assert [(copy.times, copy.shape) for copy in bad.copies] == [(1, "f32[1024,1024]")] * 2
    assert {copy.cause for copy in bad.copies} == {
        f"result 0/0/{moment}/w is written over the donated argument {argument}, which is still read when it is "
        f"computed: donated buffers go to results of their shape in order. Return each new value where the old one "
        f"stood."
        for moment, argument in (("mu", "carry[0]['w']"), ("nu", "carry[1][0].mu['w']"))
    }
    assert "4194304" not in str(bad) and "Copies:" in str(bad)


def test_other_copies_and_donations():
    (swap,) = {
        copy.cause
        for copy in report(lambda a, b: (b + 1, a + 1), array(10**5), array(10**5), donate_argnums=(0, 1)).copies
        if "is overwritten" in copy.cause
    }
    assert swap == (
        "the donated argument b is overwritten by result 1 before it has been read by all: donated buffers go to "
        "results of their shape in order. Return each new value where the old one stood."
    )
    for fn, name in ((lambda a: a.astype(f16), "a f32[1000]"), (lambda a: (a.sum(),), "float32[1000]")):
        unused = report(fn, array(1000), donate_argnums=0)
        assert unused.unused_donations == (name,) and unused.memory.donated == 0
        assert f"unused donations    {name}: no result of that shape and dtype" in str(unused)
    looped = report(lambda x: lax.scan(lambda c, _: (jnp.sin(c @ c), None), x, length=10)[0], array(256, 256))
    assert [copy.cause for copy in looped.copies] == [
        "the argument x is not donated, and a loop or an update in place changes its copy. Donate it."
    ]
