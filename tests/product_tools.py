"""Programs for the tests of products: arguments without data, and convolutions of every kind."""

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.diagnostics import tensor_core_report


def array(*shape, dtype=jnp.float16):
    return jax.ShapeDtypeStruct(shape, dtype)


def products(fn, *args, **options):
    return tensor_core_report(fn, **options)(*args).products


def product(fn, *args, **options):
    (only,) = products(fn, *args, **options)
    return only


CONVOLUTIONS = {
    "plain": {},
    "strided": {"window_strides": (2, 3)},
    "dilated": {"rhs_dilation": (2, 3)},
    "strided and dilated": {"window_strides": (2, 1), "rhs_dilation": (1, 2)},
    "grouped": {"feature_group_count": 4},
    "depthwise": {"feature_group_count": 8, "window_strides": (3, 3)},
    "batch groups": {"batch_group_count": 2},
    "transposed": {"lhs_dilation": (2, 3), "padding": ((2, 2), (2, 2))},
}


def convolution(options):
    settings = {"window_strides": (1, 1), "padding": "VALID"} | options
    groups = settings.get("feature_group_count", 1)

    def fn(x, kernel):
        return lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)

    # Sizes at which the last window ends at the end of the input, so that no element is left out.
    return fn, (2, 13, 19, 8), (3, 3, 8 // groups, 16)
