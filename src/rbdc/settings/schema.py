"""Settings classes: pydantic dataclasses that are frozen, and checked when they are made.

A field's annotation says its type and range, the text below it is its help. What a wrong value is
told, what `--help` prints and what the reference lists all come from the class's JSON schema.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeAlias,
    TypeVar,
    cast,
    dataclass_transform,
    get_origin,
)

import pydantic.dataclasses
import yaml
from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

from rbdc.disk import MOST_WHOLE
from rbdc.errors import RbdcError, RecipeError, nearest
from rbdc.settings.duration import Duration, Unit, parse_duration, plain

T = TypeVar("T")
Json: TypeAlias = dict[str, Any]

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]


def _split(value: Any) -> Any:
    """Split lists that are text: `restart,carry`, or `[0.08, 1.0]`."""
    if not isinstance(value, str):
        return value
    return [text.strip() for text in value.strip("[]").split(",")]


Pair = Annotated[tuple[T, T], Strict(False), BeforeValidator(_split)]  # YAML's lists become tuples
Several = Annotated[tuple[T, ...], Strict(False), BeforeValidator(_split)]


def _from_yaml(value: Any) -> Any:
    """Read records that are text: `[{width: 0.5, share: 0.4}, {share: 0.6}]`."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


Records = Annotated[tuple[Mapping[str, Any], ...], Strict(False), BeforeValidator(_from_yaml)]


