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
