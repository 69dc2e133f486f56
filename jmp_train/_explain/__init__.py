"""Reports and tests of what autocast does to a program: they read its plans."""

from ._assert_policy import assert_policy as assert_policy
from ._checks import float32_loss as float32_loss
from ._checks import no_float64 as no_float64
from ._checks import no_narrow_sums as no_narrow_sums
from ._checks import no_wide_dots as no_wide_dots
from ._checks import output_dtypes as output_dtypes
from ._explain import explain as explain
from ._report import Explanation as Explanation
