"""Recipe files: the ones shipped with the package, and YAML files of the user's."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from rbdc.errors import RecipeError, nearest

RECIPES = files("rbdc.settings") / "recipes"


def shipped_recipes(folder: Traversable = RECIPES) -> list[str]:
    """Return the names of the recipes in a folder of the package."""
    return sorted(
        path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml")
    )


def read_recipe(name: str, folder: Traversable = RECIPES) -> dict[str, Any]:
    """Return the settings in a recipe of `folder` or a YAML file, with underscores in names."""
    known = shipped_recipes(folder)
    if name in known:
        text = (folder / f"{name}.yaml").read_text()
    elif Path(name).suffix in (".yaml", ".yml"):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{name} cannot be read: {error}", "Name a YAML file.") from None
    else:
        raise RecipeError(
            f"no recipe is called {name!r}",
            nearest(name, known) or f"Known are {', '.join(known)}, and YAML files.",
        )
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # an impossible date is a ValueError
        raise RecipeError(f"{name} is not YAML: {error}", "Mend the file.") from None
    content = {} if content is None else content  # an empty file
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"{name} holds no settings", "Write one setting per line: lr: 0.001")
    settings = {key.replace("-", "_"): value for key, value in content.items()}
    if len(settings) < len(content):
        raise RecipeError(f"{name} has a setting twice, with - and with _", "Leave one out.")
    return settings
