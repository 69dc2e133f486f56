"""Diagnostics: why the scale collapsed, what underflows, which line overflowed, are Tensor Cores used."""

from ._backward import backward_histogram as backward_histogram
from ._exponents import ExponentHistogram as ExponentHistogram
from ._exponents import exponent_histogram as exponent_histogram
from ._found import ArrayRange as ArrayRange
from ._found import Found as Found
from ._gpu import gpu_report as gpu_report
from ._gpu_compare import Comparison as Comparison
from ._gpu_report import GPUReport as GPUReport
from ._matrices import round_up as round_up
from ._overflow import find_overflow as find_overflow
from ._overflow_report import OverflowReport as OverflowReport
from ._overflow_report import overflow_report as overflow_report
from ._plots import plot_exponents as plot_exponents
from ._plots import plot_loss_scale as plot_loss_scale
from ._sensitivity import sensitivity as sensitivity
from ._sensitivity_report import Sensitivity as Sensitivity
from ._suggest import suggest_loss_scale as suggest_loss_scale
from ._tensor_core_report import TensorCoreReport as TensorCoreReport
from ._tensor_cores import tensor_core_report as tensor_core_report
from ._underflow import UnderflowReport as UnderflowReport
from ._underflow import underflow_report as underflow_report
from ._verdict import Verdict as Verdict
