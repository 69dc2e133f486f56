"""A weight that is cast before it is sent to the devices that multiply by it, which halves the bytes.

    g:f32[8n,m] = all_gather w:f32[n,m]        g:f16[n,m] = cast w
    c:f16[8n,m] = cast g                 ->    c:f16[8n,m] = all_gather g

Parameters that are sharded over devices and gathered layer by layer (Rajbhandari et al., "ZeRO", 2020) are an example.
XLA moves the cast before the gather where it finds both in one place, but not if a loop or a `shard_map` returns the
gathered value for the backward pass. The derivative stays that of a cast after the transfer: gradients are summed in
float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ...._jaxpr import Node, bind
from ...emit import cast
from ...ir import Program
from ...primitives import CAST_FIRST
from .rewrite import Computation


def narrow_transfers(program: Program) -> Program:
    """The program whose transfers of weights for dots send the compute dtype."""
    equations = [*program.equations]
    sent = [i for i, equation in enumerate(equations) if equation.entry is CAST_FIRST]
    for i in sent:
        equations[i] = equations[i].replace(computes=[program.low], rewrite=casts_first(program.low))
    return program.replace(equations=equations) if sent else program


def casts_first(low: np.dtype) -> Computation:
    """Sends a cast of an array in place of the array, with the derivative of a cast after the transfer."""

    def send_copy(node: Node, operands: Sequence[Any]) -> list[jax.Array]:
        @jax.custom_jvp
        def sent(x: jax.Array) -> jax.Array:
            # A `reshard` from explicit to automatic mesh axes is bound under the mesh of its result, under which JAX
            # casts no array of the operand's mesh.
            with jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh):
                narrow = cast(x, low)
            return bind(node.eqn, [narrow])[0]

        @sent.defjvp
        def derivative(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return sent(*primals), cast(bind(node.eqn, tangents)[0], low)

        return [sent(*operands)]

    return send_copy
