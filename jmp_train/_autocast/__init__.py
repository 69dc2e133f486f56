"""Autocast: unmodified functions in mixed precision, as plain as `table -> plan -> evaluate`."""

from ._assert_policy import assert_policy as assert_policy
from ._autocast import autocast as autocast
from ._autocast import matmul_precision as matmul_precision
from ._checks import float32_loss as float32_loss
from ._checks import no_float64 as no_float64
from ._checks import no_narrow_sums as no_narrow_sums
from ._checks import no_wide_dots as no_wide_dots
from ._checks import output_dtypes as output_dtypes
from ._explain import explain as explain
from ._report import Explanation as Explanation
from ._rules import DEFAULT_RULES as DEFAULT_RULES
from ._rules import Rules as Rules
from ._rules import full_precision as full_precision
from ._rules import low_precision as low_precision
from ._table import Rule as Rule
