"""The version, read by the build too; also right where a checkout is run without being installed."""

__version__ = "0.1.0"
