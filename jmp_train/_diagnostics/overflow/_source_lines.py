"""Where an equation comes from: the line that the user wrote, and the library line between it and JAX.

Decides which frame of a traceback is the user's own: the innermost one outside JAX, this package, installed libraries
and Python's own. Does not decide whether a cast was asked for; see `jmp_train/_tracebacks.py`.
Best effort: JAX cuts tracebacks where `jit` begins, and its frames have other names in other versions.
"""

import itertools
import linecache
import os
import sys
from typing import NamedTuple

import jax

from ..._autocast import autocast
from ..._jaxpr import Node
from ..._static import of_hidden
from ..._tracebacks import frames_of, is_jax
from ..interpreter import Site

_AUTOCAST = autocast.__code__.co_filename
_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
_REGION = of_hidden.__code__.co_filename  # what stands between a region's function and its caller
_DIAGNOSTICS = os.path.join(_PACKAGE, "_diagnostics") + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_JAX = os.path.dirname(jax.__file__)
# The functions of JAX that users call; its other files are machinery around them.
_NUMERICS = tuple(os.path.join(_JAX, "_src", folder) + os.sep for folder in ("numpy", "nn", "ops", "scipy", "lax"))
# Where all code is installed, the user's is what is in none of these.
_LIBRARIES = ("chex", "equinox", "flax", "haiku", "jaxlib", "optax")


class Line(NamedTuple):
    """A line of code: its file, its number from 1, the function it is in, and its text."""

    file: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} ({self.function})"


def user_line(site: Site) -> Line | None:
    """The innermost line of the user's own code that recorded an equation; `None` if the tracebacks have none."""
    installed = None
    for node in (site.node, *site.around):
        for function, file, number in frames_of(node):
            if not (is_jax(file) or file.startswith(_PACKAGE) or _is_library(file)):
                line = Line(file, number, function, linecache.getline(file, number).strip())
                if not any(folder in file for folder in _INSTALLED):
                    return line
                installed = installed or line
    return installed


def between_user_and_jax(site: Site) -> str | None:
    """What stands between the user's line and the equation: a library's `file:line (function)`, or a backward rule."""
    own, frames = user_line(site), list(frames_of(site.node))
    names = {function for function, _, _ in frames}
    # The equations of a `custom_vjp`'s backward rule are recorded from inside JAX, without the user's frames.
    if any(name.endswith("process_custom_vjp_call") for name in names) and "_flatten_fwd" not in names:
        return "the backward rule of the custom_vjp called there; JAX keeps no line of it"
    for function, file, number in frames:
        if not is_jax(file) and file != _REGION and not file.startswith(_DIAGNOSTICS):
            return None if own and (file, number) == own[:2] else f"{file}:{number} ({function})"
    return None


def is_in_autocast(site: Site) -> bool | None:
    """Whether autocast recorded the equation, so that its rules hold for it.

    `None` where a `jit` of the user's cuts the traceback before it comes to this package.
    """
    files = _files(site)
    if any(file.startswith(_PACKAGE) and file != _REGION for file in files):
        return _AUTOCAST in files
    return None


def _files(site: Site) -> list[str]:
    """The files in the tracebacks of an equation and of those around it, innermost first."""
    return [file for node in (site.node, *site.around) for _, file, _ in frames_of(node)]


def is_in_region(site: Site) -> bool:
    """Whether the equation is inside a function marked as a precision region, and not in autocast inside of that."""
    return next((file for file in _files(site) if file in (_REGION, _AUTOCAST)), None) == _REGION


def is_cast_for_low_precision(site: Site) -> bool:
    """Whether the equation is inside of a `low_precision(fn, dtype=...)`, which casts operands and results."""
    nodes = (site.node, *site.around)
    return any(is_library_function(node, os.path.join("_autocast", "rules.py"), "low_precision") for node in nodes)


def flax_module(site: Site) -> str:
    """The path of the Flax module that the equation is in, as its scope has it; empty outside of Flax."""
    if not any(_is_of_library(file, "flax") for file in _files(site)):
        return ""
    # A method's scope is its module's name and its own, `jnp.einsum` has its subscripts for one.
    names = [name.partition(".")[0] for name in site.scope.split("/")]
    return "/".join(itertools.takewhile(str.isidentifier, names))


def is_finite_check(node: Node) -> bool:
    """Whether code outside JAX asks here whether a value is finite, as a loss scale does of the gradients.

    `jax.nn.logsumexp` and others call `isfinite` for their own needs, which checks no gradient.
    """
    if node.name != "is_finite":
        return False
    for function, file, _ in frames_of(node):
        if not is_jax(file):
            return True
        if file.startswith(_NUMERICS) and function not in ("isfinite", "is_finite"):
            return False
    return False


def is_library_function(node: Node, file: str, function: str) -> bool:
    """Whether `function` of this package's `file` recorded the node, directly or through a function inside it."""
    path = os.path.join(_PACKAGE, file)
    return any(found == path and name.split(".")[0] == function for name, found, _ in frames_of(node))


def _is_library(file: str) -> bool:
    if file.startswith(("<frozen", "<string>")):
        return True
    if file.startswith(_PYTHON) and "site-packages" not in file:
        return True
    return any(_is_of_library(file, name) for name in _LIBRARIES)


def _is_of_library(file: str, name: str) -> bool:
    return any(file.startswith(path + os.sep) for path in getattr(sys.modules.get(name), "__path__", ()))
