"""`gpu_report` for every named GPU: the units that multiply each dtype, and the programs that do not compile."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from battery_tools import compile_for_gpu, module_text

from jmp_train import autocast, dot_product_attention, explain
from jmp_train._diagnostics.gpu import get_gpu
from jmp_train._diagnostics.gpu._gpu_report import _notes
from jmp_train._diagnostics.gpu._kernels import kernels
from jmp_train.diagnostics import gpu_report, gpus, tensor_core_report

SIZE = 1024
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
TABLE = Path(__file__).parents[1] / "docs" / "guide" / "gpus.md"

# Published peak rates, dense, with accumulation in float32, in TFLOP/s: 8-bit floats (of the T4, A10, A100 and A6000,
# which have none, int8), 16 bits, TF32 (float32 on the T4), float32, float64.
PUBLISHED = {
    "T4": (130, 65, 8.1, 8.1, 0.253),
    "A10": (250, 125, 62.5, 31.2, 0.488),
    "A100": (624, 312, 156, 19.5, 19.5),
    "A6000": (309.7, 154.8, 77.4, 38.7, 0.6),
    "L4": (242, 121, 60, 30.3, 0.473),
    "L40S": (733, 362, 183, 91.6, 1.43),
    "RTX 4090": (330.3, 165.2, 82.6, 82.6, 1.29),
    "H100": (1979, 989, 494, 67, 67),
    "H200": (1979, 989, 494, 67, 67),
    "B200": (4500, 2250, 1125, 75, 37),
    "GB200": (5000, 2500, 1250, 80, 40),
    "RTX PRO 6000": (1008, 504, 252, 126, 1.97),
}


def product(dtype):
    out = jnp.int32 if dtype == "int8" else jnp.float32
    return lambda a, b: jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out)


def wide_product(x, y):
    return x.astype("float32") @ y.astype("float32")


def square(dtype):
    return jax.ShapeDtypeStruct((SIZE, SIZE), dtype)


def units(gpu):
    """The units that run a compiled product of each dtype."""
    found = []
    for dtype in DTYPES:
        report = gpu_report(product(dtype), gpu=gpu)(*[square(dtype)] * 2)
        (unit,) = report.unit_flops
        found.append(unit)
    return found


@pytest.mark.parametrize("name", gpus())
def test_named_rates_are_the_published_ones_and_near_those_of_their_description(name):
    """A described GPU has the advertised clock, not the clock at which Tensor Cores are rated."""
    gpu = get_gpu(name)
    rates = [rate / 1e12 for _, rate in gpu.rates]
    assert rates == pytest.approx(PUBLISHED[name], rel=0.03)
    described = get_gpu(gpu.target)
    assert described.capability == gpu.capability
    twice = 2 if name == "RTX 4090" else 1  # a consumer card adds in float32 at half the rate
    factors = (twice, twice, twice, 1, 1)
    ours = [rate / 1e12 / factor for (_, rate), factor in zip(described.rates, factors, strict=True)]
    assert ours == pytest.approx(rates, rel=0.1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA L40S", "L40S"),
        ("rtx4090", "RTX 4090"),
        ("GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("rtx pro 6000", "RTX PRO 6000"),
        ("h100", "H100"),
    ],
)
def test_names_as_people_write_them(text, name):
    assert get_gpu(text) is get_gpu(name)


@pytest.mark.parametrize(
    ("gpu", "dtypes", "unit"),
    [
        ("H200", ("float64", "float32"), "float64"),
        ("H200", ("complex128", "c128"), "float64"),
        ("H200", ("complex64", "float16"), "tf32"),
        ("H200", ("s8", "u8"), "8 bits"),
        ("H200", ("s16", "s16"), "float32"),
        ("H200", ("pred", "s8"), "8 bits"),
        ("A100", ("f8e4m3fn", "f8e5m2"), "16 bits"),
        ("A100", ("float8_e4m3fn", "float32"), "tf32"),
        ("A100", ("s8", "s8"), "8 bits"),
        ("T4", ("bf16", "f16"), "float32"),
        ("T4", ("f16", "f16"), "16 bits"),
    ],
)
def test_what_multiplies_operands_of_which_dtypes(gpu, dtypes, unit):
    assert get_gpu(gpu).unit(dtypes, is_strict=False) == unit


def test_turing_has_neither_tf32_nor_bfloat16():
    (row,) = tensor_core_report(jnp.matmul, gpu="T4")(square("float32"), square("float32")).products
    assert row.unit == "float32"
    (row,) = tensor_core_report(jnp.matmul, gpu="L4")(square("float32"), square("float32")).products
    assert row.unit == "tf32"
    for gpu, dtype, unit in (
        ("T4", "bfloat16", "float32"),
        ("A10", "bfloat16", "16 bits"),
        ("A100", "float8_e4m3fn", "16 bits"),
        ("L4", "float8_e4m3fn", "8 bits"),
    ):
        (row,) = tensor_core_report(product(dtype), gpu=gpu)(square(dtype), square(dtype)).products
        assert row.unit == unit


@pytest.mark.parametrize("name", ["V100", "NVIDIA P100"])
def test_volta_and_older_are_refused_with_the_reason(name):
    with pytest.raises(
        ValueError, match=f"no figures for Volta and older, such as {name!r}, for which the compiler of CUDA 13"
    ):
        gpu_report(jnp.sin, gpu=name)
    volta = get_gpu("T4").target.replace("major: 7 minor: 5", "major: 7 minor: 0").replace("Tesla T4", "Mine")
    with pytest.raises(ValueError, match=r"Volta and older, such as Mine of compute capability 7\.0; the oldest"):
        gpu_report(jnp.sin, gpu=volta)(jnp.ones(3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Tesla T4 has no bfloat16")
def test_the_table_of_the_documentation_is_what_is_compiled():
    rows = [f"| {name} | {' | '.join(units(name))} |" for name in gpus()]
    text = TABLE.read_text()
    assert all(row in text for row in rows), "\n".join(rows)


@pytest.mark.parametrize(
    ("fn", "gpu", "notes"),
    [(jnp.matmul, "T4", 1), (jnp.add, "T4", 0), (wide_product, "T4", 0), (jnp.matmul, "A10", 0)],
    ids=["T4", "add", "float32", "A10"],
)
def test_what_a_gpu_without_bfloat16_is_told_of(fn, gpu, notes):
    emitted = explain(fn, "float32")(square("bfloat16"), square("bfloat16")).emitted
    assert len(list(_notes(emitted, get_gpu(gpu)))) == notes


@pytest.mark.slow
def test_products_of_bfloat16_on_turing_are_warned_of():
    with pytest.warns(UserWarning, match="Tesla T4 has no bfloat16: .* use mixed_float16"):
        report = gpu_report(product("bfloat16"), gpu="T4")(*[square("bfloat16")] * 2)
    assert report.notes[0] in str(report)
    assert not gpu_report(product("float16"), gpu="T4")(*[square("float16")] * 2).notes


@pytest.mark.slow
def test_float8_is_float16_where_triton_converts_it():
    assert gpu_report(product("float8_e4m3fn"), gpu="H200")(*[square("float8_e4m3fn")] * 2).unit_flops == {
        "16 bits": 2 * SIZE**3
    }
    (kernel,) = gpu_report(product("float8_e4m3fn"), gpu="L40S")(*[square("float8_e4m3fn")] * 2).kernels
    assert "__cublas$lt$matmul$f8" in kernel.line


@pytest.mark.slow
def test_the_workspace_of_cublas_is_no_traffic():
    text = module_text(compile_for_gpu(product("float16"), square("float16"), square("float16"), gpu="T4"))
    (call,) = (kernel for kernel in kernels(text) if "__cublas" in kernel.line)
    assert re.search(r"s8\[\d{7,}\]", call.line)  # it has one
    assert (call.read, call.written) == (2 * 2 * SIZE**2, 4 * SIZE**2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T4", "A100", "L4", "B200", "RTX PRO 6000"])
def test_attention_is_fused_from_ampere_on(name):
    head = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.float32)
    fn = autocast(jax.grad(lambda x: jnp.sum(dot_product_attention(x, x, x))), "mixed_float16")
    report = gpu_report(fn, gpu=name)(head)
    assert sum("__cudnn$fmha" in kernel.line for kernel in report.kernels) == (0 if name == "T4" else 2)
