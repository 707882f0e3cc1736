"""What a training is told, and the recipes that come with the package (YAML).

`recipe` is how a model is trained, `request` what a run is to train, `machine` on what a training
runs, `cluster` where a run's trainings do.
Nothing in this room needs torch.
"""

from rbdc.settings.cluster import Cluster
from rbdc.settings.machine import Machine
from rbdc.settings.recipe import (
    Augmentation,
    Optimization,
    Recipe,
    field_help,
    read_recipe,
    shipped_recipes,
)
from rbdc.settings.request import PLAN, SPEND, Request, split_settings

__all__ = [
    "PLAN",
    "SPEND",
    "Augmentation",
    "Cluster",
    "Machine",
    "Optimization",
    "Recipe",
    "Request",
    "field_help",
    "read_recipe",
    "shipped_recipes",
    "split_settings",
]
