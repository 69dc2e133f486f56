"""Where did the infinity or NaN come from? Parameters by step, and the equation that made the first one."""

from ._find_overflow import ArrayRange as ArrayRange
from ._find_overflow import Found as Found
from ._find_overflow import find_overflow as find_overflow
from ._overflow_report import OverflowReport as OverflowReport
from ._overflow_report import overflow_report as overflow_report
from ._verdict import Verdict as Verdict
