"""What a training is told (`recipe`), and the recipes that come with the package (YAML)."""

from rbdc.recipes.recipe import (
    Augmentation,
    Recipe,
    check_names,
    check_types,
    field_help,
    read_recipe,
    shipped_recipes,
)

__all__ = [
    "Augmentation",
    "Recipe",
    "check_names",
    "check_types",
    "field_help",
    "read_recipe",
    "shipped_recipes",
]
