"""Diagnostics: what a program and its gradients are doing, before and during training."""

from ._gpu import gpu_report as gpu_report
from ._gpu_compare import Comparison as Comparison
from ._gpu_report import GPUReport as GPUReport
from ._matrices import round_up as round_up
from ._tensor_core_report import TensorCoreReport as TensorCoreReport
from ._tensor_cores import tensor_core_report as tensor_core_report
