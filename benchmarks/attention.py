"""How exact and how fast is `dot_product_attention` on this GPU, beside jax.nn's and torch's?

    python benchmarks/attention.py [--out results]
    python benchmarks/attention.py --small                 # tiny, on a CPU too, to see that it works

Computes output and gradients of one attention with float32 operands and a given cotangent. Two tables. `errors`: the
largest relative error, in the Euclidean norm, of the output and of the gradient of each operand against float64, with
every kind of mask, bias and length. `times`: forward and backward together, casts included, at sizes of published
models. The ways: `ours` is `dot_product_attention` under autocast; `cuDNN by hand` and `XLA by hand` are `jax.nn`'s
with operands cast by hand. Two more are timed only: `float32` is `jax.nn`'s in strict float32, `torch` is
`scaled_dot_product_attention` under torch.amp.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # leaves half to torch, which runs in the same process

import concurrent.futures
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _results import Results, Row, arguments, show
from _timing import peak_bytes, repeated, time_steps

import jmp_train

HALVES = ("float16", "bfloat16")
UNTUNED = {"xla_gpu_autotune_level": 0}  # tuning takes time, and errors do not depend on which kernel multiplies
WAYS = ("ours", "cuDNN by hand", "XLA by hand", "float32")


class Size(NamedTuple):
    """B examples of T positions, N heads of the query, K of key and value, H numbers a head."""

    batch: int
    length: int
    heads: int
    key_heads: int
    width: int


SIZE, SMALL = Size(4, 512, 8, 8, 64), Size(2, 32, 4, 4, 8)
MODELS = {
    "GPT-2": (Size(8, 1024, 12, 12, 64), {"is_causal": True}),
    "BERT, padded": (Size(32, 512, 12, 12, 64), {"lengths": True}),
    "T5, bias": (Size(8, 1024, 12, 12, 64), {"bias": True}),
    "ViT, 8 x 2048": (Size(8, 2048, 12, 12, 64), {}),
    "Llama 3 8B": (Size(1, 8192, 32, 8, 128), {"is_causal": True}),
    "Mistral, window 1024": (Size(1, 8192, 32, 8, 128), {"is_causal": True, "window": 1024}),
    "Gemma, heads of 256": (Size(2, 2048, 8, 4, 256), {"is_causal": True}),
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped heads": {"key_heads": 2, "is_causal": True},
    "heads of 128": {"width": 128},
    "heads of 256": {"width": 256},
    "bias": {"bias": True},
    "bias, causal": {"bias": True, "is_causal": True},
    "mask": {"mask": True},
    "mask, bias, causal": {"mask": True, "bias": True, "is_causal": True},
    "lengths": {"lengths": True},
    "lengths, causal": {"lengths": True, "is_causal": True},
    "window": {"window": 100, "is_causal": True},
}
"""What is attended to: fields of `Size` to change, and what `operands_of` makes."""


def operands_of(size: Size, kind: Mapping[str, Any], seed: int = 0) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """`(query, key, value, bias, cotangent)` in float32, the bias a scalar if there is none, and keyword arguments."""
    batch, length, heads, key_heads, width = size
    keys = jax.random.split(jax.random.key(seed), 6)
    shapes = ((heads,), (key_heads,), (key_heads,))
    query, key, value = (
        jax.random.normal(k, (batch, length, *n, width)) for k, n in zip(keys[:3], shapes, strict=True)
    )
    bias = jax.random.normal(keys[3], (1, heads, length, length)) if kind.get("bias") else jnp.zeros(())
    cotangent = jax.random.normal(keys[4], query.shape)
    rest: dict[str, Any] = {"is_causal": kind.get("is_causal", False)}
    if kind.get("mask"):
        # Every position attends to itself, so that no row masks everything; such rows are a matter of another test.
        drawn = jax.random.bernoulli(keys[5], 0.7, (batch, 1, length, length))
        rest["mask"] = drawn | jnp.eye(length, dtype=bool)
    if kind.get("lengths"):
        rest["query_seq_lengths"] = rest["key_value_seq_lengths"] = jnp.array(lengths_of(size), jnp.int32)
    if window := kind.get("window"):
        rest["local_window_size"] = (min(window, length // 2), 0)
    return (query, key, value, bias, cotangent), rest


def lengths_of(size: Size) -> list[int]:
    """The length of each example, from the full length down to about half of it."""
    return [size.length - i * size.length // (2 * size.batch) for i in range(size.batch)]


def program(attend: Callable[..., jax.Array], has_bias: bool) -> Callable[..., Any]:
    """`(query, key, value, bias, cotangent) -> (output, gradients)`."""

    def of(query, key, value, bias, cotangent):
        fn = lambda q, k, v, b: attend(q, k, v, b if has_bias else None)  # noqa: E731
        out, pull = jax.vjp(fn, query, key, value, bias)
        return out, pull(cotangent.astype(out.dtype))

    return of


def way(name: str, dtype: str, rest: Mapping[str, Any], has_bias: bool) -> Callable[..., Any]:
    """The `program` of one way to compute the attention."""
    if name == "ours":
        attend = functools.partial(jmp_train.dot_product_attention, **rest)
        return jmp_train.autocast(program(attend, has_bias), jmp_train.get_policy(f"mixed_{dtype}"))
    if name == "float32":
        attend = functools.partial(jax.nn.dot_product_attention, **rest, implementation="xla")
        return jmp_train.autocast(program(attend, has_bias), jmp_train.get_policy("float32"))
    implementation = "cudnn" if name.startswith("cuDNN") else "xla"

    def attend_in_16_bits(query, key, value, bias):
        low = (None if x is None else x.astype(dtype) for x in (query, key, value, bias))
        return jax.nn.dot_product_attention(*low, **rest, implementation=implementation).astype(jnp.float32)

    return program(attend_in_16_bits, has_bias)


def oracle(operands: Sequence[jax.Array], rest: Mapping[str, Any], has_bias: bool) -> Any:
    """Output and gradients in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        attend = functools.partial(jax.nn.dot_product_attention, **rest, implementation="xla")
        wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in operands]
        return jax.device_get(jax.jit(program(attend, has_bias))(*wide))


