"""The applications of the suite, in the order of the table."""

from . import (
    compression,
    detection,
    generation,
    image_classification,
    language_modelling,
    masked_language_modelling,
    recommendation,
    segmentation,
    speech_recognition,
    speech_synthesis,
    translation,
)
from ._application import Application

MODULES = (
    image_classification,
    detection,
    segmentation,
    speech_recognition,
    translation,
    language_modelling,
    masked_language_modelling,
    recommendation,
    generation,
    speech_synthesis,
    compression,
)

# `--quick`: convolutions without and with normalisation, and embeddings, in the two mixed precisions.
QUICK = ("classification, VGG", "classification, ResNet", "recommendation, NeuMF")
QUICK_PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")


def applications() -> list[Application]:
    """Every application; building one makes or loads its data."""
    return [application for module in MODULES for application in module.applications()]
