"""What does a number format do to a program? Exponents, underflow, loss scales, and the error of the gradient."""

from ._exponent_histogram import ExponentHistogram as ExponentHistogram
from ._exponent_histogram import backward_histogram as backward_histogram
from ._exponent_histogram import exponent_histogram as exponent_histogram
from ._plots import plot_exponents as plot_exponents
from ._plots import plot_loss_scale as plot_loss_scale
from ._sensitivity import Sensitivity as Sensitivity
from ._sensitivity import sensitivity as sensitivity
from ._underflow import UnderflowReport as UnderflowReport
from ._underflow import suggest_loss_scale as suggest_loss_scale
from ._underflow import underflow_report as underflow_report
