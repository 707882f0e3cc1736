"""Firefly (Wu et al., NeurIPS 2020): train a surplus of new units briefly, and keep the best."""

from rbdc.growth.firefly.firefly import Firefly

__all__ = ["Firefly"]
