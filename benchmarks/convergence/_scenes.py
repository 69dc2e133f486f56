"""Scenes for detection and segmentation: handwritten digits pasted on photographs.

Real: the digits and the two photographs (scikit-learn's). Made: where the digits stand and how large and bright.
"""

import functools
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_sample_images

from ._images import digits

SIZE, DIGITS = 48, 3


class Scenes(NamedTuple):
    """Pictures and what is on them.

    Attributes:
      images: `[n, 48, 48, 3]` in [0, 1].
      masks: 0 for background, 1 + the digit elsewhere, int32 `[n, 48, 48]`.
      boxes: top, left, bottom, right in pixels, `[n, 3, 4]`.
      labels: int32 `[n, 3]`.
    """

    images: np.ndarray
    masks: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray


@functools.cache
def scenes(training: bool) -> Scenes:
    """2,000 scenes for training, from the left two thirds of the photographs, or 200 for testing from the rest."""
    train_images, test_images, train_labels, test_labels = digits()
    drawn, labels = (train_images, train_labels) if training else (test_images, test_labels)
    rng = np.random.default_rng(0 if training else 1)
    photographs = [np.asarray(photo, np.float32) / 255 for photo in load_sample_images().images]
    cut = 2 * photographs[0].shape[1] // 3
    grounds = [photo[:, :cut] if training else photo[:, cut:] for photo in photographs]
    made = [_scene(rng, grounds, drawn, labels) for _ in range(2000 if training else 200)]
    return Scenes(*(np.stack(part) for part in zip(*made, strict=True)))


def _scene(rng: np.random.Generator, grounds, drawn: np.ndarray, labels: np.ndarray):
    ground = grounds[rng.integers(len(grounds))]
    top, left = (rng.integers(0, side - SIZE) for side in ground.shape[:2])
    image = ground[top : top + SIZE, left : left + SIZE].copy() * 0.6
    mask, boxes, names = np.zeros((SIZE, SIZE), np.int32), [], []
    # One digit in each of three of the four quarters, so that none hides another.
    for quarter in rng.permutation(4)[:DIGITS]:
        which, scale = rng.integers(len(drawn)), rng.integers(1, 4)
        shape = np.kron(drawn[which, :, :, 0], np.ones((scale, scale), np.float32))
        side, half = len(shape), SIZE // 2
        y = half * (quarter // 2) + rng.integers(0, half - side + 1)
        x = half * (quarter % 2) + rng.integers(0, half - side + 1)
        part, ink = image[y : y + side, x : x + side], shape[..., None]
        part[...] = part * (1 - ink) + ink * rng.uniform(0.6, 1.0, 3).astype(np.float32)
        mask[y : y + side, x : x + side][shape > 0.3] = 1 + labels[which]
        rows, columns = np.nonzero(shape > 0.3)
        boxes.append([y + rows.min(), x + columns.min(), y + rows.max() + 1, x + columns.max() + 1])
        names.append(labels[which])
    return image, mask, np.array(boxes, np.float32), np.array(names, np.int32)
