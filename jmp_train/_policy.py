"""Which dtype parameters, computation, outputs and reductions have, as one hashable value.

Decides what a policy is, how it is named and written as text, and which dtype each leaf is cast to. Does not decide
which operations are worth running in 16 bits; see `_autocast/`. The vocabulary is that of `jmp` (DeepMind, 2020).
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from ._dtypes import FLOAT16, FLOAT32, SHORT_NAMES, cast_leaf, did_you_mean, facts, to_dtype, to_precision
from ._paths import OVERWRITE_WITH_GRADIENT, Override, OverridesLike, leaf_paths, pick, to_overrides
from ._text import short_repr

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy:
    """The dtypes of a training step.

    Two policies that mean the same are equal and have one hash, however they were written: a policy can be a
    dictionary key and a static argument of `jax.jit`. `str(policy)` can be read back by `get_policy`.

    Attributes:
      param_dtype: the dtype in which parameters are stored.
      compute_dtype: the dtype in which the forward and backward pass run.
      output_dtype: the dtype that a model returns, and in which a loss is then computed.
      reduce_dtype: the dtype in which gradients are summed, within a device and between devices.
      matmul_precision: how float32 products are computed, as in `jax.default_matmul_precision`: `"highest"` is true
        float32, `"tensorfloat32"` allows TF32, a `jax.lax.DotAlgorithmPreset` may be named. `None` is JAX's default,
        which on GPUs since Ampere allows TF32; under `autocast` in 16 bits it is `"highest"` for products that stay in
        float32.
      overrides: other dtypes for some parameters; each is `(glob, dtype)` or a function `(path, leaf) -> dtype | None`,
        and the last one that gives a dtype wins. `"BatchNorm*"` finds `params/Block_1/BatchNorm_0/scale`; a glob
        matches whole segments at any depth. The dtype of an override is that in which its leaves compute; they are also
        stored in it unless it is narrower than `param_dtype`, because a parameter that is stored narrow loses small
        updates. Under `autocast`, elementwise operations that read a parameter kept in float32 run in float32, but a
        dot or convolution that reads it still runs on operands in `compute_dtype`; keep those wide with `Rules`.

    Reference: Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.

    >>> policy = Policy("float32", jax.numpy.float16, "f32", overrides={"BatchNorm*": "float32"})
    >>> str(policy)
    'params=float32,compute=float16,output=float32,@BatchNorm*=float32'
    >>> params = {"BatchNorm_0": np.ones(2, np.float32), "Dense_0": np.ones(2, np.float32)}
    >>> policy.cast_to_compute(params)
    {'BatchNorm_0': array([1., 1.], dtype=float32), 'Dense_0': array([1., 1.], dtype=float16)}
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    reduce_dtype: np.dtype
    matmul_precision: str | None
    overrides: tuple[Override, ...]

    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        *,
        reduce_dtype: DTypeLike = FLOAT32,
        matmul_precision: str | jax.lax.Precision | None = None,
        overrides: OverridesLike = (),
    ):
        """Builds a policy; every argument is checked and canonicalised here, and no device is touched.

        Raises:
          ValueError: a dtype or precision that does not exist, is not floating, or has fewer than 16 bits.
          TypeError: something that is no dtype, precision or override at all.
        """
        # Frozen: the canonical values can only be set past `__setattr__`.
        set_field = object.__setattr__
        set_field(self, "param_dtype", _policy_dtype(param_dtype, "param_dtype"))
        set_field(self, "compute_dtype", _policy_dtype(compute_dtype, "compute_dtype"))
        set_field(self, "output_dtype", _policy_dtype(output_dtype, "output_dtype"))
        set_field(self, "reduce_dtype", _policy_dtype(reduce_dtype, "reduce_dtype"))
        set_field(self, "matmul_precision", to_precision(matmul_precision))
        set_field(self, "overrides", to_overrides(overrides, _override_dtype))

    def cast_to_param(self, tree: Tree) -> Tree:
        """Casts floating leaves to the dtype in which they are stored: `param_dtype`, or a wider override.

        See `cast_floating` for what is a floating leaf. Flax's `_overwrite_with_gradient` statistics are left alone.

        Raises:
          ValueError: a glob of `overrides` matches nothing in a tree that has leaves.
        """
        return self._cast(tree, [self._stored(dtype) for dtype in self.override_dtypes(tree)])

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Casts floating leaves to the dtype in which they compute: the override that matches, or `compute_dtype`.

        Raises:
          ValueError: a glob of `overrides` matches nothing in a tree that has leaves. To cast a tree without the
            parameters, such as a batch, call `policy.replace(overrides=()).cast_to_compute(batch)`.
        """
        return self._cast(tree, [dtype or self.compute_dtype for dtype in self.override_dtypes(tree)])

    def cast_to_output(self, tree: Tree) -> Tree:
        """Casts floating leaves to `output_dtype`; `overrides` are for parameters and are ignored here.

        >>> get_policy("mixed_float16").cast_to_output(np.ones(2, np.float16))
        array([1., 1.], dtype=float32)
        """
        return self._cast(tree, [self.output_dtype] * len(jax.tree.leaves(tree)))

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Returns the same policy with another `output_dtype`.

        >>> str(get_policy("mixed_float16").with_output_dtype("float16"))
        'params=float32,compute=float16,output=float16'
        """
        return self.replace(output_dtype=output_dtype)

    def replace(self, **changes: Any) -> "Policy":
        """Returns the same policy with other values for the fields named, checked as at construction.

        >>> get_policy("mixed_float16").replace(compute_dtype="bf16") == get_policy("mixed_bfloat16")
        True
        """
        return dataclasses.replace(self, **changes)

    def override_dtypes(self, tree: Any) -> list[np.dtype | None]:
        """Returns the dtype that `overrides` ask for, or `None`, for each of `jax.tree.leaves(tree)`.

        Raises:
          ValueError: a glob matches nothing in a tree that has leaves.

        >>> Policy("f32", "f16", "f32", overrides={"b": "f32"}).override_dtypes({"a": 1.0, "b": 2.0})
        [None, dtype('float32')]
        """
        return pick(self.overrides, tree, _override_dtype)

    def _stored(self, override: np.dtype | None) -> np.dtype:
        if override is None or facts(override).bits < facts(self.param_dtype).bits:
            return self.param_dtype
        return override

    def _cast(self, tree: Tree, dtypes: list[np.dtype]) -> Tree:
        leaves, treedef = jax.tree.flatten(tree)
        kept = [OVERWRITE_WITH_GRADIENT in path.split("/") for path in leaf_paths(tree)]
        parts = zip(leaves, dtypes, kept, strict=True)
        return treedef.unflatten([leaf if keep else cast_leaf(leaf, dtype) for leaf, dtype, keep in parts])

    def __str__(self) -> str:
        fields = [f"params={self.param_dtype}", f"compute={self.compute_dtype}", f"output={self.output_dtype}"]
        fields += [f"reduce={self.reduce_dtype}"] * (self.reduce_dtype != FLOAT32)
        fields += [f"matmul_precision={self.matmul_precision}"] * (self.matmul_precision is not None)
        # A function has no text form: it is shown, and `get_policy` says so when it meets it.
        fields += [
            f"@<{getattr(entry, '__name__', type(entry).__name__)}>" if callable(entry) else f"@{entry[0]}={entry[1]}"
            for entry in self.overrides
        ]
        return ",".join(fields)

    def __repr__(self) -> str:
        arguments = [repr(dtype.name) for dtype in (self.param_dtype, self.compute_dtype, self.output_dtype)]
        arguments += [f"reduce_dtype='{self.reduce_dtype}'"] * (self.reduce_dtype != FLOAT32)
        arguments += [f"matmul_precision={self.matmul_precision!r}"] * (self.matmul_precision is not None)
        shown = tuple(entry if callable(entry) else (entry[0], entry[1].name) for entry in self.overrides)
        arguments += [f"overrides={shown}"] * bool(shown)
        return f"Policy({', '.join(arguments)})"


