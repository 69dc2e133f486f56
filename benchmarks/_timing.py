"""Measures how long a step takes on the present device, in JAX or in torch.

Decides when the clock runs: after a warm-up, over several repetitions of many steps each. A repetition ends when the
device is done, and the median of the repetitions is reported. Does not decide what a step is.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any


class Timing(NamedTuple):
    """Seconds of one step: the median, least and most of `repetitions` repetitions, each of `steps` steps."""

    seconds: float
    least: float
    most: float
    repetitions: int
    steps: int

    @property
    def spread(self) -> float:
        """The distance between the least and the most, relative to the median."""
        return (self.most - self.least) / self.seconds


def time_steps(run: Callable[[int], None], seconds: float, repetitions: int = 9) -> Timing:
    """Times `run(steps)`, which runs that many steps and returns when the device is done.

    Args:
      run: the compiled program; its first calls are the warm-up.
      seconds: how long all repetitions together should take.
      repetitions: each of at least two steps.
    """
    run(2)
    one = max(_clocked(run, 3), 1e-7)
    steps = max(2, round(seconds / repetitions / one))
    run(min(steps, max(1, round(0.2 * seconds / one))))  # until the device's clock rate has settled under load
    measured = [_clocked(run, steps) for _ in range(repetitions)]
    return Timing(statistics.median(measured), min(measured), max(measured), repetitions, steps)


def _clocked(run: Callable[[int], None], steps: int) -> float:
    start = time.perf_counter()
    run(steps)
    return (time.perf_counter() - start) / steps


class Stepper:
    """A compiled JAX step with its state donated, to be run many times over the same batch.

    Args:
      step: `(state, batch) -> (state, loss)`.
      state, batch: on the device. `state` must not be used afterwards.

    Attributes:
      compile_seconds: tracing included.
      peak_bytes: the most memory that one step holds, by the compiler's plan: state, batch and temporary memory.
      losses: of the first step and of the last one.
    """

    def __init__(self, step: Callable[[Tree, Tree], tuple[Tree, jax.Array]], state: Tree, batch: Tree) -> None:
        start = time.perf_counter()
        self._compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.peak_bytes = peak_bytes(self._compiled)
        self.state, self._batch = state, batch
        self.losses: list[float] = []
        self(1)

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            self.state, loss = self._compiled(self.state, self._batch)
        jax.block_until_ready((self.state, loss))
        self.losses[1:] = [float(loss)]


def compile_seconds(lowered: jax.stages.Lowered) -> float:
    """Processor seconds from a lowered program to the executable."""
    start = time.process_time()
    lowered.compile()
    return time.process_time() - start


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes of arguments, results and temporary memory of one call; donated arguments are counted once."""
    memory: Any = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return kept + memory.temp_size_in_bytes


def caller(fn: Callable[..., Any], *args: Any) -> Callable[[int], None]:
    """`run` of `time_steps` for a function of arrays, which is compiled once and called `steps` times."""
    return repeated(jax.jit(fn).lower(*args).compile(), *args)


def repeated(compiled: jax.stages.Compiled, *args: Any) -> Callable[[int], None]:
    """`run` of `time_steps` for a compiled program."""

    def run(steps: int) -> None:
        for _ in range(steps):
            out = compiled(*args)
        jax.block_until_ready(out)

    return run


@functools.cache
def matmul_peak(size: int = 8192, seconds: float = 2.0) -> float:
    """FLOP per second of a float16 product of two random square matrices, taken as the device's peak."""
    left, right = jax.random.normal(jax.random.key(0), (2, size, size), jnp.float16)
    return 2 * size**3 / time_steps(caller(jnp.matmul, left, right), seconds).seconds


@functools.cache
def copy_bandwidth(side: int = 32768, seconds: float = 1.0) -> float:
    """Bytes per second, read and written, of the negation of a large float32 matrix."""
    x = jax.random.normal(jax.random.key(0), (side, side))
    return 2 * x.nbytes / time_steps(caller(jnp.negative, x), min(seconds, side / 32768)).seconds
