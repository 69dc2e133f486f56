"""The checks that `assert_policy` can run on a program; each function returns a check."""

from ._explain import no_wide_dots as no_wide_dots
from ._explain import no_narrow_sums as no_narrow_sums
from ._explain import no_float64 as no_float64
from ._explain import float32_loss as float32_loss
from ._explain import output_dtypes as output_dtypes
