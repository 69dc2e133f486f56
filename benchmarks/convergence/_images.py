"""Digits as pictures for the applications: scikit-learn's 1,797 handwritten ones, 8 by 8 pixels. Real data."""

import functools
from collections.abc import Iterator

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images `[898, 8, 8, 1]`, float32 in [0, 1], test images `[899, 8, 8, 1]`, and the int32 labels of both.

    Half are for testing: with fewer, one image moves the accuracy too far.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    return tuple(train_test_split(images, labels.astype(np.int32), test_size=0.5, random_state=0, stratify=labels))


def shuffled(seed: int, batch_size: int, *arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """Batches of rows of `arrays`, drawn anew in another order each epoch, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(arrays[0]))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield tuple(array[chosen] for array in arrays)
