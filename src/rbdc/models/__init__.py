"""Build models at a fraction of their width, and read and write them.

`families` is the table of architectures, `build` builds a model at a width, `folder` writes and
reads it in timm's format, `structures` has how it couples, and `coupled` couples two such folders
into a third.
"""

from rbdc.models.build import (
    as_spec,
    build,
    build_empty,
    build_meta,
    check_steps,
    depths,
    family,
    fold_parametrizations,
    image_side,
    parameters_of,
    patch_side,
    record_of,
    scaled_widths,
    shapes_of,
    size_argument,
    sized,
    spec_of,
    timm_builds,
)
from rbdc.models.coupled import couple_folders
from rbdc.models.extend import NewBlocks, at_size, extend
from rbdc.models.families import Family, register_family
from rbdc.models.folder import copy_model, export, load
from rbdc.models.narrow import narrow
from rbdc.models.spec import ModelSpec
from rbdc.models.structures import halves_layout, halves_structure, halves_units
