"""Real text for the language models: the source of Python's standard library, as ASCII codes."""

import functools
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np

VOCABULARY = 128
HELD_OUT = 100_000  # characters


@functools.cache
def source_text(characters: int = 2_000_000) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out text, int32 in [0, 128): modules in alphabetical order, the held-out part the last."""
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: characters + HELD_OUT]
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    tokens = np.where(tokens < VOCABULARY, tokens, ord("?"))
    return tokens[:-HELD_OUT], tokens[-HELD_OUT:]


def windows(seed: int, batch_size: int, length: int) -> Iterator[np.ndarray]:
    """Batches `[batch_size, length]` of training text from random places, without end."""
    text, rng = source_text()[0], np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - length, batch_size)
        yield text[starts[:, None] + np.arange(length)]


def held_out(count: int, length: int) -> np.ndarray:
    """`[count, length]` of held-out text, evenly spread."""
    text = source_text()[1]
    starts = np.linspace(0, len(text) - length, count).astype(int)
    return text[starts[:, None] + np.arange(length)]
