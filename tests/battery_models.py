"""The battery: every model on which autocast is tested, with the seeds and sizes of the tests."""

import battery_dense
import battery_images
import battery_plain
import battery_sequences
from battery_row import LARGE as LARGE
from battery_row import SMALL as SMALL
from battery_row import Row as Row
from battery_row import Size as Size

ROWS = [*battery_dense.ROWS, *battery_images.ROWS, *battery_sequences.ROWS, *battery_plain.ROWS]
BY_NAME = {row.name: row for row in ROWS}

# The rows that also run in bfloat16: those with large numbers, and those whose roundings add up. The planner treats
# both dtypes alike, but bfloat16 rounds more and does not overflow. Of similar losses, masks or loops one is enough.
IN_BFLOAT16 = {
    "mlp", "targets_1e5", "optax_ctc", "cnn_batchnorm", "resnet", "unet", "gan_gradient_penalty", "gru", "transformer",
    "transformer_block", "transformer_scan_remat", "mask_literal_1e9", "rmsnorm_large", "rotary", "experts",
    "einsum_attention", "our_attention", "per_example_clipping", "gaussian_process", "fourier", "spectral_norm",
    "state_space", "quantised",
}  # fmt: skip
