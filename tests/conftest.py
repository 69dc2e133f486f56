"""Eight simulated CPU devices for every test; 64-bit types stay off, as in most users' programs.

Most of the tests' time is compilation, so programs are compiled with little optimization unless a test asks for more.
A program that several of the default tests compile is compiled once, and cached.
"""

import functools
import gc
import os
import tempfile
from pathlib import Path

import lengths
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import chex
import hypothesis
import jax
import numpy as np
from jax._src.interpreters import mlir

CACHE = "JMP_TRAIN_TESTS_CACHE"
# Processes of the default tests grow to more than a gigabyte; they take 4 % less time if glibc keeps freed memory.
MALLOC = {"hugetlb": 1, "top_pad": 2**26, "trim_threshold": 2**32, "mmap_threshold": 2**30}
jax.config.update("jax_num_cpu_devices", 8)
# The same examples on every run and machine; examples that a longer search finds are added to the tests by hand.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("same")


def pytest_configure(config):
    # JAX's caches hold a million objects, which the garbage collector would traverse every second by default.
    gc.set_threshold(100_000, 20, 20)
    if os.environ["JAX_PLATFORMS"] == "cpu":
        compile_quickly()
        if config.getoption("markexpr") != "slow":
            compile_once(config)


def compile_quickly() -> None:
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]  # one part for each program, as they are small
    if jax.__version_info__ < (0, 11):  # XLA's older emitters, twice as fast, where they still exist
        flags.append("--xla_cpu_use_fusion_emitters=false")
    with pytest.MonkeyPatch.context() as patch:  # processes that tests start do not inherit them
        patch.setenv("XLA_FLAGS", " ".join([*flags, os.environ.get("XLA_FLAGS", "")]))
        jax.devices()  # reads the flags
    jax.config.update("jax_disable_most_optimizations", True)


def compile_once(config: pytest.Config) -> None:
    # JAX drops the traces and programs of functions that are collected. With the threshold above instead of this, the
    # tests took 10 % longer in as much memory (1.6 GB a process). Large programs would keep more memory.
    gc.disable()
    if jax.__version_info__ < (0, 12):  # JAX 0.12 does so itself
        # Every program is lowered in a new MLIR context, which takes a quarter of the time to compile a small program.
        pytest.MonkeyPatch().setattr(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))
    # JAX's own cache finds programs by the identity of the Python function; this one finds equal programs. It is new in
    # each run, and the first process makes it for all. JAX does not write entries atomically: a partial one is a miss.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in MALLOC.items())
        os.environ.setdefault("GLIBC_TUNABLES", tunables)  # for the processes that are started next
        directory = tempfile.TemporaryDirectory(prefix="jmp_train_tests_")
        config.add_cleanup(directory.cleanup)
        os.environ[CACHE] = directory.name
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Gives each test the same random numbers, whichever tests ran before it in its process."""
    module = getattr(item, "module", None)
    if module is not None and hasattr(module, "RNG"):
        module.RNG = np.random.default_rng(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests of one row of the battery one after another, so that a process compiles its programs once."""
    places = {}

    def place(item):
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        return places.setdefault((item.path, str(row)), len(places))

    items.sort(key=place)


@pytest.fixture
def compiled_well():
    """Compiles with full optimization, for tests that run longer than they compile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def counted_anew():
    """Resets `chex.assert_max_traces`: it counts by function name, and parametrized tests define a function again."""
    chex.clear_trace_counter()


def pytest_terminal_summary(terminalreporter):
    for line in lengths.summary(Path(__file__).parents[1] / "jmp_train"):
        terminalreporter.write_line(f"long: {line}")
