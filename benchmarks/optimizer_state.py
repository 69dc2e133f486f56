"""What do an optimizer's state and the parameters cost in 16 bits, in bytes and in accuracy?

    python benchmarks/optimizer_state.py [--small]

Three measurements: the bytes that one step of Adam over 33.5 million parameters moves and holds, compiled for an H200
(`.[gpu-report]`) as a program that is given the gradients; the final loss of an MLP on scikit-learn's digits over all
its training data (1,500 steps, three seeds, on this CPU); and the value of a second moment after its gradients have
become small.

The ways: *nearest* rounds both moments to the nearest bfloat16 number, as libraries ship it; *stochastic* is
`with_low_precision_state` for moments and `with_stochastic_rounding` for parameters; *Kahan* keeps the rounding error
of every parameter in a second bfloat16 number; *masters* are `with_master_weights`.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on a GPU

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _results import Results, arguments, show

import jmp_train as jmp
from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train._diagnostics.gpu._findings import copies
from jmp_train._diagnostics.gpu._kernels import kernels, traffic

SEEDS = (0, 1, 2)
STEPS = 1500
LEARNING_RATE = 4e-3
Transformation = Any


class _Compensated(NamedTuple):
    inner_state: Any
    lost: Any


def to_nearest(inner: Transformation) -> Transformation:
    """Both moments of Adam in bfloat16, rounded to the nearest number."""

    def cast(state: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(updates, cast(state, jnp.float32), params)
        return updates, cast(state, jnp.bfloat16)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), jnp.bfloat16), update)


def wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def in_float32(inner: Transformation) -> Transformation:
    """Runs `inner` in float32; the new parameters are rounded to the nearest number of their dtype."""
    return optax.GradientTransformation(
        lambda params: inner.init(wide(params)),
        lambda updates, state, params=None: inner.update(wide(updates), state, wide(params)),
    )


def compensated(inner: Transformation) -> Transformation:
    """Kahan summation for bfloat16 parameters: the error of a rounding is added to the next update.

    Reference: Zamirai et al., "Revisiting BFloat16 Training", 2020, algorithm 3.
    """

    def init(params: Any) -> Any:
        return _Compensated(inner.init(wide(params)), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner_state = inner.update(wide(updates), state.inner_state, wide(params))
        whole = jax.tree.map(lambda u, lost: u + lost.astype(jnp.float32), updates, state.lost)
        moved = jax.tree.map(
            lambda p, u: (p + u).astype(p.dtype).astype(jnp.float32) - p.astype(jnp.float32), params, whole
        )
        lost = jax.tree.map(lambda u, m: (u - m).astype(jnp.bfloat16), whole, moved)
        return moved, _Compensated(inner_state, lost)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to store parameters and state: `wrap(inner)` around Adam; `dtype` of parameters and gradients."""

    parameters: str
    state: str
    wrap: Callable[[Any], Transformation]
    dtype: str = "float32"
    adam: Callable[..., Transformation] = optax.adam

    @property
    def name(self) -> str:
        return f"{self.parameters}, {self.state}"

    def optimizer(self, learning_rate: float) -> Transformation:
        return self.wrap(self.adam(learning_rate))


def _same(inner: Transformation) -> Transformation:
    return inner


def _half_mu(learning_rate: float) -> Transformation:
    return optax.adam(learning_rate, mu_dtype=jnp.bfloat16)


LOW = jmp.with_low_precision_state
STOCHASTIC = jmp.with_stochastic_rounding
WAYS = (
    Way("float32", "float32", _same),
    Way("float32", "optax mu_dtype", _same, adam=_half_mu),
    Way("float32", "nearest", to_nearest),
    Way("float32", "stochastic", LOW),
    Way("bfloat16 nearest", "float32", in_float32, "bfloat16"),
    Way("bfloat16 stochastic", "float32", STOCHASTIC, "bfloat16"),
    Way("bfloat16 stochastic", "stochastic", lambda tx: STOCHASTIC(LOW(tx)), "bfloat16"),
    Way("bfloat16 Kahan", "float32", compensated, "bfloat16"),
    Way("bfloat16 Kahan", "stochastic", lambda tx: compensated(LOW(tx)), "bfloat16"),
    Way("bfloat16 masters", "float32", jmp.with_master_weights, "bfloat16"),
    Way("bfloat16 masters", "stochastic", lambda tx: jmp.with_master_weights(LOW(tx)), "bfloat16"),
)


