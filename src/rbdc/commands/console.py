"""How commands print lines and tables: escape codes in names are spelled out, ours are not."""

from typing import Any

from rbdc.errors import printable


def say(text: object = "") -> None:
    """Print a line, which may have names of files, members or options in it."""
    print(printable(str(text)))


def show(renderable: Any) -> None:
    """Print once, as wide as the terminal."""
    make_console().print(renderable)


def make_console(*, quiet: bool = False) -> Any:
    """Return a console as wide as the terminal; a quiet one prints nothing."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def _render_buffer(self, buffer: Any) -> str:
            """Render segments: rich's own codes are styles and controls, never text."""
            return super()._render_buffer(
                segment if segment.control else Segment(printable(segment.text), segment.style)
                for segment in buffer
            )

    console = SafeConsole(quiet=quiet)
    # a file or a pipe: nothing to fit into
    return console if console.is_terminal else SafeConsole(width=140, quiet=quiet)
