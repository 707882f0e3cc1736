"""Growth: RBDC's rivals, and RBDC and standard training as protocols beside them.

`protocol` is the signature of a protocol, `rbdc.jobs.method` that of widening. Every other file is
one protocol, found by being here; `units` and `replicate` are what several of them need.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from rbdc.errors import PlanError, nearest
from rbdc.growth.protocol import OneParent, Protocol, Setting, Trial

__all__ = ["OneParent", "Protocol", "Setting", "Trial", "parse_protocol", "protocols"]


@cache
def protocols() -> Mapping[str, type[Protocol]]:
    """Every protocol by name: each file here that defines one."""
    found: dict[str, type[Protocol]] = {}
    for module in iter_modules(__path__, f"{__name__}."):
        for value in vars(import_module(module.name)).values():
            is_protocol = isinstance(value, type) and issubclass(value, Protocol)
            if is_protocol and value.__module__ == module.name and hasattr(value, "name"):
                found[value.name] = value
    return dict(sorted(found.items()))


def parse_protocol(text: str) -> Protocol:
    """A protocol as a user writes it: its name, and options after colons (rbdc:2:carry)."""
    name, *words = text.strip().split(":")
    known = protocols()
    if name not in known:
        raise PlanError(
            f"no protocol is called {name!r}",
            nearest(name, known) or f"Protocols are {', '.join(known)}.",
        )
    return known[name].parse(words)
