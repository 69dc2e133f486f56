"""Diagnostics: why the scale collapsed, what underflows, which line overflowed, are Tensor Cores used."""

from .formats import ExponentHistogram as ExponentHistogram
from .formats import Sensitivity as Sensitivity
from .formats import UnderflowReport as UnderflowReport
from .formats import backward_histogram as backward_histogram
from .formats import exponent_histogram as exponent_histogram
from .formats import plot_exponents as plot_exponents
from .formats import plot_loss_scale as plot_loss_scale
from .formats import sensitivity as sensitivity
from .formats import suggest_loss_scale as suggest_loss_scale
from .formats import underflow_report as underflow_report
from .gpu import Comparison as Comparison
from .gpu import GPUReport as GPUReport
from .gpu import gpu_report as gpu_report
from .gpu import gpus as gpus
from .overflow import ArrayRange as ArrayRange
from .overflow import Found as Found
from .overflow import OverflowReport as OverflowReport
from .overflow import Verdict as Verdict
from .overflow import find_overflow as find_overflow
from .overflow import overflow_report as overflow_report
from .products import TensorCoreReport as TensorCoreReport
from .products import round_up as round_up
from .products import tensor_core_report as tensor_core_report