def uses_float16(policy: Policy) -> bool:
    """Returns whether anything in `policy` is float16, so that gradients can underflow without a loss scale."""
    named = [policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.reduce_dtype]
    return FLOAT16 in [*named, *(entry[1] for entry in policy.overrides if not callable(entry))]


def _policy_dtype(value: DTypeLike, argument: str) -> np.dtype:
    dtype = to_dtype(value, argument)
    if facts(dtype).bits < 16:
        raise ValueError(
            f"`{argument}` must have 16 bits or more, got {dtype}: numbers of 8 bits need a scale for every tensor, "
            f"which a cast does not have; quantise inside the model and choose 'float16' or 'bfloat16' here."
        )
    return dtype


_override_dtype = functools.partial(_policy_dtype, argument="overrides")

_FLOAT16 = Policy("float16", "float16", "float16")
_FLOAT32 = Policy("float32", "float32", "float32", matmul_precision="highest")
_MIXED_FLOAT16 = Policy("float32", "float16", "float32")
_NAMED = {
    "float32": _FLOAT32,
    "tensorfloat32": _FLOAT32.replace(matmul_precision="tensorfloat32"),
    "mixed_float16": _MIXED_FLOAT16,
    "mixed_bfloat16": _MIXED_FLOAT16.replace(compute_dtype="bfloat16"),
    "float16": _FLOAT16,
    "bfloat16": Policy("bfloat16", "bfloat16", "bfloat16"),
    "float64": Policy("float64", "float64", "float64", reduce_dtype="float64"),
    "O0": _FLOAT32,
    "O1": _MIXED_FLOAT16,
    "O2": _FLOAT16.replace(output_dtype="float32"),
    "O3": _FLOAT16,
}
_NAMED |= {short: _NAMED[dtype.name] for short, dtype in SHORT_NAMES.items()}
_KEYS = {
    "p": "param_dtype",
    "params": "param_dtype",
    "c": "compute_dtype",
    "compute": "compute_dtype",
    "o": "output_dtype",
    "output": "output_dtype",
    "r": "reduce_dtype",
    "reduce": "reduce_dtype",
    "matmul_precision": "matmul_precision",
}


