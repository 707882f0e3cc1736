"""Recipe files: the ones shipped with the package, and YAML files of the user's."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from rbdc.disk import read_bytes
from rbdc.errors import RecipeError, nearest

RECIPES = files("rbdc.settings") / "recipes"
_MOST_ALIASES, _MOST_LEVELS = 20, 20  # a few aliases of aliases stand for billions of values


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
            text = read_bytes(Path(name)).decode()
        except (OSError, ValueError) as error:
            raise RecipeError(f"{name} cannot be read: {error}", "Name a YAML file.") from None
    else:
        raise RecipeError(
            f"no recipe is called {name!r}",
            nearest(name, known) or f"Known are {', '.join(known)}, and YAML files.",
        )
    try:
        _check_extent(text)
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


def _check_extent(text: str) -> None:
    """Raise a ValueError for YAML that has too many aliases or levels to be settings."""
    aliases = level = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        aliases += isinstance(event, yaml.AliasEvent)
        level += isinstance(event, yaml.CollectionStartEvent)
        level -= isinstance(event, yaml.CollectionEndEvent)
        if aliases > _MOST_ALIASES or level > _MOST_LEVELS:
            raise ValueError(f"more than {_MOST_ALIASES} aliases or {_MOST_LEVELS} levels")
