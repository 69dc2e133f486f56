"""`gpu_report`: bytes and FLOPs equal counts by hand, on one and several devices, and the report is a value.

Tests that compile for a GPU are slow and need `.[gpu-report]`; tests of errors do not. Faults: `test_gpu_faults.py`.
"""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from gpu_report_tools import adam_arguments, adam_step, array, f16, f32, report
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jmp_train import explain, full_precision, get_loss_scale, value_and_grad, with_loss_scale
from jmp_train._diagnostics.gpu._compiled_products import CompiledProduct
from jmp_train._diagnostics.gpu._findings import Collective, Copy, Memory, NarrowSum, carried_sums, unused_donations
from jmp_train._diagnostics.gpu._gpus import UNITS, get_gpu
from jmp_train._diagnostics.gpu._kernels import Kernel
from jmp_train.diagnostics import GPUReport, gpu_report, tensor_core_report

slow = pytest.mark.slow
P = PartitionSpec


# Bytes and FLOPs, against counts by hand


@slow
def test_a_matrix_product():
    found = report(jnp.matmul, array(512, 256, dtype=f16), array(256, 1024, dtype=f16))
    assert found.bytes == 2 * (512 * 256 + 256 * 1024 + 512 * 1024)
    assert found.flops == 2 * 512 * 256 * 1024
    assert found.tensor_core_share == 1 and found.unit_flops == {"16 bits": found.flops}
    assert found.memory.arguments == 2 * (512 * 256 + 256 * 1024) and found.memory.results == 2 * 512 * 1024
    assert found.memory.peak == found.memory.arguments + found.memory.results + found.memory.temporary
    assert found.least_seconds == pytest.approx(found.bytes / 4.8e12)


@slow
def test_the_arithmetic_of_float32_products():
    wide = (array(256, 256), array(256, 256))
    assert report(jnp.matmul, *wide).unit_flops == {"tf32": 2 * 256**3}
    strict = report(lambda a, b: jnp.matmul(a, b, precision="highest"), *wide)
    assert strict.unit_flops == {"float32": 2 * 256**3} and strict.tensor_core_share == 0


@slow
@pytest.mark.parametrize(("dtype", "unit"), [(f16, "16 bits"), (f32, "tf32")])
def test_a_convolution_and_its_gradients(dtype, unit):
    def conv(x, kernel):
        return lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def both(x, kernel):
        y, transpose = jax.vjp(conv, x, kernel)
        return y, transpose(jnp.sin(y))

    found = report(both, array(8, 32, 32, 16, dtype=dtype), array(3, 3, 16, 32, dtype=dtype))
    forward = 2 * (8 * 16 * 16 * 32) * (3 * 3 * 16)
    assert [each.flops for each in found.products] == [forward] * 3
    assert found.unit_flops == {unit: 3 * forward}


@slow
def test_adam_moves_28_bytes_a_parameter():
    found = report(jax.jit(adam_step, donate_argnums=0), *adam_arguments())
    assert found.bytes / 1024**2 == pytest.approx(28, abs=0.01)
    assert found.copies == () and found.unused_donations == ()
    assert found.memory.donated == found.memory.results - 4 * 8  # all but the pointers of the result's tuple
    assert found.flops == 0 and found.tensor_core_share == 0


