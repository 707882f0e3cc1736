"""Data sets. So far the one that comes with the package."""

from rbdc.data.fashion import ImageSet, embedded

__all__ = ["ImageSet", "embedded"]
