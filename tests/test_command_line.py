"""`python -m jmp_train report`: both reports, standard output and error, exit statuses and clear errors.

All tests but one run it in this process; only slow tests use the GPU compiler.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap

import jax
import pytest

import jmp_train.__main__ as command_line
from jmp_train.__main__ import main

CODE = """
import functools

import jax
import jax.numpy as jnp


def loss(w, x, power=2):
    return jnp.mean(jnp.tanh(x @ w) ** power)


def with_power(fn):
    @functools.wraps(fn)
    def run(*args):
        return fn(*args, power=3)
    return run


@with_power
def cubed(w, x, *, power):
    return loss(w, x, power)


gradient = jax.grad(loss)
jitted = jax.jit(gradient, donate_argnums=0)
three = 3


class Model:
    gradient = staticmethod(gradient)


def example():
    return jnp.ones((64, 36)), jax.ShapeDtypeStruct((64, 64), "float32")


def with_keywords():
    return example(), {"power": 4}


def tree_and_dictionary():
    return (jnp.ones((64, 8)), None), {"x": jnp.ones((64, 64))}


def first_product(pair, _):
    return pair[1].T @ pair[0]


def pairs():
    return (jnp.ones((64, 36)), jnp.ones((64, 64))), 3.0


def tree_and_numbered():
    return pairs()[0], {0: jnp.ones(3)}


def only_keywords():
    return (), {"x": jnp.ones(3)}


def wrong():
    return jnp.ones(3)


def sharded(x):
    return jax.shard_map(
        lambda x: jax.lax.psum(x @ x.T, "data"), in_specs=jax.P("data"), out_specs=jax.P(), check_vma=False
    )(x)


def rows():
    return (jnp.ones((64, 8), jnp.float16),)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "training.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("import not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("training", "broken"):
        sys.modules.pop(name, None)