@slow
@pytest.mark.parametrize("steps", [10, 100])
def test_scans(steps):
    def loss(ws, x):
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].astype(f32))

    args = array(steps, 256, 256, dtype=f16), array(64, 256, dtype=f16)
    found = report(jax.grad(loss), *args)
    assert found.flops == steps * 3 * 2 * 64 * 256 * 256 == tensor_core_report(jax.grad(loss))(*args).flops
    assert found.unknown_loops == 0
    # A layer's weights are sliced out of the stack twice, and its gradient is stored in one: a read and a write each.
    weight = 2 * 256 * 256
    moved = [(kernel.read // weight, kernel.written // weight) for kernel in found.kernels if "dynamic" in kernel.line]
    assert moved.count((1, 1)) == 3
    # With the products, the two sums that they are split into and the activations: so much a step, for any number.
    assert found.bytes == pytest.approx(4.0e6 * steps, rel=0.05)


@slow
def test_a_lookup_reads_its_rows():
    found = report(lambda table, ids: 2 * table[ids], array(50_000, 256), array(64, dtype=jnp.int32))
    assert found.bytes == 64 * 4 + 2 * (64 * 256 * 4)


# Devices and targets


def mean_gradient(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.square((x @ w).astype(f32))))(w)


@slow
def test_shardings_reach_the_described_devices():
    """Shardings passed to the report, to `jit` and to `shard_map` name axes; the mesh is the report's."""
    args = array(64, 64, dtype=f16), array(512, 64, dtype=f16)
    specs = (P(), P("data"))
    mapped = jax.shard_map(
        lambda w, x: lax.pmean(mean_gradient(w, x), "data"), in_specs=specs, out_specs=P(), check_vma=False
    )
    for fn, options in (
        (mean_gradient, {"in_shardings": specs}),
        (jax.jit(mean_gradient, in_shardings=specs), {}),
    ):
        found = report(fn, *args, devices=8, **options)
        assert [(each.operation, each.dtypes, each.bytes) for each in found.collectives] == [
            ("all-reduce", ("f16",), 64 * 64 * 2)
        ]
        assert found.devices == 8 and found.flops == 2 * (2 * 64 * 64 * 512 // 8)
        assert found.memory.arguments == 2 * (64 * 64 + 512 * 64 // 8)
        assert "all-reduce" in {each.kind for each in found.sixteen_bit_sums}
        assert "all-reduce in f16, 8192 B" in str(found)
    assert [each.operation for each in _mapped(mapped, args).collectives] == ["all-reduce"]
    grid = report(mean_gradient, *args, devices={"a": 2, "b": 4}, in_shardings=(P(None, "b"), P("a")))
    assert grid.devices == 8 and grid.memory.arguments == 2 * (64 * 64 // 4 + 512 * 64 // 2)


def _mapped(mapped, args):
    return report(lambda w, x: mapped(w, x), *args, devices=8)


@slow
def test_a_mesh_of_this_machine_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = jax.jit(mean_gradient, in_shardings=NamedSharding(mesh, P()))
    message = (
        "`fn` names devices or a mesh of this machine, and the 8 described GPUs are no part of it. Leave the mesh out: "
        "write partition specs over the axes 'data', and shard_map without `mesh`; they meet the described mesh when "
        "the report is made, and jax.set_mesh's when you run."
    )
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        report(fn, array(64, 64), array(512, 64), devices=8)


@slow
@pytest.mark.parametrize("name", ["A100", "h100", "H200"])
def test_targets(name):
    found = report(jnp.matmul, array(256, 256, dtype=f16), array(256, 256, dtype=f16), gpu=name)
    assert found.gpu == f"NVIDIA {name.upper()}" and found.tensor_core_share == 1
    described = get_gpu(name).target.replace("NVIDIA", "My")
    assert report(jnp.sin, array(8), gpu=described).gpu == f"My {name.upper()}"


# Whole steps: Linen, NNX, plain trees


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(256)(nn.gelu(nn.Dense(512)(x)))


def train_step(loss_fn, policy):
    tx = with_loss_scale(optax.adam(1e-3))
    grad_fn = value_and_grad(loss_fn, policy)

    def step(params, opt_state, batch):
        loss, grads = grad_fn(params, batch, loss_scale=get_loss_scale(opt_state))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1)), tx


@slow
def test_two_policies_side_by_side():
    x = array(2048, 256)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.mean(jnp.asarray(Net().apply(params, x)).astype(f32) ** 2)

    found = []
    for policy in ("float32", "mixed_float16"):
        step, tx = train_step(loss_fn, policy)
        found.append(report(step, params, jax.eval_shape(tx.init, params), x))
    wide, mixed = found
    assert wide.tensor_core_share == 0 and mixed.tensor_core_share == 1
    assert mixed.copies == () and mixed.sixteen_bit_sums == () and mixed.bytes < wide.bytes
    difference = wide.compare(mixed, ("float32", "mixed_float16"))
    assert ("bytes moved", wide.bytes, mixed.bytes) in difference.rows
    header, *rows = str(difference).splitlines()
    assert header.split() == ["float32", "mixed_float16", "second", "/", "first"]
    assert len(rows) == len(difference.rows)
    values = difference.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert mixed.least_seconds < wide.least_seconds


@slow
def test_nnx_and_a_policy():
    model = nnx.Linear(256, 512, rngs=nnx.Rngs(0))

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    found = report(loss, model, array(64, 256), policy="mixed_bfloat16")
    assert [each.operands for each in found.products] == [("bf16", "bf16")]
    assert found.policy == "params=float32,compute=bfloat16,output=float32"


# The value


@slow
def test_the_report_is_a_value():
    found = report(mean_gradient, array(64, 64, dtype=f16), array(512, 64, dtype=f16))
    assert isinstance(found, GPUReport) and hash(found) is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.gpu = ""  # pyright: ignore[reportAttributeAccessIssue]
    values = found.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["bytes"] == found.bytes and values["memory"]["peak"] == found.memory.peak
    assert len(found.table().splitlines()) == 1 + len(found.kernels) and len(found.table(1).splitlines()) == 2
    assert str(found).isascii() and found.table().isascii()
    assert any("test_gpu_report.py" in kernel.source for kernel in found.kernels)
    message = "`other` must be a GPUReport, got 3; pass what gpu_report(fn)(*args) gave."
    with pytest.raises(TypeError, match="^" + re.escape(message) + "$"):
        found.compare(3)  # pyright: ignore[reportArgumentType]


RATES = (("16 bits", 4e9), ("tf32", 2e9))


def made_up(**others):
    """A report of two kernels, one of which multiplies, and of one product that a loop repeats."""
    kernels = (
        Kernel("small", "fusion", 1, 3, 1, ("f16",), ("f16", "f32"), "jit(step)/Net/add", "model.py:12 (loss)", ""),
        Kernel(
            "gemm", "custom-call", 2_000_000, 1_000_000, 2, ("f16",), ("f16",), "jit(step)/transpose(Net)/dot", "", ""
        ),
    )
    products = (
        CompiledProduct("dot", ("f16", "f16", "f32"), "f16", "16 bits", 10**9, 2, "gemm", "", "", ""),
        CompiledProduct("dot", ("f16", "f16"), "f16", "16 bits", 10**9, 1, "gemm", "", "", ""),
        CompiledProduct("convolution", ("f32", "f32"), "f32", "tf32", 10**9, 1, "small", "", "", ""),
    )
    values: dict[str, Any] = {"collectives": (), "sixteen_bit_sums": (), "copies": (), "unused_donations": ()}
    values |= {"kernels": kernels, "products": products, "unknown_loops": 0, "memory": Memory(7, 5, 2, 30)}
    return GPUReport("X", 1e6, RATES, **{"devices": 1, "policy": None, "jax_version": "0", **values, **others})


def test_the_figures_of_a_report():
    found = made_up()
    assert (found.bytes, found.launches, found.flops, found.memory.peak) == (6_000_004, 3, 4 * 10**9, 40)
    assert found.unit_flops == {"16 bits": 3 * 10**9, "tf32": 10**9} and found.tensor_core_share == 0.75
    assert found.least_seconds == 6.0 + 0.5  # memory bounds one kernel, arithmetic the other
    assert made_up(products=()).tensor_core_share == 0


def test_the_text_of_a_report():
    lines = [re.split("  +", line.strip()) for line in str(made_up(policy="mixed")).splitlines()]
    assert lines == [
        ["Compiled for X, jax 0, mixed"],
        ["memory moved", "6 MB by 3 launches"],
        ["peak memory", "40 B: arguments 7 B, results 5 B (2 B of them in donated arguments), temporary 30 B"],
        ["dots, convolutions", f"4 GFLOP; 75.0% {UNITS['16 bits']}; 25.0% {UNITS['tf32']}"],
        ["least time", "6.5e+03 ms at peak bandwidth and arithmetic; nothing was timed"],
        ["16-bit sums", "none"],
        ["copies", "none"],
        [""],
        ["product", "operands", "result", "runs", "GFLOP", "share", "on"],
        ["dot", "f16 x f16", "f16", "3", "3", "75.0%", UNITS["16 bits"]],
        ["convolution", "f32 x f32", "f32", "1", "1", "25.0%", UNITS["tf32"]],
        [""],
        ["What moves most:"],
        ["kernel", "read", "written", "runs", "share", "dtypes", "of", "source"],
        ["gemm", "2 MB", "1 MB", "2", "100.0%", "f16 -> f16", "bwd Net/dot"],
        ["small", "1 B", "3 B", "1", "0.0%", "f16 -> f16,f32", "Net/add", "model.py:12 (loss)"],
    ]
    assert "  collectives         none\n" in str(made_up(devices=2))
    unknown = dataclasses.replace(made_up().products[0], kind="attention", flops=0)
    assert "attention" in str(made_up(products=(unknown,)))
    nothing = str(made_up(kernels=(), products=()))
    assert "memory moved        0 B by 0 launches" in nothing and "dots, convolutions  none" in nothing
    of_nothing = made_up(kernels=(dataclasses.replace(made_up().kernels[0], read=0, written=0),), products=())
    assert re.split("  +", str(of_nothing).splitlines()[-1])[:4] == ["small", "0 B", "0 B", "1"]


def test_what_the_text_of_a_report_adds():
    sums = (
        NarrowSum("reduce", "f16[8]", "jit(step)/Norm/sum", "/a/model.py:3:4 (f)"),
        NarrowSum("scatter", "f16[2]", "", ""),
    )
    copies = tuple(Copy(10 - n, 1 + n, "f32[8]", f"cause {n}") for n in range(6))
    found = made_up(
        devices=2,
        sixteen_bit_sums=sums,
        copies=copies,
        unused_donations=("x f32[8]",),
        unknown_loops=2,
        collectives=(Collective("all-reduce", ("f16", "f16"), 8, 3, "", ""),) * 2,
        notes=("A note.",),
    )
    text = str(found)
    assert text.startswith("Compiled for X, 2 devices (figures of one), jax 0\nA note.\n")
    assert "  16-bit sums         2\n  copies              21 buffers\n" in text
    assert "  unused donations    x f32[8]: no result of that shape and dtype\n" in text
    assert "  collectives         all-reduce in f16, 48 B\n" in text
    assert "\n16-bit sums:\n  reduce f16[8], Norm/sum, model.py:3 (f)\n  scatter f16[2]\n" in text
    assert "\n  7 B, f32[8]: cause 3\n  11 B in 2 more\n" in text and "cause 4" not in text
    assert "\nThe compiler does not know the length of 2 loops, counted as one iteration each.\n" in text


def test_sums_that_loops_carry_are_read_from_the_jaxpr():
    @full_precision
    def carried(x):
        add = lambda total, row: (total + row, jnp.sum(row))  # noqa: E731
        return lax.scan(add, x[0], x), lax.scan(add, x[0].astype(f32), x.astype(f32)), lax.reduce_sum(x, (0,))

    (found,) = carried_sums(explain(carried, "float32")(array(4, 8, dtype=f16)).emitted)
    assert (found.kind, found.result) == ("scan carry", "float16") and "test_gpu_report.py" in found.source


def test_donations_that_jax_could_not_use():
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        warnings.warn("Some donated buffers were not usable: float32[8,4], int32[].\nSee an explanation.", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    with pytest.warns(UserWarning, match="^another$"):
        assert unused_donations(raised) == ("float32[8,4]", "int32[]")


def test_a_comparison():
    first, second = made_up(policy="a"), made_up(copies=(Copy(4, 3, "f32[8]", ""),), memory=Memory(7, 5, 2, 60))
    found = first.compare(second)
    assert found.names == ("a", "after") and second.compare(first).names == ("before", "a")
    assert first.compare(second, ("old", "new")).names == ("old", "new")
    assert dict((name, row) for name, *row in found.rows) == {
        "bytes moved": [6_000_004, 6_000_004],
        "peak memory": [40, 70],
        "temporary memory": [30, 60],
        "launches": [3, 3],
        "GFLOP of dots and convolutions": [4.0, 4.0],
        "Tensor Core share, 16 or 8 bits": [0.75, 0.75],
        "least milliseconds, by roofline": [6500.0, 6500.0],
        "16-bit sums": [0, 0],
        "copies": [0, 3],
        "collective bytes": [0, 0],
    }
    rows = {line.split("  ")[0]: re.split("  +", line)[1:] for line in str(found).splitlines()}
    assert rows["peak memory"] == ["40 B", "70 B", "1.750"] and rows["copies"] == ["0", "3"]
    assert rows["bytes moved"] == ["6 MB", "6 MB", "1.000"]
    assert rows["Tensor Core share, 16 or 8 bits"] == ["75.0%", "75.0%", "1.000"]
    assert rows["GFLOP of dots and convolutions"] == ["4", "4", "1.000"]
    assert found.as_dict()["figures"]["peak memory"] == {"first": 40, "second": 70}


# Errors


def without_plugin(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (without_plugin,
         "compiling for a GPU needs jax-cuda13-plugin and jax-cuda13-pjrt (Linux; no GPU, no driver and no CUDA "
         "libraries): "),
        (lambda name: "0.9.0",
         f"compiling for a GPU needs a plugin of exactly jax's version {jax.__version__}, got jax-cuda13-plugin 0.9.0 "
         f"and jax-cuda13-pjrt 0.9.0: "),
        (lambda name: "0.9.0" if name == "jax-cuda13-pjrt" else jax.__version__,
         f"compiling for a GPU needs a plugin of exactly jax's version {jax.__version__}, got jax-cuda13-pjrt 0.9.0: "),
    ],
)  # fmt: skip
def test_without_the_compiler(monkeypatch, version, message):
    monkeypatch.setattr(importlib.metadata, "version", version)
    command = f'pip install "jax-cuda13-plugin=={jax.__version__}" "jax-cuda13-pjrt=={jax.__version__}"'
    with pytest.raises(RuntimeError, match="^" + re.escape(message + command) + "$"):
        report(jnp.sin, array(8))


@slow
def test_where_jax_left_the_compiler_out_the_error_says_how_to_keep_it(tmp_path):
    script = tmp_path / "report.py"
    script.write_text(
        "import jax.numpy as jnp\n"
        "from jmp_train.diagnostics import gpu_report\n"
        "print(jnp.ones(3).sum())\n"  # JAX starts
        "gpu_report(jnp.sin)(jnp.ones(8))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}

    def run(**more):
        command = [sys.executable, str(script)]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False)

    found = run()  # succeeds where JAX finds a GPU
    assert found.returncode == 0 or "set the environment variable JAX_PLATFORMS=cpu, or" in found.stderr
    assert run(JAX_PLATFORMS="cpu").returncode == 0


@slow
def test_a_description_that_the_compiler_does_not_take():
    with pytest.raises(RuntimeError, match=r"does not start for this target description"):
        report(jnp.sin, array(8), gpu=get_gpu("H200").target + "nonsense {")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gpu_report(jax.jit(jnp.sin), donate_argnums=0), TypeError,
         "`fn` is jitted, so `donate_argnums` belongs inside: jax.jit(fn, donate_argnums=...), "
         "jax.jit(autocast(fn, policy)). Pass either a jitted function or options."),
        (lambda: gpu_report(jax.jit(jnp.sin), policy="mixed_float16"), TypeError,
         "`fn` is jitted, so `policy` belongs inside: jax.jit(fn, donate_argnums=...), "
         "jax.jit(autocast(fn, policy)). Pass either a jitted function or options."),
        (lambda: gpu_report(jnp.sin, devices=0), ValueError,
         "`devices` must be an integer from 1 to 2**31 - 1, got 0."),
        (lambda: gpu_report(jnp.sin, devices={}), ValueError,
         "`devices` must be a number of GPUs or the size of each named axis, got {}."),
        (lambda: gpu_report(jnp.sin, devices={0: 4}), ValueError,  # pyright: ignore[reportArgumentType]
         "`devices` must be a number of GPUs or the size of each named axis, got {0: 4}."),
        (lambda: made_up().compare(3), TypeError,  # pyright: ignore[reportArgumentType]
         "`other` must be a GPUReport, got 3; pass what gpu_report(fn)(*args) gave."),
    ],
)  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "mixed_float16"])
def test_products_that_no_tile_of_triton_divides_are_those_of_cublas(policy):
    """A Vision Transformer has 197 tokens, so that its layers have 1,576 rows."""

    def loss(w, x):
        q, k, v = ((x @ w[n]).reshape(8, 197, 8, 64) for n in range(3))
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.sum((jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(8, 197, 512) @ w[3]) ** 2)

    w, x = jax.ShapeDtypeStruct((4, 512, 512), jnp.float32), jax.ShapeDtypeStruct((8, 197, 512), jnp.float32)
    made = gpu_report(jax.grad(loss), policy=policy)(w, x)
    assert len(made.products) >= 6
    # XLA of JAX 0.12 gives them other tiles.
    assert any("cuBLAS" in note for note in made.notes) == ("cuBLAS" in str(made)) == (jax.__version_info__ < (0, 12))
