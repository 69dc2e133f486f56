"""The package's layout: who may import whom, how long files and functions are, which names are public.

Read with `ast`, so that an import inside a function counts too.
"""

import ast
import inspect
from pathlib import Path

import pytest

import jmp_train

PACKAGE = Path(jmp_train.__file__).parent

# A module imports only from rows above its own. A package is one module here; inside, its files are free.
LEVELS = (
    {"_dtypes", "_paths", "_jaxpr", "_flops", "_values", "_static", "_sizes"},
    {"_finite"},
    {"_policy", "_scaling", "_sharding"},
    {"_loss_scale"},
    {"_scale_state"},
    {"_optimizer", "_master_weights", "_autocast", "_grad_inputs", "_export"},
    {"_grad"},
    {"_diagnostics", "flax_bridge"},
    {"__init__", "__main__"},
)
LEVEL_OF = {module: level for level, modules in enumerate(LEVELS) for module in modules}

# Who may import a package whose interface moves, or that not every user has.
ONLY = {
    "jax.extend": {"_jaxpr"},
    "jax._src": set(),
    "optax": {"_optimizer", "_master_weights", "flax_bridge"},
    "flax": {"flax_bridge"},
    "matplotlib": {"_diagnostics"},
}

PUBLIC = {
    "Policy",
    "get_policy",
    "cast_floating",
    "cast_to_full",
    "cast_to_half",
    "LossScale",
    "NoOpLossScale",
    "StaticLossScale",
    "DynamicLossScale",
    "all_finite",
    "select_tree",
    "with_loss_scale",
    "LossScaleState",
    "ScaleStatus",
    "get_loss_scale",
    "step_metrics",
    "with_master_weights",
    "MasterWeightsState",
    "master_params",
    "sync_master_weights",
    "with_stochastic_rounding",
    "StochasticRoundingState",
    "autocast",
    "full_precision",
    "low_precision",
    "DEFAULT_RULES",
    "Rule",
    "Rules",
    "explain",
    "Explanation",
    "assert_policy",
    "no_wide_dots",
    "no_narrow_sums",
    "no_float64",
    "float32_loss",
    "output_dtypes",
    "value_and_grad",
    "grad",
    "export_params",
    "exponent_histogram",
    "ExponentHistogram",
    "underflow_report",
    "UnderflowReport",
    "suggest_loss_scale",
    "overflow_report",
    "OverflowReport",
    "plot_exponents",
    "plot_loss_scale",
    "backward_histogram",
    "find_overflow",
    "Found",
    "ArrayRange",
    "Verdict",
    "tensor_core_report",
    "TensorCoreReport",
    "round_up",
    "gpu_report",
    "GPUReport",
    "sensitivity",
    "Sensitivity",
}

FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 300
MAX_FUNCTION_LINES = 40


def module_of(path):
    """('_autocast', '_plan') for jmp_train/_autocast/_plan.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts


def imports_of(path):
    """(dotted name, line) of everything that is imported, relative imports resolved, `from a import b` as `a.b`."""
    package = ("jmp_train", *module_of(path)[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*base, *filter(None, [node.module])])
            yield from ((f"{origin}.{alias.name}", node.lineno) for alias in node.names)


def inside(name, package):
    return name == package or name.startswith(package + ".")


def function_lengths(path):
    """Lines of each function without its docstring and without the functions inside it, which count by themselves."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: len(own_lines(node)) for node in functions}


def own_lines(function):
    lines = lines_of(function)
    if ast.get_docstring(function) is not None:
        lines -= lines_of(function.body[0])
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and node is not function:
            lines -= lines_of(node)
    return lines


def lines_of(node):
    assert node.end_lineno is not None
    return set(range(node.lineno, node.end_lineno + 1))


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(module_of(path)))
class TestFile:
    def test_has_a_level(self, path):
        assert module_of(path)[0] in LEVEL_OF, f"add {path.name} to LEVELS"

    def test_imports_only_from_lower_levels(self, path):
        own = module_of(path)[0]
        for name, line in imports_of(path):
            if not inside(name, "jmp_train"):
                continue
            imported = name.split(".")[1]
            assert imported in LEVEL_OF, f"{path.name}:{line} imports {name}; import it from the module that defines it"
            inside_package = imported == own and len(module_of(path)) > 1
            assert inside_package or LEVEL_OF[imported] < LEVEL_OF[own], f"{path.name}:{line} imports {name}"

    @pytest.mark.parametrize("package", ONLY)
    def test_imports_nothing_reserved(self, path, package):
        found = [line for name, line in imports_of(path) if inside(name, package)]
        assert not found or module_of(path)[0] in ONLY[package], f"{path.name}:{found} imports {package}"

    def test_is_short_and_documented(self, path):
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES
        assert ast.get_docstring(ast.parse(text)), f"{path.name} has no docstring"

    def test_functions_are_short(self, path):
        assert {name: n for name, n in function_lengths(path).items() if n > MAX_FUNCTION_LINES} == {}


def public_names():
    modules = {path.stem for path in FILES} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    return {name for name in vars(jmp_train) if not name.startswith("__") and name not in modules}


def test_public_names():
    assert public_names() == PUBLIC


def test_init_is_a_table_of_contents():
    docstring, *rest = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert {type(node) for node in rest} == {ast.ImportFrom}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_are_documented_by_example(name):
    thing = getattr(jmp_train, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        docstring = inspect.cleandoc(thing.__doc__ or "")
        # A dataclass without one has its signature for a docstring.
        assert docstring and not docstring.startswith(f"{name}("), f"{name} has no docstring"
    # States and enumerations are read where they are returned; what is called is shown being called.
    if inspect.isfunction(thing):
        assert ">>>" in (thing.__doc__ or ""), f"{name} has no example"
