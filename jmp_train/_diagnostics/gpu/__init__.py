"""What will a GPU run? A program compiled for a GPU that need not be there, read from the text of its module."""

from ._compile import abstract_mesh as abstract_mesh
from ._compile import check_sizes as check_sizes
from ._compile import traced_program as traced_program
from ._gpu_report import Comparison as Comparison
from ._gpu_report import GPUReport as GPUReport
from ._gpu_report import gpu_report as gpu_report
from ._gpus import GPU as GPU
from ._gpus import NARROW_UNITS as NARROW_UNITS
from ._gpus import UNITS as UNITS
from ._gpus import WithProducts as WithProducts
from ._gpus import get_gpu as get_gpu
from ._gpus import gpus as gpus
