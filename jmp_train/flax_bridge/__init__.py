"""Flax: training states for Linen and NNX whose skipped steps leave nothing behind, and gradients of modules.

Imported by those who use it, `from jmp_train import flax_bridge`; `import jmp_train` does not need Flax.
"""

from ._layers import module_dtypes as module_dtypes
from ._modules import NNXTrainState as NNXTrainState
from ._modules import update_module as update_module
from ._modules import value_and_grad as value_and_grad
from ._train_state import TrainState as TrainState
