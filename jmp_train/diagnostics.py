"""Reports on numbers and on compiled programs: why a scale collapsed, what underflows, what a GPU will run."""

from ._diagnostics import exponent_histogram as exponent_histogram
from ._diagnostics import ExponentHistogram as ExponentHistogram
from ._diagnostics import underflow_report as underflow_report
from ._diagnostics import UnderflowReport as UnderflowReport
from ._diagnostics import suggest_loss_scale as suggest_loss_scale
from ._diagnostics import overflow_report as overflow_report
from ._diagnostics import OverflowReport as OverflowReport
from ._diagnostics import plot_exponents as plot_exponents
from ._diagnostics import plot_loss_scale as plot_loss_scale
from ._diagnostics import backward_histogram as backward_histogram
from ._diagnostics import find_overflow as find_overflow
from ._diagnostics import Found as Found
from ._diagnostics import ArrayRange as ArrayRange
from ._diagnostics import Verdict as Verdict
from ._diagnostics import tensor_core_report as tensor_core_report
from ._diagnostics import TensorCoreReport as TensorCoreReport
from ._diagnostics import round_up as round_up
from ._diagnostics import gpu_report as gpu_report
from ._diagnostics import gpus as gpus
from ._diagnostics import GPUReport as GPUReport
from ._diagnostics import sensitivity as sensitivity
from ._diagnostics import Sensitivity as Sensitivity