def relative_errors(got: Any, want: Any) -> list[float]:
    """The relative error of each array that is not zero in `want`."""
    pairs = zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in wide if np.any(b)]


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def errors(results: Results, size: Size) -> None:
    with concurrent.futures.ThreadPoolExecutor() as pool:  # compiling is most of the time
        rows = [pool.submit(errors_of, name, dtype, size) for name in KINDS for dtype in HALVES]
        for row in concurrent.futures.as_completed(rows):
            results.add("errors", row.result())
    results.tables["errors"] = [row.result() for row in rows]


def errors_of(name: str, dtype: str, size: Size) -> Row:
    kind = KINDS[name]
    sized = size._replace(**{field: kind[field] for field in Size._fields if field in kind})
    operands, rest = operands_of(sized, kind)
    has_bias = bool(kind.get("bias"))
    want = oracle(operands, rest, has_bias)
    row: Row = {"kind": name, "dtype": dtype}
    for how in WAYS[:3]:
        try:
            compiled = jax.jit(way(how, dtype, rest, has_bias)).lower(*operands).compile(UNTUNED)
            each = relative_errors(compiled(*operands), want)
            row |= {how: max(each), f"{how}: each": each}
            if how == "ours":
                row["fused"] = (compiled.as_text() or "").count("__cudnn$fmha")
        except Exception as error:  # a way does not support this kind, or this device not this way
            row[f"{how}: left out"] = reason(error)
    return row


def jax_seconds(fn: Callable[..., Any], operands: Sequence[jax.Array], seconds: float) -> tuple[float, float, int]:
    """Seconds, spread and bytes held by the compiled program."""
    compiled = jax.jit(fn).lower(*operands).compile()
    timing = time_steps(repeated(compiled, *operands), seconds)
    return timing.seconds, timing.spread, peak_bytes(compiled)


