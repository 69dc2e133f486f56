"""`tensor_core_report`: its reasons, paddings and estimate, and the report as a value."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from product_tools import CONVOLUTIONS, array, convolution, product, products

from jmp_train import StaticLossScale, autocast, value_and_grad
from jmp_train import dot_product_attention as jmp_attention
from jmp_train._diagnostics.gpu._gpus import get_gpu
from jmp_train._diagnostics.products._tensor_core_report import Estimate, _bytes_in_float32, _bytes_outside_products
from jmp_train._jaxpr import flatten
from jmp_train.diagnostics import TensorCoreReport, gpu_report, round_up, tensor_core_report

H200, F32 = get_gpu("H200"), jnp.float32


# Bytes, intensity, alignment


def test_intensity_against_the_ridge():
    large, small = (product(jnp.matmul, array(n, n), array(n, n)) for n in (4096, 64))
    assert large.bytes == 3 * 4096 * 4096 * 2
    assert large.intensity == 2 * 4096**3 / large.bytes
    assert large.ridge == 990e12 / 4.8e12 and not large.is_memory_bound and small.is_memory_bound
    assert "bound by arithmetic" in large.reason and "bound by memory" in small.reason
    assert product(jnp.matmul, array(64, 64), array(64, 64), gpu="A100").ridge == 312e12 / 2.039e12


def test_the_vocabulary_of_gpt2():
    def loss(table, h):
        return jnp.mean(jax.nn.log_softmax((h @ table).astype(jnp.float32)))

    report = tensor_core_report(jax.grad(loss, (0, 1)))(array(768, 50257), array(1024, 768))
    assert [[(each.size, each.padded) for each in p.padding] for p in report.products] == [[(50257, 50264)]] * 3
    assert {each.what for p in report.products for each in p.padding} == {"M", "N", "K"}
    ((padding, share),) = report.padding
    assert (padding.size, padding.padded, share) == (50257, 50264, 1.0) and report.tensor_core_share == 0
    assert "50257 -> 50264  in 100.0% of the FLOPs" in str(report)
    padded = tensor_core_report(jax.grad(loss, (0, 1)))(array(768, round_up(50257)), array(1024, 768))
    assert padded.padding == () and padded.tensor_core_share == 1


def test_eight_bit_operands_need_sixteen():
    f8 = jnp.float8_e4m3fn
    found = product(
        lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32), array(32, 24, dtype=f8), array(24, 64, dtype=f8)
    )
    assert found.unit == "8 bits" and [(each.what, each.size, each.padded) for each in found.padding] == [("K", 24, 32)]
    assert product(
        lambda a, b: lax.dot(a, b, preferred_element_type=jnp.int32),
        array(32, 32, dtype=jnp.int8),
        array(32, 64, dtype=jnp.int8),
    ).on_tensor_cores


def test_sizes_must_be_numbers():
    (rows,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    for report in (tensor_core_report, gpu_report):
        with pytest.raises(ValueError, match=r"the argument '0/x' has the symbolic shape \(b, 8\); pass arrays, or"):
            report(lambda batch: batch["x"] @ batch["x"].T)({"x": x})


def test_sizes_are_read_by_the_dimensions_of_each_operand():
    found = product(lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((0,), (2,)))), array(4, 16, 8), array(16, 32, 4))
    assert (found.batch, found.m, found.n, found.k) == (4, 8, 32, 16) and found.flops == 2 * 4 * 8 * 32 * 16


def test_one_channel_is_a_matrix_unless_each_group_has_its_own():
    found = product(convolution(CONVOLUTIONS["plain"])[0], array(2, 13, 19, 1), array(3, 3, 1, 16))
    assert (found.m, found.n, found.k) == (2 * 11 * 17, 16, 9) and found.on_tensor_cores


def test_channels_of_a_convolution():
    fn, _, _ = convolution({})
    found = products(
        jax.grad(lambda x, k: jnp.sum(jnp.sin(fn(x, k).astype(jnp.float32))), (0, 1)),
        array(2, 32, 32, 3),
        array(3, 3, 3, 64),
    )
    # Forward, then each gradient: channels are the layer's channels on any axis, and the batch is never a channel.
    for each in found:
        assert [(p.size, p.padded) for p in each.padding] == [(3, 8)]


@pytest.mark.parametrize(
    ("fn", "args", "unit", "reason"),
    [
        (jnp.matmul, (array(64, 64, dtype=jnp.float32),) * 2, "tf32",
         "float32 operands: Tensor Cores in TF32, half the rate of 16 bits; narrow them"),
        (lambda a, b: jnp.matmul(a, b, precision="highest"), (array(64, 64, dtype=jnp.float32),) * 2, "float32",
         "float32 operands at the highest precision: no Tensor Cores; narrow them, or allow TF32"),
        (lambda a, b: jnp.matmul(a, b, precision="F32_F32_F32"), (array(64, 64, dtype=jnp.float32),) * 2, "float32",
         "float32 operands at the highest precision: no Tensor Cores; narrow them, or allow TF32"),
        (jnp.matmul, (array(1, 64), array(64, 64)), "16 bits",
         "a matrix times a vector: it reads all of the matrix for one row; give it more rows at a time"),
        (jnp.matmul, (array(64, 64), array(64, 1)), "16 bits",
         "a matrix times a vector: it reads all of the matrix for one column; memory bounds it"),
        (convolution(CONVOLUTIONS["depthwise"])[0], (array(2, 13, 19, 8), array(3, 3, 1, 16)), "16 bits",
         "one channel a group: there is no matrix in it, Tensor Cores are not used"),
        (jnp.matmul, (array(60, 64), array(64, 36)), "16 bits",
         "no multiple of 8: pad M 60 -> 64, N 36 -> 40"),
        (jnp.matmul, (array(64, 64, dtype=jnp.int32),) * 2, "float32",
         "int32 operands: of integers, Tensor Cores multiply int8"),
        (jnp.matmul, (array(64, 64, dtype=jnp.complex64),) * 2, "tf32",
         "complex64 operands: 16 bits have no complex numbers"),
    ],
)  # fmt: skip
def test_reasons(fn, args, unit, reason):
    found = product(fn, *args)
    assert found.unit == unit and found.reason == reason
    assert not found.on_tensor_cores
    # Padding does not make a matrix of a vector, or of one channel.
    assert bool(found.padding) == reason.startswith("no multiple")


# The estimate


def test_amdahl():
    assert Estimate(0.5, 4.0).speedup == 1 / (0.5 + 0.5 / 4)
    assert Estimate(0.0, 1.0).speedup == 1
    report = tensor_core_report(jnp.matmul)(array(8192, 8192), array(8192, 8192))
    # A single product limited by arithmetic: the speed-up is the ratio of the peak rates.
    assert report.estimate.f == 1 and report.estimate.s == pytest.approx(990 / 67)
    strict = tensor_core_report(lambda a, b: jnp.matmul(a, b, precision="highest"))
    wide = strict(*(array(8192, 8192, dtype=jnp.float32),) * 2)
    assert wide.estimate == Estimate(0.0, 1.0)
    assert wide.repaired.f == 1 and wide.repaired.s == pytest.approx(990 / 67)


def test_what_is_no_product_is_the_rest_of_the_time():
    n = 8192

    def fn(a, b, c):
        return jnp.tanh((a @ b).astype(jnp.float32)) + c

    report = tensor_core_report(fn)(array(n, n), array(n, n), array(n, n, dtype=jnp.float32))
    slow = 2 * n**3 / 67e12
    rest = 3 * 4 * n * n / 4.8e12  # the product and c are read, the sum is written
    assert report.estimate.f == pytest.approx(slow / (slow + rest))


X8, CUDNN = jnp.ones((8, 8)), Primitive("dot_product_attention_fwd_wrapper")
CUDNN.def_abstract_eval(lambda *avals, **layout: avals[0])
FREE = {
    "reshape": lambda x: lax.reshape(x, (4, 16)).reshape(8, 8),
    "transpose": jnp.transpose,
    "squeeze": lambda x: lax.squeeze(lax.reshape(x, (1, 8, 8)), [0]),
    "convert_element_type": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "copy": lambda x: lax.copy_p.bind(x),
    "name": lambda x: checkpoint_name(x, "h"),
    "optimization_barrier": lax.optimization_barrier,
}
OUTSIDE = {  # how many arrays of 8 x 8 are read and written outside of products
    "one fusion": (lambda x, y: jnp.sin(jnp.tanh(x)) + y, 3),
    "what a product reads": (lambda x, y: jnp.tanh(x) @ y, 2),
    "what two products read": (lambda x, y: (h := jnp.tanh(x)) @ (h @ y), 2),
    "a barrier between two": (lambda x, y: jnp.tanh(lax.optimization_barrier((x @ y, y @ x))[1]), 3),
    "cuDNN's attention": (lambda x, y: CUDNN.bind(x, y, y), 0),
    "attention": (lambda x, y: jmp_attention(*(z.reshape(1, 8, 1, 8) for z in (x, y, y))), 0),
    **{name: (lambda x, y, free=free: free(x @ y) @ y, 0) for name, free in FREE.items()},
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_bytes_outside_of_products(name):
    fn, arrays = OUTSIDE[name]
    assert _bytes_outside_products(flatten(jax.make_jaxpr(fn)(X8, X8))) == arrays * X8.nbytes


def test_what_is_bound_by_memory_halves_its_bytes():
    small = tensor_core_report(lambda a, b: jnp.matmul(a, b, precision="highest"))(*(array(64, 64, dtype=F32),) * 2)
    assert small.repaired.f == 1 and small.repaired.s == pytest.approx(2)
    (narrow,) = tensor_core_report(jnp.matmul)(array(64, 32), array(32, 16)).products
    assert _bytes_in_float32(narrow) == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_tf32_and_eight_bits_have_rates_of_their_own():
    n = 8192
    tf32 = tensor_core_report(jnp.matmul)(*(array(n, n, dtype=F32),) * 2)
    assert tf32.products[0].unit == "tf32"
    assert tf32.estimate.f == 1 and tf32.estimate.s == pytest.approx(H200.rate("tf32") / H200.rate("float32"))
    f8 = tensor_core_report(lambda a, b: lax.dot(a, b, preferred_element_type=F32))(
        *(array(n, n, dtype=jnp.float8_e4m3fn),) * 2
    )
    assert f8.repaired.s == pytest.approx(H200.rate("8 bits") / H200.rate("float32"))


# The value


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"]) @ params["w"])


PARAMS, X = {"w": jnp.ones((64, 64))}, jnp.ones((8, 64))


def test_every_way_to_give_a_policy():
    by_policy = tensor_core_report(jax.grad(loss), "mixed_float16")(PARAMS, X)
    by_hand = tensor_core_report(autocast(jax.grad(loss), "mixed_float16"))(PARAMS, X)
    ours = tensor_core_report(jax.jit(value_and_grad(loss, "mixed_float16")))(
        PARAMS, X, loss_scale=StaticLossScale(8.0)
    )
    assert by_policy.tensor_core_share == by_hand.tensor_core_share == ours.tensor_core_share == 1
    # value_and_grad returns the loss, too, which takes one more product.
    assert by_policy.flops == by_hand.flops == 4 * 2 * 8 * 64 * 64 and ours.flops == 5 * 2 * 8 * 64 * 64
    assert by_policy.policy == "params=float32,compute=float16,output=float32" and by_hand.policy is None
    assert tensor_core_report(jax.grad(loss))(PARAMS, X).tensor_core_share == 0


def test_linen_and_nnx():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10, name="head")(nn.relu(nn.Conv(16, (3, 3))(x)).reshape(x.shape[0], -1))

    x = array(8, 8, 8, 8, dtype=jnp.float32)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    found = tensor_core_report(Net().apply, "mixed_float16")(params, x)
    assert [each.primitive for each in found.products] == ["conv_general_dilated", "dot_general"]
    assert found.products[1].scope.endswith("head")
    assert [(each.size, each.padded) for each, _ in found.padding] == [(10, 16)]

    model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    assert product(lambda model, x: model(x), model, X, policy="mixed_float16").on_tensor_cores


def test_the_report_is_a_value():
    report = tensor_core_report(jax.grad(loss), "mixed_float16")(PARAMS, X)
    assert isinstance(report, TensorCoreReport) and hash(report) is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.gpu = ""  # pyright: ignore[reportAttributeAccessIssue]
    values = report.as_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["flops"] == report.flops and values["estimate"]["speedup"] == report.estimate.speedup
    assert values["products"][0]["intensity"] == report.products[0].intensity
    assert [each.backward for each in report.products] == [False, True, True, True]
    assert len(report.table().splitlines()) == 1 + len(report.products)
    assert [row[:3] for row in report.table().splitlines()[1:]] == ["fwd", "bwd", "bwd", "bwd"]
    assert len(report.table("Nowhere").splitlines()) == 1
    assert str(report).isascii() and report.table().isascii()


def test_the_text_and_the_table():
    def fn(w, x, v):
        with jax.named_scope("Loop"):
            x = lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=3)[0]
        with jax.named_scope("Head"):
            narrow = lax.scan(lambda _, x: (None, x @ v), None, jnp.stack([x, x, x]))[1]
            y = narrow, lax.dot(x, v, preferred_element_type=F32)
        strict = lax.while_loop(lambda w: w[0, 0] > 0, lambda w: jnp.matmul(w, w, precision="highest"), w.astype(F32))
        return y, strict, jax.pure_callback(lambda x: x, x, x)

    report = tensor_core_report(fn)(array(128, 128), array(16, 128), array(128, 60))
    loop, head, strict = 3 * 2 * 16 * 128 * 128, 2 * 16 * 128 * 60, 2 * 128**3
    assert report.flops == loop + 4 * head + strict
    parts = (strict, loop, head, 4 * head, loop + 4 * head, 3 * head)
    shares = [f"{100 * flops / report.flops:.1f}%" for flops in parts]
    lines = [re.split("  +", line.strip()) for line in str(report).splitlines()]
    assert lines[:8] == [
        ["4 products, dots and convolutions, 0.00675 GFLOP, NVIDIA H200"],
        [shares[4], "Tensor Cores in 16 bits"],
        [shares[0], "no Tensor Cores: strict float32"],
        [shares[1], "on Tensor Cores in 16 or 8 bits with all sizes aligned"],
        [shares[4], "in products bound by memory, which Tensor Cores do not speed up further"],
        [""],
        ["Sizes to pad:"],
        ["60 -> 64", f"in {shares[3]} of the FLOPs"],
    ]
    estimates = [
        [f"{each.speedup:.2f}", f"{each.f:.3f}, s = {each.s:.2f})"] for each in (report.estimate, report.repaired)
    ]
    assert [[line[0], line[1].partition("(f = ")[2]] for line in lines[10:12]] == estimates
    assert lines[13:15] == [
        ["Not looked into: pure_callback"],
        ["Counted as one iteration: 1 while loop of unknown length"],
    ]
    assert [line[:2] for line in lines[17:]] == [["share", "number"], [shares[0], "1"], [shares[3], "2"]]
    assert lines[-1][2:] == ["no multiple of 8: pad N 60 -> 64", lines[-1][3]] and lines[-1][3].startswith("Head test_")

    rows = [re.split("  +", line)[1:] for line in report.table().splitlines()[1:]]
    assert [row[1:5] for row in rows] == [
        ["1 x 128 x 128 x 128", "float32, float32 -> float32", "1", shares[0]],
        ["1 x 16 x 128 x 128", "float16, float16 -> float16", "3", shares[1]],
        ["1 x 16 x 60 x 128", "float16, float16 -> float16", "3", shares[5]],
        ["1 x 16 x 60 x 128", "float16, float16 -> float32", "1", shares[2]],
    ]
    assert len(report.table("Head").splitlines()) == 3


@pytest.mark.parametrize(
    ("layout", "shapes"), [(0, ((2, 32, 4, 16), (2, 64, 4, 16))), (1, ((2, 4, 32, 16), (2, 4, 64, 16)))]
)
def test_attention_of_cudnn_is_its_product_of_query_and_key(layout, shapes):
    """The primitive is made for the test, because tracing JAX's own needs cuDNN."""
    query, key = (array(*shape) for shape in shapes)
    found = product(lambda q, k, v: CUDNN.bind(q, k, v, layout=layout), query, key, key)
    assert (found.batch, found.m, found.n, found.k) == (2 * 4, 32, 64, 16)
    assert found.flops == 2 * 2 * (2 * 4 * 32 * 64) * 16 and found.on_tensor_cores


