"""Protocols of a comparison: standard training, RBDC and its rivals.

`protocol` is the interface of a protocol, `rbdc.jobs.method` that of a growth method; a rival is
one class that implements both. Each protocol has a file, or a package, of its own and is found by
being here. `units` and `replicate` serve several rivals.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from rbdc.errors import PlanError, nearest
from rbdc.growth.protocol import OneParent, Protocol, Setting, Trial


@cache
def protocols() -> Mapping[str, type[Protocol]]:
    """Return every protocol by name: those that a file or package here defines."""
    found: dict[str, type[Protocol]] = {}
    for module in iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            is_protocol = isinstance(value, type) and issubclass(value, Protocol)
            if is_protocol and hasattr(value, "name"):  # a base class has no name
                found[value.name] = value
    return dict(sorted(found.items()))


def parse_protocol(text: str) -> Protocol:
    """Return the protocol that a user names, with options after colons (rbdc:2:carry)."""
    name, *words = text.strip().split(":")
    known = protocols()
    if name not in known:
        raise PlanError(
            f"no protocol is called {name!r}",
            nearest(name, known) or f"Protocols are {', '.join(known)}.",
        )
    return known[name].parse(words)
