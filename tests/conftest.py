"""Eight simulated CPU devices for every test; 64-bit types stay off, as in most users' programs.

Compiling is most of what tests wait for, so programs are compiled with little optimization, but where a test asks for
it. What two of the default tests compile is compiled once.
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
# Processes of the default tests grow to more than a gigabyte; when glibc keeps what is freed, they take 4 % less time.
MALLOC = {"hugetlb": 1, "top_pad": 2**26, "trim_threshold": 2**32, "mmap_threshold": 2**30}
jax.config.update("jax_num_cpu_devices", 8)
# The same examples on every run and machine; what a search finds beyond them is added by hand.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("same")


def pytest_configure(config):
    # The caches of JAX hold a million objects, not to be looked through every second.
    gc.set_threshold(100_000, 20, 20)
    if os.environ["JAX_PLATFORMS"] == "cpu":
        compile_quickly()
        if config.getoption("markexpr") != "slow":
            compile_once(config)


def compile_quickly() -> None:
    flags = ["--xla_cpu_parallel_codegen_split_count=1"]  # small programs in one piece each
    if jax.__version_info__ < (0, 11):  # and by the older emitters, twice as fast, where XLA still has them
        flags.append("--xla_cpu_use_fusion_emitters=false")
    with pytest.MonkeyPatch.context() as patch:  # not for the processes that tests start
        patch.setenv("XLA_FLAGS", " ".join([*flags, os.environ.get("XLA_FLAGS", "")]))
        jax.devices()  # reads them
    jax.config.update("jax_disable_most_optimizations", True)


def compile_once(config: pytest.Config) -> None:
    # JAX loses what it traced and compiled for functions that are collected: with the threshold above the tests took a
    # tenth longer, and no less memory (1.6 GB a process). Large programs would keep more.
    gc.disable()
    if jax.__version_info__ < (0, 12):  # JAX 0.12 does so itself
        # Every program is lowered in an MLIR context, of which making one takes a quarter of compiling a small program.
        pytest.MonkeyPatch().setattr(mlir, "make_ir_context", functools.cache(mlir.make_ir_context))
    # JAX remembers programs by the identity of the Python function; this cache finds equal ones. It is new with each
    # run, and the first process makes it for all. JAX does not write its entries atomically: half of one is a miss.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in MALLOC.items())
        os.environ.setdefault("GLIBC_TUNABLES", tunables)  # of the processes that are started next
        directory = tempfile.TemporaryDirectory(prefix="jmp_train_tests_")
        config.add_cleanup(directory.cleanup)
        os.environ[CACHE] = directory.name
    jax.config.update("jax_compilation_cache_dir", os.environ[CACHE])
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same numbers for a test, whichever ran before it in its process."""
    module = getattr(item, "module", None)
    if module is not None and hasattr(module, "RNG"):
        module.RNG = np.random.default_rng(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of one row of the battery follow one another: a process then compiles its programs once."""
    places = {}

    def place(item):
        row = getattr(item, "callspec", None) and item.callspec.params.get("row")
        return places.setdefault((item.path, str(row)), len(places))

    items.sort(key=place)


@pytest.fixture
def compiled_well():
    """For tests that run longer than they compile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def counted_anew():
    """`chex.assert_max_traces` counts by the name of a function, which a test with parameters defines anew."""
    chex.clear_trace_counter()


def pytest_terminal_summary(terminalreporter):
    for line in lengths.summary(Path(__file__).parents[1] / "jmp_train"):
        terminalreporter.write_line(f"long: {line}")