@pytest.mark.parametrize(("size", "window"), [(8, 3), (2, 3), (2, 5), (3, 3), (1, 1), (4, 4)])
def test_the_gradients_of_a_convolution_want_its_channels_padded(size, window):
    def loss(kernel, x):
        return jnp.mean(jax.nn.relu(jax.lax.conv(x, kernel, (1, 1), "SAME")))

    args = jnp.ones((24, 20, window, window)), jnp.ones((10, 20, size, size))
    report = tensor_core_report(jax.grad(loss, (0, 1)), "mixed_float16")(*args)
    assert [[each.size for each in product.padding] for product in report.products] == [[20], [20], [20]]


def test_a_product_of_nothing():
    report = tensor_core_report(jnp.dot, "mixed_float16")(jnp.ones((0, 3)), jnp.ones((3, 5)))
    assert [share for _, share in report.padding] == [0, 0] and "3 -> 8  in 0.0% of the FLOPs" in str(report)
    (row,) = tensor_core_report(jnp.dot)(jnp.ones((0, 3)), jnp.ones((3, 0))).products
    (empty,) = tensor_core_report(jnp.outer)(jnp.ones(0), jnp.ones(0)).products or (row,)
    assert row.intensity == empty.intensity == 0


def test_a_program_without_products():
    report = tensor_core_report(jnp.sin)(X)
    assert str(report) == "No dot and no convolution for the Tensor Cores of NVIDIA H200"
    assert report.flops == report.tensor_core_share == 0 and report.padding == ()
    assert json.loads(json.dumps(report.as_dict())) == report.as_dict()


