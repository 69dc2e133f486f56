"""Detection: a single-shot detector finds digits on photographs, with a loss for boxes and one for classes.

Real: the digits, the photographs, the method (anchors of two sizes on two maps, smooth L1 for the boxes, cross-entropy
with hard negatives, three for each positive, divided by the number of positives). Made: where the digits stand.
Stands for Multibox SSD (Liu et al., 2016), which diverged in float16 without loss scaling in the paper.
"""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._application import Application, Player, Variables
from ._images import shuffled
from ._scenes import SIZE, scenes

STEPS, BATCH = 400, 16
MAPS = ((12, (7.0, 11.0)), (6, (16.0, 22.0)))  # cells a side, anchors' sides in pixels


class SSD(nn.Module):
    """Class logits `[batch, anchors, 11]`, 0 for background, and offsets of boxes `[batch, anchors, 4]`."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        logits, offsets = [], []
        for features, strides in ((16, 1), (32, 2), (48, 2), (64, 2)):
            for stride in (strides, 1):
                x = nn.Conv(features, (3, 3), stride, use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            if x.shape[1] <= MAPS[0][0]:
                logits.append(nn.Conv(2 * 11, (3, 3))(x).reshape(len(x), -1, 11))
                offsets.append(nn.Conv(2 * 4, (3, 3))(x).reshape(len(x), -1, 4))
        return jnp.concatenate(logits, axis=1), jnp.concatenate(offsets, axis=1)


@functools.cache
def anchors() -> np.ndarray:
    """Centres and sides in pixels, `[anchors, 4]`, in the order of the network's outputs."""
    rows = []
    for cells, sides in MAPS:
        centres = (np.arange(cells) + 0.5) * SIZE / cells
        rows += [(y, x, side, side) for y in centres for x in centres for side in sides]
    return np.array(rows, np.float32)


def overlaps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes `[..., n, 4]` and `[..., m, 4]`: `[..., n, m]`."""
    a, b = a[..., :, None, :], b[..., None, :, :]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    both = np.prod(np.maximum(sides, 0), axis=-1)
    return both / (np.prod(a[..., 2:] - a[..., :2], axis=-1) + np.prod(b[..., 2:] - b[..., :2], axis=-1) - both)


def corners(boxes: np.ndarray) -> np.ndarray:
    """From centres and sides to corners."""
    return np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], axis=-1)


def targets(boxes: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The class of each anchor, int32 `[n, anchors]`, and the offsets it should give, `[n, anchors, 4]`."""
    meet = overlaps(corners(anchors()), boxes)
    best, which = meet.max(-1), meet.argmax(-1)
    for digit in range(boxes.shape[1]):  # every digit has the anchor that meets it best
        anchor = meet[..., digit].argmax(-1)
        np.put_along_axis(best, anchor[:, None], 1.0, axis=1)
        np.put_along_axis(which, anchor[:, None], digit, axis=1)
    found = np.take_along_axis(boxes, which[..., None], axis=1)
    centre, side = (found[..., :2] + found[..., 2:]) / 2, found[..., 2:] - found[..., :2]
    offsets = np.concatenate([(centre - anchors()[:, :2]) / anchors()[:, 2:], np.log(side / anchors()[:, 2:])], axis=-1)
    return np.where(best > 0.4, 1 + np.take_along_axis(labels, which, axis=1), 0), offsets.astype(np.float32)


def average_precision(scores: np.ndarray, boxes: np.ndarray, true_boxes: np.ndarray, true_labels: np.ndarray) -> float:
    """The mean over digits of the area under precision and recall, at an overlap of half, after suppression.

    Args:
      scores: probabilities `[n, anchors, 11]`.
      boxes: corners `[n, anchors, 4]`.
    """
    areas = []
    for digit in range(10):
        found = []
        for image in range(len(scores)):
            order = np.argsort(-scores[image, :, 1 + digit])[:20]
            kept, true = [], true_boxes[image][true_labels[image] == digit]
            taken = np.zeros(len(true), bool)
            for anchor in order:
                box = boxes[image, anchor][None]
                if kept and overlaps(box, np.array(kept)).max() > 0.45:
                    continue
                kept.append(box[0])
                meet = np.where(taken, 0, overlaps(box, true)[0])
                hit = bool(len(true)) and meet.max() >= 0.5
                if hit:
                    taken[meet.argmax()] = True
                found.append((scores[image, anchor, 1 + digit], hit))
        hits = np.array([hit for _, hit in sorted(found, key=lambda pair: -pair[0])], float)
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        envelope = np.maximum.accumulate(precision[::-1])[::-1]
        areas.append(np.sum(envelope * hits) / np.sum(true_labels == digit))
    return float(np.mean(areas))


def applications() -> list[Application]:
    """The row of this file."""
    model, training, testing = SSD(), scenes(training=True), scenes(training=False)
    classes, offsets = targets(training.boxes, training.labels)

    def loss(variables: Sequence[Variables], batch, key):
        images, classes, offsets = batch
        (logits, found), model_state = model.apply(variables[0], images, train=True, mutable=["batch_stats"])
        positive = classes > 0
        boxes = jnp.sum(optax.huber_loss(found, offsets).sum(-1) * positive)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, classes)
        # Hard negatives: the three worst for each positive of the picture.
        ranks = jnp.argsort(jnp.argsort(-jnp.where(positive, 0.0, losses), axis=1), axis=1)
        hard = ~positive & (ranks < 3 * jnp.sum(positive, axis=1, keepdims=True))
        return (boxes + jnp.sum(losses * (positive | hard))) / jnp.sum(positive), model_state

    @jax.jit
    def detect(variables: Variables):
        logits, offsets = model.apply(variables, testing.images, train=False)
        centre = offsets[..., :2] * anchors()[:, 2:] + anchors()[:, :2]
        side = jnp.exp(jnp.minimum(offsets[..., 2:], 2.0)) * anchors()[:, 2:]
        return jax.nn.softmax(logits), jnp.concatenate([centre - side / 2, centre + side / 2], axis=-1)

    def evaluate(variables: Sequence[Variables]) -> float:
        scores, boxes = (np.asarray(part) for part in detect(variables[0]))
        return 100 * average_precision(scores, boxes, testing.boxes, testing.labels)

    return [
        Application(
            name="detection, SSD",
            metric="mean average precision at 0.5, %",
            higher_is_better=True,
            resolution=1.0,
            steps=STEPS,
            players=(
                Player(
                    lambda key: model.init(key, training.images[:1], train=False),
                    loss,
                    optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.02, 50, STEPS), momentum=0.9),
                ),
            ),
            batches=lambda seed: shuffled(seed, BATCH, training.images, classes, offsets),
            evaluate=evaluate,
        )
    ]
