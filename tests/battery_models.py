"""The battery: every model that autocast is tested on, and the seeds and sizes it is tested with."""

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

# Both dtypes take one path through the planner; in bfloat16 nothing overflows and roundings are larger. Rows run in it
# whose numbers are large, or whose roundings add up: a loss, a mask or a loop that stands for others does so once.
IN_BFLOAT16 = {
    "mlp", "targets_1e5", "optax_ctc", "cnn_batchnorm", "resnet", "unet", "gan_gradient_penalty", "gru", "transformer",
    "transformer_block", "transformer_scan_remat", "mask_literal_1e9", "rmsnorm_large", "rotary", "experts",
    "einsum_attention", "our_attention", "per_example_clipping", "gaussian_process", "fourier", "spectral_norm",
    "state_space", "quantised",
}  # fmt: skip
