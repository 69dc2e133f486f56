"""The cost of a histogram compiled for an H200: one pass over each leaf, in integers, without a sort."""

import jax
import jax.numpy as jnp
import pytest

from jmp_train import diagnostics
from jmp_train._diagnostics.gpu._compile import gpu_module
from jmp_train._diagnostics.gpu._kernels import traffic

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "report", [diagnostics.exponent_histogram, diagnostics.underflow_report, diagnostics.suggest_loss_scale]
)
def test_one_pass_over_a_leaf(report, dtype):
    leaf = jax.ShapeDtypeStruct((4096, 4096), dtype)
    text = gpu_module(report, {"w": leaf})
    found = traffic(text)
    print(f"{found / 1e6:.1f} MB for a leaf of {leaf.size * leaf.dtype.itemsize / 1e6:.1f}")
    assert found <= leaf.size * leaf.dtype.itemsize + 2e6
    assert " sort(" not in text and "conditional(" not in text
