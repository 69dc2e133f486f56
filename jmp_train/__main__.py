"""`python -m jmp_train report module:function --args module:make_args`: both reports of a user's own function.

    python -m jmp_train report train:step --args train:example --gpu H100
    python -m jmp_train report train:loss_gradient --args train:example --policy mixed_float16 --json > report.json

Decides how a function and its arguments are named on the command line. Does not decide what is reported; see
`_diagnostics`. The exit status is 0, 1 if there is no GPU compiler (the first report is printed all the same), or 2 for
a bad command line.
"""

import argparse
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._diagnostics import gpu_report, tensor_core_report
from ._jaxpr import JAX_FOLDER
from ._text import count

_EXAMPLE = "such as train:step for the function `step` of train.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    # Nothing runs on a GPU here, and one that others use is left alone.
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    try:
        fn = _load("function", options.function)
        args, kwargs = _arguments(_load("--args", options.args))
        _check_fit(fn, args, kwargs, options)
        look, compile_for = _reports(fn, options)
    except _CommandLineError as error:
        parser.error(str(error))
    cores = look(*args, **kwargs)
    try:
        compiled, failure = compile_for(*args, **kwargs), None
    except RuntimeError as error:
        compiled, failure = None, str(error)
    if options.json:
        reports = {"tensor_cores": cores.as_dict(), "gpu": compiled and compiled.as_dict(), "error": failure}
        print(json.dumps(reports, indent=1))
    else:
        print(cores)
        if compiled is not None:
            print(f"\n{compiled}")
    if failure is not None:
        print(f"no gpu_report: {failure}", file=sys.stderr)
    return 0 if failure is None else 1


def _reports(fn: Callable[..., Any], options: argparse.Namespace) -> tuple[Callable[..., Any], Callable[..., Any]]:
    given = {"policy": options.policy, "donate_argnums": options.donate_argnums}
    try:
        look = tensor_core_report(fn, options.policy, options.gpu, options.devices)
        return look, gpu_report(fn, options.gpu, options.devices, **given)
    except (TypeError, ValueError) as error:  # a policy or a GPU that is none
        raise _CommandLineError(str(error)) from None


class _CommandLineError(Exception):
    """What the user typed cannot be used."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jmp_train", description="Reports on a function of your own.")
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="print tensor_core_report and gpu_report of a function")
    report.add_argument("function", help=f"module:function, {_EXAMPLE}; what you train with, jitted or not")
    report.add_argument(
        "--args",
        required=True,
        metavar="module:function",
        help="a function of no arguments that returns those of the other: a tuple of them, or a tuple of such a tuple "
        "and a dictionary of keywords. Arrays or jax.ShapeDtypeStructs: only shapes and dtypes are read",
    )
    report.add_argument("--policy", help="a policy to autocast the function with, such as mixed_float16")
    report.add_argument("--gpu", default="H200", help="a name of jmp_train.diagnostics.gpus(); H200 by default")
    report.add_argument("--devices", type=int, default=1, help="how many GPUs, along one mesh axis named data")
    report.add_argument(
        "--donate-argnums",
        type=int,
        nargs="*",
        help="arguments to donate; of a function that is not jitted",
    )
    report.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _load(argument: str, name: str) -> Callable[..., Any]:
    module_name, _, path = name.partition(":")
    if not module_name or module_name.startswith(".") or not path:  # such as ./train.py:step
        raise _CommandLineError(f"`{argument}` must be module:function, {_EXAMPLE}; got {name!r}.")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module is there, and imports one that is not
        raise _CommandLineError(
            f"`{argument}`: there is no module {module_name!r} here; run from the folder it is in, or set PYTHONPATH."
        ) from None
    for part in path.split("."):
        if not hasattr(found, part):
            raise _CommandLineError(f"`{argument}`: {module_name!r} has no {path!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise _CommandLineError(f"`{argument}` must name a function, and {name} is of type {type(found).__name__}.")
    return found


def _arguments(make: Callable[..., Any]) -> tuple[tuple, dict[str, Any]]:
    """What `make` returns, as positional arguments and keywords."""
    made = make()
    if type(made) is not tuple:
        raise _CommandLineError(
            f"`--args`: the function must return a tuple of arguments, as in `return state, batch`, or of such a tuple "
            f"and a dictionary of keywords; got {type(made).__name__}."
        )
    if len(made) == 2 and type(made[0]) is tuple and type(made[1]) is dict and all(isinstance(k, str) for k in made[1]):
        return made[0], made[1]
    return made, {}


def _check_fit(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], options: argparse.Namespace) -> None:
    """Raises unless the function takes these arguments, and has those to donate."""
    try:
        signature = inspect.signature(inspect.unwrap(fn, stop=_is_not_of_jax), follow_wrapped=False)
    except (TypeError, ValueError):  # a callable without a signature
        signature = None
    try:
        if signature is not None:
            signature.bind(*args, **kwargs)
    except TypeError as error:
        raise _CommandLineError(
            f"`--args`: {options.function} does not take what {options.args} returns, "
            f"{count(len(args), 'argument')} and the keywords {[*kwargs]}: {error}."
        ) from None
    for number in options.donate_argnums or ():
        if not -len(args) <= number < len(args):
            raise _CommandLineError(
                f"`--donate-argnums`: there is no argument {number}; {options.args} returns "
                f"{count(len(args), 'argument')}, counted from 0."
            )


def _is_not_of_jax(fn: Callable[..., Any]) -> bool:
    """Whether a function may pass others than its own arguments to the one that it wraps, as decorators do."""
    return inspect.isfunction(fn) and not fn.__code__.co_filename.startswith(JAX_FOLDER)


if __name__ == "__main__":
    sys.exit(main())