def test_a_described_gpu():
    described = get_gpu(H200.target.replace("NVIDIA H200", "Mine").replace("core_count: 132", "core_count: 66"))
    assert described.name == "Mine" and described.bandwidth == H200.bandwidth
    assert described.rate("float32") == pytest.approx(67e12 / 2, rel=0.01)
    assert described.rate("16 bits") == pytest.approx(990e12 / 2, rel=0.1)  # the tensor clock is a little lower
    assert get_gpu(H200.target.replace("minor: 0", "")).capability == (9, 0)
    assert get_gpu(H200.target.replace("device_description_str", "serial")).name == "a GPU"
    first = "dnn_version_info { major: 10 }" + H200.target
    assert get_gpu(first).rate("16 bits") == 2 * described.rate("16 bits")
    assert described.rate("16 bits") / described.rate("tf32") == described.rate("8 bits") / described.rate("16 bits")


def test_round_up():
    for n in range(100):
        for multiple in (1, 3, 8, 16):
            assert round_up(n, multiple) == multiple * math.ceil(n / multiple)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tensor_core_report(3), TypeError,  # pyright: ignore[reportArgumentType]
         "`fn` must be callable, got 3; pass the function whose products are to be listed."),
        (lambda: tensor_core_report(loss, gpu="H20"), ValueError,
         "`gpu`: unknown GPU 'H20' (did you mean 'H200'?); the names are T4, A10, A100, A6000, L4, L40S, "
         "RTX 4090, H100, H200, B200, GB200, RTX PRO 6000, and any other GPU can be "
         "given by the text of its target description (gpu_device_info {...}), as XLA has them."),
        (lambda: tensor_core_report(loss, gpu=8), TypeError,  # pyright: ignore[reportArgumentType]
         "`gpu` must be a name such as 'H200' or the text of a target description, got 8."),
        (lambda: tensor_core_report(loss, gpu="gpu_device_info { core_count: 8 }"), ValueError,
         "`gpu`: the target description has no fpus_per_core; it must say core_count, fpus_per_core, memory_bandwidth, "
         "clock_rate_ghz and cuda_compute_capability { major: ... }."),
        (lambda: round_up(2.5), ValueError,  # pyright: ignore[reportArgumentType]
         "`n` must be an integer, got 2.5. Pass an integer such as 0."),
        (lambda: round_up(8, 0), ValueError, "`multiple` must be an integer from 1 to 2**31 - 1, got 0."),
    ],
)  # fmt: skip
def test_bad_input(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message) + "$"):
        call()
