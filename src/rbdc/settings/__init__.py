"""Settings of a training, and the recipes that come with the package (YAML).

`recipe` is how a model is trained, `request` what a run trains, `machine` what a training runs on,
`cluster` where a run's jobs are executed. Nothing in this room needs torch.
"""

from rbdc.settings.cluster import Cluster
from rbdc.settings.detection import DetectionRecipe, read_detection_recipe
from rbdc.settings.duration import Duration, Extent, Length, parse_duration, plain, with_unit
from rbdc.settings.files import read_recipe, shipped_recipes
from rbdc.settings.machine import Machine
from rbdc.settings.recipe import Augmentation, Optimization, Recipe
from rbdc.settings.request import (
    GROWTH,
    PLAN,
    SPEND,
    Axis,
    Request,
    StageSettings,
    names_baseline,
    split_settings,
)
