"""Autocast: unmodified functions in mixed precision, as plain as `table -> plan -> evaluate`."""

from ._autocast import autocast as autocast
from ._autocast import matmul_precision as matmul_precision
from ._rules import DEFAULT_RULES as DEFAULT_RULES
from ._rules import Rules as Rules
from ._rules import full_precision as full_precision
from ._rules import low_precision as low_precision
from ._table import Rule as Rule
