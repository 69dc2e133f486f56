"""Scaled dot-product attention as three primitives, which autocast can narrow as a whole.

`_function.py` has the function that users call, `_primitives.py` the primitives that are recorded, `_reference.py` the
arithmetic in `jax.numpy`, and `_cudnn.py` the fused kernels that run in its place on NVIDIA GPUs, with their limits.
"""

import os

from .._jaxpr import leave_out_of_source_lines
from ._cudnn import generation as generation
from ._cudnn import why_not_fused as why_not_fused
from ._function import dot_product_attention as dot_product_attention
from ._primitives import ATTENTION as ATTENTION
from ._primitives import ATTENTION_TANGENT as ATTENTION_TANGENT
from ._primitives import names_of_operands as names_of_operands
from ._settings import DROPOUT as DROPOUT

leave_out_of_source_lines(os.path.dirname(__file__) + os.sep)
