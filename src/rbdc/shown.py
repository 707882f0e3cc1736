"""Print a value as a table: text in Python, HTML in a notebook."""

from abc import abstractmethod
from io import StringIO

from rich.console import Console, RenderableType

COLUMNS = 100  # characters of a table's width at most
_PAGE = '<pre style="line-height: 1.25; white-space: pre; overflow-x: auto">{code}</pre>'


class Shown:
    """A value whose `repr` is a table, in a notebook too."""

    __slots__ = ()

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return what is shown."""

    def __repr__(self) -> str:
        console = _console()
        console.print(self)
        lines = console.export_text().splitlines()
        return "\n".join(line.rstrip() for line in lines).strip("\n")

    def _repr_html_(self) -> str:
        console = _console()
        console.print(self)
        return console.export_html(inline_styles=True, code_format=_PAGE)


def _console() -> Console:
    """Return a console that records, and never writes into a notebook by itself."""
    return Console(
        file=StringIO(), record=True, width=COLUMNS, force_jupyter=False, highlight=False
    )
