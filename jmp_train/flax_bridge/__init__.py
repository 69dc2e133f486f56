"""Flax: training states for Linen and NNX in which a skipped step changes only the loss scale, and module gradients.

Import it with `from jmp_train import flax_bridge`; `import jmp_train` does not need Flax.

Checkpoints. A state is one pytree, so Orbax saves and restores it whole, loss scale and counters included, and a run
resumes bit for bit. `tests/test_checkpoints.py` holds each of these:

    save            manager.save(step, args=ocp.args.StandardSave(state)); asynchronous, and `state` may be donated next
    restore         template = jax.tree.map(ocp.utils.to_shape_dtype_struct, TrainState.create(...))
                    state = manager.restore(step, args=ocp.args.StandardRestore(template))
    16-bit params   save jmp_train.cast_to_full(state): float32 on disk. The template's dtypes undo it, exactly
    other policy    parameters are float32 under every mixed policy: restore and go on with another `value_and_grad`
    other scale     restore with the old `tx`, then state = new.replace(step=old.step, params=old.params,
                    opt_state=new.opt_state._replace(inner_state=old.opt_state.inner_state)), and what else it holds
    no scaling      old.opt_state.inner_state is the state of the optimizer inside with_loss_scale
    other devices   a template with other shardings

`flax.serialization.to_bytes` and `from_bytes` write and read a `TrainState` too, once this package is imported, if its
keys were made by `jax.random.PRNGKey`: Flax writes neither typed keys nor the `nnx.State` of an `NNXTrainState`.
"""

from . import _serialization as _serialization
from ._attention_fn import dot_product_attention as dot_product_attention
from ._layers import module_dtypes as module_dtypes
from ._modules import NNXTrainState as NNXTrainState
from ._modules import update_module as update_module
from ._modules import value_and_grad as value_and_grad
from ._train_state import TrainState as TrainState