@pytest.fixture
def without_plugin(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


COMMAND = ("report", "training:gradient", "--args", "training:example")
NO_COMPILER = (
    "no gpu_report: compiling for a GPU needs jax-cuda13-plugin and jax-cuda13-pjrt (Linux; no GPU, no driver and no "
    f'CUDA libraries): pip install "jax-cuda13-plugin=={jax.__version__}" "jax-cuda13-pjrt=={jax.__version__}"\n'
)


def test_without_the_compiler_the_first_report_is_printed(project, without_plugin, capsys):
    assert main([*COMMAND, "--policy", "mixed_float16", "--gpu", "A100"]) == 1
    printed = capsys.readouterr()
    assert printed.err == NO_COMPILER
    assert printed.out.startswith("2 products, dots and convolutions")
    assert "NVIDIA A100" in printed.out and "36 -> 40" in printed.out


def test_without_the_compiler_as_json(project, without_plugin, capsys):
    assert main([*COMMAND, "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["gpu"] is None and values["error"] in NO_COMPILER
    assert values["tensor_cores"]["flops"] == 2 * 2 * 64 * 64 * 36


@pytest.mark.parametrize(
    ("function", "args", "flops"),
    [
        ("training:Model.gradient", "training:example", 2 * 2 * 64 * 64 * 36),
        ("training:jitted", "training:example", 2 * 2 * 64 * 64 * 36),
        ("training:cubed", "training:example", 2 * 64 * 64 * 36),
        ("training:gradient", "training:with_keywords", 2 * 2 * 64 * 64 * 36),
        ("training:first_product", "training:pairs", 2 * 64 * 64 * 36),
        ("training:first_product", "training:tree_and_numbered", 2 * 64 * 64 * 36),
        ("builtins:dict", "training:only_keywords", 0),
    ],
)
def test_functions_and_arguments(project, without_plugin, capsys, function, args, flops):
    assert main(["report", function, "--args", args, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tensor_cores"]["flops"] == flops


def test_a_mesh_is_there_for_both_reports(project, without_plugin, capsys):
    assert main(["report", "training:sharded", "--args", "training:rows", "--devices", "8"]) == 1
    assert "1 product, dots and convolutions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("report", "training", "--args", "training:example"),
         "`function` must be module:function, such as train:step for the function `step` of train.py; got 'training'."),
        (("report", ":loss", "--args", "training:example"),
         "`function` must be module:function, such as train:step for the function `step` of train.py; got ':loss'."),
        (("report", "./training.py:loss", "--args", "training:example"),
         "`function` must be module:function, such as train:step for the function `step` of train.py; got "
         "'./training.py:loss'."),
        (("report", "nowhere:loss", "--args", "training:example"),
         "`function`: there is no module 'nowhere' here; run from the folder it is in, or set PYTHONPATH."),
        (("report", "training:loss", "--args", "training:exampel"), "`--args`: 'training' has no 'exampel'."),
        (("report", "training:three", "--args", "training:example"),
         "`function` must name a function, and training:three is of type int."),
        (("report", "training:loss", "--args", "training:wrong"),
         "`--args`: the function must return a tuple of arguments, as in `return state, batch`, or of such a tuple and "
         "a dictionary of keywords; got ArrayImpl."),
        (("report", "training:loss", "--args", "training:rows"),
         "`--args`: training:loss does not take what training:rows returns, 1 argument and the keywords []: missing a "
         "required argument: 'x'."),
        (("report", "training:jitted", "--args", "training:tree_and_dictionary"),
         "`--args`: training:jitted does not take what training:tree_and_dictionary returns, 2 arguments and the "
         "keywords ['x']: multiple values for argument 'x'."),
        ((*COMMAND, "--donate-argnums", "0", "7"),
         "`--donate-argnums`: there is no argument 7; training:example returns 2 arguments, counted from 0."),
        ((*COMMAND, "--gpu", "H20"),
         "`gpu`: unknown GPU 'H20' (did you mean 'H200'?); the names are T4, A10, A100, A6000, L4, L40S, "
         "RTX 4090, H100, H200, B200, GB200, RTX PRO 6000, and any other GPU can be "
         "given by the text of its target description (gpu_device_info {...}), as XLA has them."),
        ((*COMMAND, "--devices", "0"), "`devices` must be an integer from 1 to 2**31 - 1, got 0."),
        (("report", "training:jitted", "--args", "training:example", "--policy", "mixed_float16"),
         "`fn` is jitted, so `policy` belongs inside: jax.jit(fn, donate_argnums=...), jax.jit(autocast(fn, policy)). "
         "Pass either a jitted function or options."),
        (("report", "training:loss"), "the following arguments are required: --args"),
    ],
)  # fmt: skip
def test_bad_command_lines(project, without_plugin, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].partition("error: ")[2] == message


def test_a_module_of_yours_that_imports_what_is_missing_says_so_itself(project):
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_installed'$"):
        main(["report", "broken:loss", "--args", "training:example"])
    (project / "broken.py").write_text("raise ModuleNotFoundError('install it')\n")
    with pytest.raises(ModuleNotFoundError, match=r"^install it$"):
        main(["report", "broken:loss", "--args", "training:example"])


def test_both_reports_are_printed(project, capsys, monkeypatch):
    """With a made-up second one, which needs the compiler."""

    class Compiled:
        __str__ = lambda self: "compiled"  # noqa: E731
        as_dict = lambda self: {"kernels": 3}  # noqa: E731

    monkeypatch.setattr(command_line, "gpu_report", lambda *_, **__: lambda *_: Compiled())
    assert main(COMMAND) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("\n\ncompiled\n") and printed.err == ""
    assert main([*COMMAND, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["gpu"] == {"kernels": 3} and values["error"] is None


@pytest.mark.slow
def test_both_reports(project, capsys):
    assert main([*COMMAND, "--policy", "mixed_float16", "--donate-argnums", "0"]) == 0
    cores, compiled = capsys.readouterr().out.split("\n\nCompiled for NVIDIA H200")
    assert "36 -> 40" in cores and "100.0% Tensor Cores in 16 bits" in compiled
    assert main([*COMMAND, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["error"] is None and values["gpu"]["flops"] == values["tensor_cores"]["flops"]
    assert main(["report", "training:sharded", "--args", "training:rows", "--devices", "8"]) == 0
    assert "8 devices" in capsys.readouterr().out


@pytest.mark.slow
def test_as_a_command(project):
    """Without JAX_PLATFORMS, as a user types it."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "jmp_train", *COMMAND]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, textwrap.indent(done.stderr, "  ")
    assert "Compiled for NVIDIA H200" in done.stdout