def compiled(results: Results, way: Way, shapes: list[tuple[int, ...]]) -> None:
    """Bytes of a step per parameter, without and with a dynamic loss scale."""
    size = sum(int(np.prod(shape)) for shape in shapes)
    row: dict[str, Any] = {"parameters": way.parameters, "state": way.state, "gradients": way.dtype}
    for prefix, scaled in (("", False), ("scaled_", True)):
        tx: Any = way.optimizer(1e-3)
        tx = jmp.with_loss_scale(tx) if scaled else tx

        def step(carry: Any, grads: Any, tx: Any = tx, scaled: bool = scaled) -> Any:
            params, state = carry
            grads = jmp.get_loss_scale(state).unscale(grads) if scaled else grads
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = [jax.ShapeDtypeStruct(shape, way.dtype) for shape in shapes]
        state = jax.eval_shape(tx.init, params)
        text = gpu_module(step, (params, state), params, donate_argnums=0)
        row |= {f"{prefix}moved": traffic(text) / size, f"{prefix}kernels": len(kernels(text))}
        row |= {f"{prefix}copies": len(copies(text))}
        if not scaled:
            row["held"] = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)) if x.ndim) / size
    results.add("optimizer step", row)


def digits() -> tuple[jax.Array, jax.Array]:
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    return jnp.asarray(data.data / 16, jnp.float32), jnp.asarray(data.target)


def trained(results: Results, way: Way, steps: int) -> None:
    """The final loss over all training data, for each seed."""
    images, labels = digits()

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        (first, bias), (second, offset) = wide(params)
        hidden = jax.nn.relu(images @ first + bias)
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ second + offset, labels).mean()

    tx = way.optimizer(LEARNING_RATE)

    @jax.jit
    def run(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, 3)
        params: Any = (
            (jax.random.normal(keys[0], (64, 256)) / 8, jnp.zeros(256)),
            (jax.random.normal(keys[1], (256, 10)) / 16, jnp.zeros(10)),
        )
        params = jax.tree.map(lambda x: x.astype(way.dtype), params)

        def body(carry: Any, key: jax.Array) -> tuple[Any, None]:
            params, state = carry
            chosen = jax.random.randint(key, (128,), 0, len(labels))
            grads = jax.grad(loss)(params, images[chosen], labels[chosen])
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(body, (params, tx.init(params)), jax.random.split(keys[2], steps))
        return loss(params, images, labels)

    losses = [float(run(jax.random.key(seed))) for seed in SEEDS]
    results.add("digits", {"parameters": way.parameters, "state": way.state, "steps": steps, "losses": losses})


def falling(results: Results, state: str, wrap: Callable[[Any], Transformation]) -> None:
    """Adam's second moment after 20 gradients of 10 and then 6,000 of 0.1: the mean over 10,000 parameters."""
    params, tx = jnp.zeros(10_000), wrap(optax.scale_by_adam())

    def body(step: jax.Array, state: Any) -> Any:
        return tx.update(jnp.full(params.shape, jnp.where(step < 20, 10.0, 0.1)), state, params)[1]

    final = jax.jit(lambda state: jax.lax.fori_loop(0, 6020, body, state))(tx.init(params))
    moment: Any = final.inner_state.nu if isinstance(final, jmp.LowPrecisionState) else final.nu
    results.add("second moment", {"state": state, "nu": float(jnp.mean(moment.astype(jnp.float32)))})


def print_tables(results: Results) -> None:
    losses = {(row["parameters"], row["state"]): row["losses"] for row in results.tables["digits"]}
    columns = {
        "parameters": "",
        "state": "",
        "gradients": "",
        "moved as bytes moved": ".2f",
        "scaled_moved as with the loss scale": ".2f",
        "held as bytes held": ".2f",
        "losses as final training loss, 1e-4": lambda each: " ".join(f"{1e4 * loss:.2f}" for loss in each),
        "kernels": "d",
        "copies": "d",
    }
    rows = [row | {"losses": losses[row["parameters"], row["state"]]} for row in results.tables["optimizer step"]]
    show("bytes a parameter and the digits", columns, rows)
    show(
        "second moment",
        {"state": "", "nu as 20 gradients of 10, then 6,000 of 0.1": ".5f"},
        results.tables["second moment"],
    )


def draw(results: Results) -> None:
    def picture(figure: Any) -> None:
        rows = results.tables["optimizer step"]
        axes = figure.subplots()
        names = [f"{row['parameters']}, {row['state']}" for row in rows]
        axes.barh(names, [row["moved"] for row in rows], color="tab:blue", label="moved")
        axes.barh(names, [row["held"] for row in rows], color="tab:orange", label="held", height=0.4)
        axes.invert_yaxis()
        axes.set_xlabel("bytes a parameter, one step of Adam")
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=8)

    results.picture("bytes", picture, (8.0, 4.0))


def main() -> None:
    options = arguments(__doc__)
    small = options.small
    results = Results(
        "optimizer_state",
        "compiled for an NVIDIA H200; losses on this CPU",
        seeds=SEEDS,
        small=small,
        out=options.out,
    )
    for way in WAYS:
        compiled(results, way, [(256, 256)] if small else [(4096, 4096)] * 2)
    for way in WAYS:
        trained(results, way, 20 if small else STEPS)
    for state, wrap in (("float32", _same), ("nearest", to_nearest), ("stochastic", LOW)):
        falling(results, state, wrap)
    print_tables(results)
    draw(results)
    results.write()


if __name__ == "__main__":
    main()
