"""`dot_product_attention` compiled for an H200 without a GPU: two fused kernels a layer, and their bytes."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from battery_tools import HALVES, compile_for_gpu, figures, kernels, module_text
from jax.sharding import PartitionSpec

from jmp_train import autocast, dot_product_attention, low_precision
from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train.diagnostics import gpu_report

pytestmark = pytest.mark.slow

WIDTH, HEADS, BATCH, LENGTH, VOCABULARY = 768, 12, 8, 2048, 512
GIGA = 1e9


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def normalised(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def einsum_attention(query, key, value):
    logits = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), value)


def block(weights, x, attend):
    heads = (normalised(x) @ weights["in"]).reshape(*x.shape[:-1], 3 * HEADS, WIDTH // HEADS)
    x = x + attend(*jnp.split(heads, 3, axis=2)).reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(normalised(x) @ weights["up"]) @ weights["down"]


def loss(params, tokens, attend):
    x = params["embedding"][tokens]
    for weights in params["layers"]:
        x = block(weights, x, attend)
    logits = normalised(x) @ params["embedding"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1))


def model(layers):
    sizes = {"in": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    weights = {name: shape(*size) for name, size in sizes.items()}
    params = {"embedding": shape(VOCABULARY, WIDTH), "layers": [weights] * layers}
    return params, shape(BATCH, LENGTH, dtype=jnp.int32)


@functools.cache
def measured(attend, policy, layers):
    return figures(autocast(jax.grad(functools.partial(loss, attend=attend)), policy), *model(layers))


def of_a_layer(attend, policy="mixed_bfloat16"):
    """Bytes moved and held for one layer more, in gigabytes."""
    one, two = (measured(attend, policy, layers) for layers in (1, 2))
    return (two.bytes - one.bytes) / GIGA, (two.temporary - one.temporary) / GIGA


def calls(fn, *args):
    return re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', module_text(compile_for_gpu(fn, *args)))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_layer_moves_a_quarter_of_what_it_moved(dtype):
    moved, held = of_a_layer(dot_product_attention, f"mixed_{dtype}")
    assert moved <= 3.6 and held <= 0.41  # of which sixteen activations of 25 MB, and 14 MB of weights
    assert moved <= 0.3 * of_a_layer(einsum_attention, f"mixed_{dtype}")[0]


@pytest.mark.parametrize("order", ["of a gradient", "differentiated"])
def test_two_fused_calls_a_layer(order):
    fn = functools.partial(loss, attend=functools.partial(dot_product_attention, is_causal=True))
    narrow = functools.partial(autocast, policy="mixed_float16")
    found = calls(narrow(jax.grad(fn)) if order == "of a gradient" else jax.grad(narrow(fn)), *model(2))
    assert sorted(found) == ["__cudnn$fmhaSoftmax"] * 2 + ["__cudnn$fmhaSoftmaxBackward"] * 2


HEAD = (4, 256, 8, 64)
BIASED = ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
PLAIN = ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
KINDS = {
    "grouped": ({}, {}, (4, 256, 2, 64), PLAIN),
    "window": ({"local_window_size": (64, 0)}, {}, HEAD, PLAIN),
    "lengths": ({"is_causal": True}, {"key_value_seq_lengths": shape(4, dtype=jnp.int32)}, HEAD, PLAIN),
    "mask": ({}, {"mask": shape(4, 1, 256, 256, dtype=jnp.bool_)}, HEAD, BIASED),
    "bias": ({}, {"bias": shape(1, 8, 256, 256)}, HEAD, BIASED),
    "both": (
        {"is_causal": True},
        {"bias": shape(1, 8, 1, 256), "mask": shape(4, 1, 1, 256, dtype=jnp.bool_)},
        HEAD,
        BIASED,
    ),
    "window to both sides": ({"local_window_size": 64}, {}, HEAD, []),
}


@pytest.mark.parametrize("kind", KINDS)
def test_which_kinds_are_fused(kind):
    """With the gradient of a bias if there is one; all operands but lengths and log-sum-exp are in 16 bits."""
    static, extras, keys, want = KINDS[kind]

    def total(query, key, value, extras):
        return jnp.sum(dot_product_attention(query, key, value, **static, **extras) ** 2)

    def gradients(query, key, value, extras):
        bias = {name: x for name, x in extras.items() if name == "bias"}
        of = lambda q, k, v, b: total(q, k, v, extras | b)  # noqa: E731
        return jax.grad(of, (0, 1, 2, 3))(query, key, value, bias)

    text = module_text(
        compile_for_gpu(autocast(gradients, "mixed_float16"), shape(*HEAD), shape(*keys), shape(*keys), extras)
    )
    lines = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text) == want
    if not want:
        assert not re.search(r"f32\[4,8,256,256\]\S* dot", text)
    if want and kind != "bias":  # no float32 array of the size of the scores is written, whatever masks
        written = [kernel.line.split("fusion(")[0] for kernel in kernels(text)]
        assert not [line for line in written if re.search(r"f32\[\d+,\d+,256,256\]", line)]
    for line in lines:
        shapes = re.findall(r"(f32|f16|s32|u8)\[([\d,]*)\]", line.split("backend_config")[0])
        assert {dims for dtype, dims in shapes if dtype == "f32"} <= {"4,8,256"}  # the log-sum-exp


def test_nothing_of_the_size_of_the_scores_is_written():
    fn = autocast(jax.grad(functools.partial(loss, attend=dot_product_attention)), "mixed_bfloat16")
    text = module_text(compile_for_gpu(fn, *model(1)))
    assert f"{LENGTH},{LENGTH}]" not in text


def test_in_float32_nothing_is_fused():
    assert not calls(jax.grad(lambda *args: jnp.sum(dot_product_attention(*args) ** 2), (0, 1, 2)), *[shape(*HEAD)] * 3)


@pytest.mark.parametrize(
    ("gpu", "size", "number"), [("A100", 128, 2), ("A100", 136, 0), ("H200", 256, 2), ("H200", 264, 0)]
)
def test_the_largest_heads(gpu, size, number):
    fn = autocast(jax.grad(lambda *args: jnp.sum(dot_product_attention(*args) ** 2), (0, 1, 2)), "mixed_float16")
    report = gpu_report(fn, gpu=gpu)(*[shape(2, 64, 4, size)] * 3)
    assert sum("__cudnn$fmha" in kernel.line for kernel in report.kernels) == number


def test_on_eight_gpus_each_computes_its_part_of_the_batch():
    fn = autocast(jax.grad(lambda *args: jnp.sum(dot_product_attention(*args) ** 2), (0, 1, 2)), "mixed_bfloat16")
    text = gpu_module(fn, *[shape(16, 128, 8, 64)] * 3, devices=8, in_shardings=(PartitionSpec("data"),) * 3)
    assert sorted(re.findall(r'custom_call_target="(__cudnn\$fmha\w+)"', text)) == PLAIN
    assert "bf16[2,8,128,64]" in text and "all-gather" not in text


SHARDED = {
    "sequences": ([PartitionSpec(None, "data")] * 3, (4, 64, 4, 64), None),
    "query alone": ([PartitionSpec("data"), PartitionSpec(), PartitionSpec()], (4, 64, 4, 64), None),
    "one head of keys": ([PartitionSpec(None, None, "data"), *[PartitionSpec()] * 2], (4, 64, 1, 64), None),
    "groups": ([PartitionSpec(None, None, "data")] * 3, (4, 64, 2, 64), None),
    "bias": ([PartitionSpec("data")] * 3, (4, 64, 4, 64), PartitionSpec(None, None, "data")),
}


@pytest.mark.parametrize("kind", SHARDED)
def test_whatever_is_sharded_is_fused(kind):
    """Batch and heads stay sharded; sequences and other sharded axes are gathered."""
    specs, keys, of_bias = SHARDED[kind]
    operands = [shape(4, 64, 4, 64), shape(*keys), shape(*keys)]
    if of_bias is not None:
        operands, specs = [*operands, shape(1, 4, 64, 64)], [*specs, of_bias]
    loss = lambda *args: jnp.sum(dot_product_attention(*args) ** 2)  # noqa: E731
    fn = autocast(jax.grad(loss, tuple(range(len(operands)))), "mixed_bfloat16")
    text = gpu_module(fn, *operands, devices=2, in_shardings=tuple(specs))
    lines = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    assert len(lines) == 2
    part = {"sequences": "4,4,64,64", "one head of keys": "4,2,64,64", "groups": "4,2,64,64"}.get(kind, "2,4,64,64")
    assert f"bf16[{part}]" in lines[0].split("custom-call")[0]


def test_by_hand_with_the_attention_of_jax(monkeypatch):
    """`low_precision` marks `jax.nn`'s own call of cuDNN. JAX traces it only with cuDNN: here it is told so."""
    attend = low_precision(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), dtype=jnp.bfloat16)
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.make_jaxpr(attend)(*[shape(*HEAD)] * 3)
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    total = lambda *args: jnp.sum(attend(*args) ** 2)  # noqa: E731
    for fn in (jax.grad(autocast(total, "mixed_bfloat16")), autocast(jax.grad(total), "mixed_bfloat16")):
        assert calls(fn, *[shape(*HEAD)] * 3) == PLAIN


def test_gpu_report_counts_its_arithmetic():
    fn = autocast(jax.grad(lambda *args: jnp.sum(dot_product_attention(*args) ** 2), (0, 1, 2)), "mixed_bfloat16")
    report = gpu_report(fn)(*[shape(*HEAD)] * 3)
    batch, length, heads, size = HEAD
    assert report.unit_flops["16 bits"] == (2 + 5) * 2 * batch * heads * length**2 * size
