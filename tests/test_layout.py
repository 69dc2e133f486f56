"""The package's layout: who may import whom, which names are public. `lengths.py` prints how long files are.

Read with `ast`, so that an import inside a function counts too.
"""

import ast
import graphlib
import inspect
from pathlib import Path

import pytest

import jmp_train

PACKAGE = Path(jmp_train.__file__).parent

# A module imports only from rows above its own. A package is one module here; inside, its files are free.
LEVELS = (
    {"_text", "_version"},
    {"_dtypes", "_paths", "_jaxpr", "_flops", "_values", "_static", "_sizes"},
    {"_finite", "_tracebacks", "_stochastic_rounding"},
    {"_policy", "_scaling", "_sharding"},
    {"_loss_scale", "_attention"},
    {"_scale_state"},
    {"_optimizer", "_master_weights", "_autocast", "_grad_inputs", "_export"},
    {"_state_leaves", "_grad", "_explain"},
    {"_low_precision_state"},
    {"_diagnostics", "flax_bridge"},
    {"diagnostics", "checks"},
    {"__init__", "__main__"},
)
LEVEL_OF = {module: level for level, modules in enumerate(LEVELS) for module in modules}

# The same for the folders of `_diagnostics`.
FOLDERS = ({"gpu", "interpreter"}, {"products", "overflow", "formats"}, {"__init__"})
FOLDER_LEVEL_OF = {folder: level for level, folders in enumerate(FOLDERS) for folder in folders}

# Who may import a package whose interface moves, or that not every user has.
ONLY = {
    "jax.extend": {"_jaxpr"},
    "jax._src": {"_attention"},  # `_cudnn.py` alone
    "optax": {"_optimizer", "_master_weights", "_low_precision_state", "flax_bridge"},
    "flax": {"flax_bridge"},
    "matplotlib": {"_diagnostics"},
}

PUBLIC = {
    jmp_train: {
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
        "with_low_precision_state",
        "LowPrecisionState",
        "autocast",
        "full_precision",
        "low_precision",
        "dot_product_attention",
        "DEFAULT_RULES",
        "Rule",
        "Rules",
        "explain",
        "Explanation",
        "assert_policy",
        "value_and_grad",
        "grad",
        "export_params",
    },
    jmp_train.diagnostics: {
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
        "gpus",
        "GPUReport",
        "sensitivity",
        "Sensitivity",
    },
    jmp_train.checks: {
        "no_wide_dots",
        "no_narrow_sums",
        "no_float64",
        "float32_loss",
        "output_dtypes",
    },
}

FILES = sorted(PACKAGE.rglob("*.py"))


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


def test_every_module_has_a_level_and_a_docstring():
    missing = [path.name for path in FILES if module_of(path)[0] not in LEVEL_OF]
    assert not missing, f"add them to LEVELS: {missing}"
    assert not [path.name for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]


def upward_imports(path):
    own = module_of(path)[0]
    for name, line in imports_of(path):
        if inside(name, "jmp_train"):
            imported = name.split(".")[1]
            inside_package = imported == own and len(module_of(path)) > 1
            if not inside_package and LEVEL_OF.get(imported, len(LEVELS)) >= LEVEL_OF[own]:
                yield f"{path.name}:{line} imports {name}"


def test_imports_point_to_lower_levels():
    assert [found for path in FILES for found in upward_imports(path)] == []


def dotted(path):
    """'jmp_train._diagnostics.gpu' for jmp_train/_diagnostics/gpu/__init__.py."""
    return ".".join(("jmp_train", *module_of(path))).removesuffix(".__init__")


def diagnostics_imports(path):
    """The files of `_diagnostics` that a file imports, dotted, with the line; a folder stands for its `__init__`."""
    files = {dotted(each) for each in FILES}
    for name, line in imports_of(path):
        imported = name if name in files else name.rpartition(".")[0]
        if inside(imported, "jmp_train._diagnostics"):
            yield imported, line


def test_folders_of_diagnostics_import_lower_ones():
    found = []
    for path in (PACKAGE / "_diagnostics").rglob("*.py"):
        own = module_of(path)[1]
        for name, line in diagnostics_imports(path):
            imported = name.split(".")[2]
            if imported != own and FOLDER_LEVEL_OF[imported] >= FOLDER_LEVEL_OF[own]:
                found.append(f"{path.name}:{line} imports {name}")
    assert found == []


def test_diagnostics_have_no_import_circle():
    """Imports for type checkers count, too: two files that need each other are one file."""
    files = (PACKAGE / "_diagnostics").rglob("*.py")
    graph = {dotted(path): {name for name, _ in diagnostics_imports(path)} for path in files}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_reserved_packages_are_imported_where_they_may_be():
    found = [
        f"{path.name}:{line} imports {name}"
        for path in FILES
        for name, line in imports_of(path)
        for package, allowed in ONLY.items()
        if inside(name, package) and module_of(path)[0] not in allowed
    ]
    assert found == []


def public_names(module):
    """Its names, but for the modules inside that no user imports."""
    return {name for name in vars(module) if not name.startswith("_") and name != "flax_bridge"}


def test_public_names():
    for module, names in PUBLIC.items():
        assert public_names(module) == names | ({"checks", "diagnostics"} if module is jmp_train else set())


PUBLIC_FILES = [PACKAGE / f"{name}.py" for name in ("__init__", "diagnostics", "checks")]


@pytest.mark.parametrize("path", [*PUBLIC_FILES, *sorted((PACKAGE / "_diagnostics").rglob("__init__.py"))], ids=dotted)
def test_public_modules_are_tables_of_contents(path):
    docstring, *rest = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert {type(node) for node in rest} == {ast.ImportFrom}


def test_public_names_are_documented_by_example():
    undocumented, without_example = [], []
    for module, name in ((module, name) for module, names in PUBLIC.items() for name in sorted(names)):
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            docstring = inspect.cleandoc(thing.__doc__ or "")
            # A dataclass without one has its signature for a docstring.
            undocumented += [name] * (not docstring or docstring.startswith(f"{name}("))
        # States and enumerations are read where they are returned; what is called is shown being called.
        if inspect.isfunction(thing) and ">>>" not in (thing.__doc__ or ""):
            without_example.append(name)
    assert not undocumented and not without_example
