"""Models by width: what "half as wide" means for an architecture, and models on disk.

`families` is the table of architectures, `build` makes a model at a width, `folder` writes and
reads it as timm does, `coupled` couples two such folders into a third.
"""

from rbdc.models.build import (
    as_spec,
    build,
    build_empty,
    build_meta,
    check_steps,
    family,
    fold_parametrizations,
    halves_layout,
    halvings,
    record_of,
    scaled_widths,
    shapes_of,
    spec_of,
    timm_builds,
)
from rbdc.models.coupled import couple_folders
from rbdc.models.folder import copy_model, export, load
from rbdc.models.spec import ModelSpec

__all__ = [
    "ModelSpec",
    "as_spec",
    "build",
    "build_empty",
    "build_meta",
    "check_steps",
    "copy_model",
    "couple_folders",
    "export",
    "family",
    "fold_parametrizations",
    "halves_layout",
    "halvings",
    "load",
    "record_of",
    "scaled_widths",
    "shapes_of",
    "spec_of",
    "timm_builds",
]