def torch_seconds(size: Size, kind: Mapping[str, Any], dtype: str, seconds: float) -> tuple[float, float, int | None]:
    """The same for `scaled_dot_product_attention`, of kinds for which it needs no mask in memory."""
    import torch
    import torch.nn.functional as F
    from _torch_steps import AMP, allow_tf32, device, wait

    if kind.get("lengths") or kind.get("window"):
        raise ValueError("scaled_dot_product_attention takes lengths and windows as a mask in memory only")
    allow_tf32(True)
    operands, _ = operands_of(size, kind)
    moved = [torch.from_numpy(np.array(x)).to(device()) for x in operands]
    query, key, value = (x.transpose(1, 2).requires_grad_() for x in moved[:3])
    bias = moved[3].requires_grad_() if kind.get("bias") else None
    inputs = [query, key, value] + ([] if bias is None else [bias])
    cotangent = moved[4].transpose(1, 2)
    options = {"is_causal": kind.get("is_causal", False), "enable_gqa": size.heads != size.key_heads}

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device().type, AMP[dtype]):
                out = F.scaled_dot_product_attention(query, key, value, bias, **options)
            torch.autograd.grad(out, inputs, cotangent.to(out.dtype))
        wait()

    run(1)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    timing = time_steps(run, seconds)
    return timing.seconds, timing.spread, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def flops(size: Size, kind: Mapping[str, Any]) -> int:
    """FLOPs of the two forward and five backward products, over the pairs of positions that attend to each other."""
    lengths = lengths_of(size) if kind.get("lengths") else [size.length] * size.batch
    window = min(kind.get("window", size.length), size.length // 2 if "window" in kind else size.length)
    causal = kind.get("is_causal")
    pairs = sum(sum(min(i, window) + 1 for i in range(n)) if causal else n * n for n in lengths)
    return 7 * 2 * pairs * size.heads * size.width


def times(results: Results, models: Mapping[str, tuple[Size, Mapping[str, Any]]], seconds: float) -> None:
    has_torch = bool(importlib.util.find_spec("torch"))
    for name, (size, kind) in models.items():
        operands, rest = operands_of(size, kind)
        has_bias = bool(kind.get("bias"))
        for dtype in HALVES:
            row: Row = {"model": name, "size": list(size), "dtype": dtype}
            for how in (*WAYS, *(["torch"] if has_torch else [])):
                if how == "float32" and dtype != HALVES[0]:
                    continue
                try:
                    if how == "torch":
                        took, spread, held = torch_seconds(size, kind, dtype, seconds)
                    else:
                        took, spread, held = jax_seconds(way(how, dtype, rest, has_bias), operands, seconds)
                    row |= {f"{how} seconds": took, f"{how} spread": spread, f"{how} bytes": held}
                except Exception as error:  # out of memory, for one: the other ways can still be measured
                    row[f"{how}: left out"] = reason(error)
            if "ours seconds" in row:
                row["flops_per_second"] = flops(size, kind) / row["ours seconds"]
            results.add("times", row)


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.3f}"


Columns = dict[str, str | Callable[[Any], str]]
ERRORS: Columns = {"kind": "", "dtype": "", "fused as fused calls": "d"} | {how: ".1e" for how in WAYS[:3]}
TIMES: Columns = (
    {"model": "", "dtype": ""}
    | {f"{how} seconds as {how}, ms": milliseconds for how in (*WAYS, "torch")}
    | {"ours spread as spread": ".1%", "flops_per_second as ours, TFLOP/s": lambda value: f"{value / 1e12:.0f}"}
)


def draw(rows: Sequence[Row]) -> Callable[[Any], None]:
    """Draws bars of each way's time divided by ours, by model, in the first dtype."""

    def on(figure: Any) -> None:
        shown = [row for row in rows if row["dtype"] == HALVES[-1] and "ours seconds" in row]
        axes = figure.subplots()
        ways = ("ours", "cuDNN by hand", "XLA by hand", "torch")
        for index, how in enumerate(ways):
            heights = [row.get(f"{how} seconds", 0.0) / row["ours seconds"] for row in shown]
            axes.bar([place + 0.2 * (index - 1.5) for place in range(len(shown))], heights, 0.2, label=how)
        axes.set_xticks(range(len(shown)), [row["model"] for row in shown], fontsize=8)
        axes.set_ylabel(f"time relative to ours, {HALVES[-1]}")
        axes.legend()

    return on


def main(argv: Sequence[str] | None = None) -> None:
    options = arguments(
        __doc__,
        argv,
        tables={"nargs": "+", "choices": ("errors", "times"), "default": ["errors", "times"]},
        seconds={"type": float, "default": None, "help": "of measuring a case"},
    )
    seconds = options.seconds or (0.01 if options.small else 0.5)
    measured = f"one attention, forward and backward, on one {jax.devices()[0].device_kind}, wall clock, median"
    results = Results("attention", measured, small=options.small, out=options.out)
    models = MODELS
    if options.small:
        models = {name: (Size(2, 32, size.heads, size.key_heads, 8), kind) for name, (size, kind) in MODELS.items()}
    if "errors" in options.tables:
        errors(results, SMALL if options.small else SIZE)
        show("Errors of output and gradients against float64", ERRORS, results.tables["errors"])
    if "times" in options.tables:
        times(results, models, seconds)
        results.picture("times", draw(results.tables["times"]), (11.0, 4.5))
        show(f"Times: {measured}", TIMES, results.tables["times"])
    results.write()


if __name__ == "__main__":
    main()
