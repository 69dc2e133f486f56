"""The applications of the suite, in the order of the table."""

from . import image_classification
from ._application import Application

# Those of the short form: they are quick, and one of them fails without a loss scale.
QUICK = ("classification, VGG",)


def applications() -> list[Application]:
    """Every application; building one makes or loads its data."""
    return [application for module in (image_classification,) for application in module.applications()]
