"""Are Tensor Cores used, and what would more of them bring? Dots and convolutions of a traced program."""

from ._products import round_up as round_up
from ._tensor_core_report import TensorCoreReport as TensorCoreReport
from ._tensor_core_report import tensor_core_report as tensor_core_report