def _length(unit: Unit) -> BeforeValidator:
    """Read lengths that are text; in the setting's own unit they become plain numbers."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        given = parse_duration(value, unit)
        if given.unit != unit:
            return given
        return int(given.amount) if given.amount.is_integer() and unit == "steps" else given.amount

    return BeforeValidator(read)


Epochs = Annotated[Amount | Duration, _length("epochs")]
PositiveEpochs = Annotated[Positive | Duration, _length("epochs")]
Steps = Annotated[Whole | Duration, _length("steps")]

_CONFIG = ConfigDict(
    strict=True,  # no 64.0 or "64" for 64: what a job's key is made of has one form
    extra="forbid",
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)
_LIMITS = {"minimum": "at least", "exclusiveMinimum": "more than", "maximum": "at most"}
_KINDS = {
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "string": "text",
    "object": "names with values",
}


class Settings:
    """What all settings classes have."""

    ADDED: ClassVar[Mapping[str, Any]] = {}
    """Settings that were added after run format 5, with the value that means what was done before.
    At that value they are left out, so that runs and checkpoints of before are gone on with."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a recipe file would hold them; job keys are hashes of this."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        values = {name: plain(getattr(self, name)) for name in names}
        return {k: v for k, v in values.items() if k not in self.ADDED or v != self.ADDED[k]}


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make a class of settings, whose mistakes are RecipeErrors that name the setting."""
    made: Any = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=_CONFIG)(cls)
    init: Callable[..., None] = made.__init__

    @wraps(init)
    def checked(self: Any, **values: Any) -> None:
        try:
            init(self, **values)
        except ValidationError as error:
            raise _class_refusal(error, made, values) from None
        for name, value in values.items():
            if isinstance(value, int) and abs(value) > MOST_WHOLE:
                raise RecipeError(f"{name} is {value}", f"Give a number up to {MOST_WHOLE:g}.")

    made.__init__ = checked
    return cast(type[T], made)


@cache
def schemas(cls: type) -> Mapping[str, Json]:
    """Return the JSON schema of each field: type, range, default and description."""
    properties: Mapping[str, Json] = schema_of(cls)["properties"]
    for base in filter(dataclasses.is_dataclass, cls.__mro__[1:]):
        for name, schema in schemas(base).items():  # pydantic reads a class's own texts only
            properties[name].setdefault("description", schema["description"])
    return properties


def schema_of(hint: Any) -> Json:
    """Return the JSON schema of a type."""
    return TypeAdapter(hint).json_schema()


def read_words(hint: Any, option: str, words: str | list[str]) -> Any:
    """Return the value of an option that the command line gives as text.

    Numbers are read from text here, and only here: in recipe files they are numbers already.
    """
    schema, whole = schema_of(hint), get_origin(hint) is list  # paths are not split at commas
    text = words if isinstance(words, str) or whole else ",".join(words)
    if text == "null" and nullable(schema):
        return None
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(text)
    except ValidationError as error:
        said = words if isinstance(words, str) else " ".join(words)
        raise _refusal(error, option, f"got {said}", schema, nothing="null") from None


def _class_refusal(error: ValidationError, cls: type, values: Mapping[str, Any]) -> RbdcError:
    """Return the first mistake that pydantic found in the settings of a class."""
    first = error.errors()[0]
    if not first["loc"]:  # settings that do not go together
        return cast(RbdcError, first["ctx"]["error"])
    name = str(first["loc"][0])
    if name not in schemas(cls):
        return unknown_setting(name, list(schemas(cls)))
    return _refusal(error, name, f"is {values[name]!r}", schemas(cls)[name])


def unknown_setting(name: str, known: list[str]) -> RecipeError:
    """Return the mistake of a name that no setting has."""
    remedy = nearest(name, known) or f"Known are {', '.join(known)}."
    return RecipeError(f"no setting is called {name!r}", remedy)


def _refusal(
    error: ValidationError, name: str, said: str, schema: Json, *, nothing: str = "nothing"
) -> RecipeError:
    """Return the first mistake that pydantic found in one value, as two plain lines."""
    first = error.errors()[0]
    value, cause = first["input"], first.get("ctx", {}).get("error")
    if isinstance(cause, RbdcError):  # a validator of ours raised it
        return RecipeError(f"{name}: {cause.problem}", cause.remedy)
    if first["type"] in ("greater_than", "greater_than_equal", "less_than_equal"):
        problem = f"{name} is {float(value):g}, expected {limits(schema)}"
        return RecipeError(problem, "Give a value in this range.")
    remedy = f"Give {kind(schema)}."
    if isinstance(value, str) and choices(schema):
        remedy = nearest(value, choices(schema)) or remedy
    elif isinstance(value, str) and _is_number(value):
        remedy = "Numbers are written 0.001 or 1.0e-3: YAML reads 1e-3 as text."
    return RecipeError(f"{name} {said}, expected {kind(schema, nothing=nothing)}", remedy)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _walk(schema: Json) -> Iterator[Json]:
    """Yield a schema and those inside of it: alternatives, and the members of a list."""
    yield schema
    inner = [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    for part in [*inner, schema["items"]] if "items" in schema else inner:
        yield from _walk(part)


def nullable(schema: Json) -> bool:
    """Return whether the setting may be null."""
    return any(part.get("type") == "null" for part in _walk(schema))


def choices(schema: Json) -> list[str]:
    """Return the names that the setting, or a member of its list, may have."""
    return [str(choice) for part in _walk(schema) for choice in part.get("enum", ())]


def kind(schema: Json, *, nothing: str = "nothing") -> str:
    """Return what type a setting has in words: 'a number or nothing'."""
    if "anyOf" in schema:
        return " or ".join(kind(part, nothing=nothing) for part in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        length = f"{schema['maxItems']} of " if "maxItems" in schema else ""
        (member, *_) = schema.get("prefixItems", [schema.get("items")])
        return f"a list: {length}{kind(member)}"
    if schema.get("type") == "null":
        return nothing
    return _KINDS.get(schema.get("type", ""), "a length such as '500 steps' or '10%'")


def limits(schema: Json) -> str:
    """Return the range of a setting, or of its list's members, in words."""
    said = (
        " and ".join(f"{word} {part[key]:g}" for key, word in _LIMITS.items() if key in part)
        for part in _walk(schema)
    )
    return next(filter(None, said), "")
