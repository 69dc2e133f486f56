"""Diagnostics: what a program does to numbers, before and during training. `__init__` is a table of contents."""

from ._found import ArrayRange as ArrayRange
from ._found import Found as Found
from ._overflow import find_overflow as find_overflow
from ._verdict import Verdict as Verdict
