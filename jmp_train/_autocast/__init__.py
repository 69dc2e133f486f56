"""Autocast: unmodified functions in mixed precision, by a compiler from jaxprs to jaxprs.

`planner.py` lists the passes; `ir.py` is what they read and write; `emit.py` runs the result.
"""

from .autocast import autocast as autocast
from .autocast import matmul_precision as matmul_precision
from .primitives import Rule as Rule
from .rules import DEFAULT_RULES as DEFAULT_RULES
from .rules import Rules as Rules
from .rules import check_rules as check_rules
from .rules import full_precision as full_precision
from .rules import low_precision as low_precision
