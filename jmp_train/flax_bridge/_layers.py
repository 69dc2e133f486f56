"""A policy as keyword arguments of Flax's layers.

Decides which keywords express a policy. Does not decide what the layers do with them.
"""

from typing import Any

from .._policy import Policy, get_policy


def module_dtypes(policy: Policy | str) -> dict[str, Any]:
    """The keywords `dtype` (compute) and `param_dtype` that Linen and NNX layers take.

    For models that choose their own precision, layer by layer; autocast needs no such keywords. Two things differ from
    autocast: the layers' backward passes sum in 16 bits, and a layer returns `dtype` as well as computing in it. The
    policy's `overrides` select parameters by path, which a layer does not know: give a layer that stays in float32 the
    keywords of another policy.

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
