"""A policy in the words of Flax's layers.

Decides which keywords say what a policy says. Does not decide what the layers make of them.
"""

from typing import Any

from .._policy import Policy, get_policy


def module_dtypes(policy: Policy | str) -> dict[str, Any]:
    """The keywords `dtype` (compute) and `param_dtype` that Linen and NNX layers take.

    For models that choose their own precision, layer by layer; autocast needs no such keywords. Two things differ from
    autocast: the layers' backward passes sum in 16 bits, and `dtype` is what a layer returns as well as what it
    computes in. The policy's `overrides` go by the paths of parameters, which a layer does not know: give a layer that
    stays wide the keywords of another policy.

    Args:
      policy: a `Policy`, or a name for `get_policy`.

    Example:
      >>> from flax import linen as nn
      >>> layer = nn.Dense(8, **module_dtypes("mixed_bfloat16"))
      >>> print(layer.dtype, layer.param_dtype)
      bfloat16 float32
    """
    policy = get_policy(policy)
    return {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
