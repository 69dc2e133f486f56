"""Which equations run in float32 because all that read them do, in programs of a few lines."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pass_tools import after

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(16, 16)), "v": RNG.normal(size=(16, 16)), "b": RNG.normal(size=16)}
PARAMS = jax.tree.map(lambda leaf: leaf.astype(np.float32), PARAMS)
X = RNG.normal(size=(2, 16)).astype(np.float32)

# Of two products, parameters and data, with which float32 reads what comes before it.
CASES = {
    "a sum": (lambda a, b, p, x: (a + b) * x, "add", ["full"]),
    "a chain": (lambda a, b, p, x: ((a + b) - b) * x, "add sub", ["full", "full"]),
    "a choice": (lambda a, b, p, x: jnp.where(p["b"] > 0, a + b, b) * x, "add select_n", ["low", "low"]),
    "a bias": (lambda a, b, p, x: (a + p["b"]) * x, "add", ["low"]),
    "a scale": (lambda a, b, p, x: (a * p["b"]) * x, "mul", ["full", "full"]),
    "a bias of a sum": (lambda a, b, p, x: (a + b + p["b"]) * x, "add", ["full", "full"]),
    "read by a dot as well": (lambda a, b, p, x: ((a + b) * x, (a + b) @ p["w"]), "add", ["full", "low"]),
    "read across a dot": (lambda a, b, p, x: (a + b) * (x @ p["w"] @ p["w"]), "add", ["low"]),
    "returned": (lambda a, b, p, x: [u := a + b, u * x], "add", ["low"]),
    "with data": (lambda a, b, p, x: (a + x) * x, "add", ["full"]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_only_float32_reads_runs_in_float32(name):
    fn, primitives, expected = CASES[name]
    program = after("widen", lambda p, x: fn(x @ p["w"], x @ p["v"], p, x), PARAMS, X)
    found = [
        program.facts[equation.results[0]].precision.value
        for equation in program.equations
        if equation.name in primitives.split()
    ]
    assert found == expected
