"""Diagnostics: why the scale collapsed, what underflows, which layer overflowed."""

from ._exponents import ExponentHistogram as ExponentHistogram
from ._exponents import exponent_histogram as exponent_histogram
from ._overflow_report import OverflowReport as OverflowReport
from ._overflow_report import overflow_report as overflow_report
from ._plots import plot_exponents as plot_exponents
from ._plots import plot_loss_scale as plot_loss_scale
from ._sensitivity import sensitivity as sensitivity
from ._sensitivity_report import Sensitivity as Sensitivity
from ._suggest import suggest_loss_scale as suggest_loss_scale
from ._underflow import UnderflowReport as UnderflowReport
from ._underflow import underflow_report as underflow_report