def get_policy(policy: str | Policy) -> Policy:
    """Returns the policy that a name or a spec stands for.

    Names:
      `float32`, `O0`: everything in float32, and strictly so: no TF32.
      `tensorfloat32`: float32, with products in TF32 where the GPU has it.
      `mixed_float16`, `O1`: parameters and outputs in float32, computation in float16. Needs a loss scale.
      `mixed_bfloat16`: the same in bfloat16; no loss scale needed, three bits of precision less.
      `float16`, `O3`; `bfloat16`: parameters and outputs too in 16 bits; for inference, and to know the top speed.
      `O2`: parameters in float16, outputs in float32; train it with `with_master_weights`. Apex's O2 also keeps
        BatchNorm's parameters in float32, which is `.replace(overrides={"BatchNorm*": "float32"})` where a model has
        such layers; their statistics are computed in float32 by autocast in any case.
      A dtype's short name (`f32`, `full`, `f16`, `half`, `bf16`, `f64`): the policy of the long name.

    A spec is `"params=float32,compute=float16,output=float32"`, in any order and with `p`, `c`, `o` for short. Keys
    left out are as in jmp: params is float32, compute follows params, output follows compute. `reduce=` and
    `matmul_precision=` set the other fields, and each `@glob=dtype` adds an override.

    Args:
      policy: a name or a spec; a `Policy` is returned as it is.

    Raises:
      ValueError: an unknown name or a malformed spec; the message says which part.
      TypeError: neither a string nor a `Policy`.

    Reference: the levels O0 to O3 are those of NVIDIA Apex; https://nvidia.github.io/apex/amp.html.

    >>> str(get_policy("p=f32, c=bf16"))
    'params=float32,compute=bfloat16,output=bfloat16'
    >>> get_policy("c=f16,o=full,@BatchNorm*=f32").overrides
    (('BatchNorm*', dtype('float32')),)
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise TypeError(
            f"`policy` must be a Policy or a name such as 'mixed_float16', got {short_repr(policy)} of type "
            f"{type(policy).__name__}."
        )
    name = policy.strip()
    if name in _NAMED:
        return _NAMED[name]
    if "=" in name:
        return _parse_spec(name)
    raise ValueError(
        f"unknown policy {policy!r}{did_you_mean(name, _NAMED)}; the names are {', '.join(_NAMED)}, and "
        f"'params=float32,compute=float16,output=float32' is the form of any other policy."
    )


def _parse_spec(spec: str) -> Policy:
    fields: dict[str, str] = {}
    overrides: list[tuple[str, str]] = []
    for part in spec.split(","):
        key, value = _split_part(part, spec)
        if key.startswith("@"):
            overrides.append((key[1:], value))
            continue
        if key not in _KEYS:
            raise ValueError(
                f"policy {spec!r}: unknown key '{key}'{did_you_mean(key, _KEYS)}; the keys are params (p), compute "
                f"(c), output (o), reduce (r), matmul_precision, and @glob for an override."
            )
        if _KEYS[key] in fields:
            raise ValueError(f"policy {spec!r}: '{key}' sets {_KEYS[key]} a second time; give every key once.")
        fields[_KEYS[key]] = value
    params = fields.pop("param_dtype", "float32")
    compute = fields.pop("compute_dtype", params)
    output = fields.pop("output_dtype", compute)
    try:
        return Policy(params, compute, output, **fields, overrides=overrides)
    except ValueError as error:
        raise ValueError(f"policy {spec!r}: {error}") from None


def _split_part(part: str, spec: str) -> tuple[str, str]:
    if part.strip().startswith("@<"):
        raise ValueError(
            f"policy {spec!r}: {part.strip()!r} stands for a function, which text cannot carry; add it with "
            f"policy.replace(overrides=...)."
        )
    key, *values = (piece.strip() for piece in part.split("="))
    if len(values) != 1 or not key or not values[0]:
        raise ValueError(f"policy {spec!r}: the part {part!r} is not of the form key=dtype, such as 'compute=float16'.")
    return key, values[0]
