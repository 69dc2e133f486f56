"""Leaves out the machine code of a GPU program, which no report reads.

XLA hands every kernel to `ptxas`, the assembler of an installed CUDA, and waits for it about as long as for all else.
It has no option to stop before that; but it can be told where to look for CUDA first.

Decides what XLA finds there: an assembler that assembles nothing, and a library of device functions without any. Does
not decide about the optimized module, which is made before.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

# The version is that of the plugin's CUDA; XLA passes over an assembler that is too old for it.
_ASSEMBLER = """\
#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 13.0, V13.0.88"
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && echo none > "$2"
  shift
done
exit 0
"""


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    """Made once for a process, and removed when it ends."""
    made = tempfile.TemporaryDirectory(prefix="jmp_train_")
    assembler = Path(made.name, "bin", "ptxas")
    assembler.parent.mkdir()
    assembler.write_text(_ASSEMBLER)
    assembler.chmod(0o755)
    functions = Path(made.name, "nvvm", "libdevice", "libdevice.10.bc")
    functions.parent.mkdir(parents=True)
    functions.write_text("; no functions\n")  # LLVM's assembly, of an empty module
    return made


def without_machine_code() -> dict[str, str | int]:
    """XLA's options for an executable that can be read and not run.

    Where the directory cannot hold programs, XLA looks on, and uses a CUDA that is installed.
    """
    # Keys of JAX's persistent cache leave out the directory, but not the level: none of these is run by mistake.
    return {"xla_gpu_cuda_data_dir": _directory().name, "xla_backend_optimization_level": 0}
