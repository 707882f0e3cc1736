"""How commands print tables."""

from typing import Any


def show(renderable: Any) -> None:
    """Print once, as wide as the terminal."""
    make_console().print(renderable)


def make_console(*, quiet: bool = False) -> Any:
    """Return a console as wide as the terminal; a quiet one prints nothing."""
    from rich.console import Console

    console = Console(quiet=quiet)
    # a file or a pipe: nothing to fit into
    return console if console.is_terminal else Console(width=140, quiet=quiet)
