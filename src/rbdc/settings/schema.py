"""Settings classes: pydantic dataclasses that are frozen, and checked when they are made.

A field's annotation says its type and range, the text below it is its help. What a wrong value is
told, what `--help` prints and what the reference lists all come from the class's JSON schema.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Annotated, Any, TypeAlias, TypeVar, cast, dataclass_transform, get_type_hints

import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, Strict, TypeAdapter, ValidationError

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
Pair = Annotated[tuple[T, T], Strict(False)]  # a list, as YAML has, becomes a tuple
Several = Annotated[tuple[T, ...], Strict(False)]


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
Steps = Annotated[Whole | Duration, _length("steps")]

_CONFIG = ConfigDict(
    strict=True,  # no 64.0 or "64" for 64: what a job's key is made of has one form
    extra="forbid",
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)
_LIMITS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
}
_OUT_OF_RANGE = ("greater_than", "greater_than_equal", "less_than_equal")
_KINDS = {
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "string": "text",
    "object": "names with values",
}


class Settings:
    """What all settings classes have."""

    def to_json(self) -> dict[str, Any]:
        """Return the settings as a recipe file would hold them; job keys are hashes of this."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return {name: plain(getattr(self, name)) for name in names}


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
            raise refusal(error, made, values) from None

    made.__init__ = checked
    return cast(type[T], made)


@cache
def schemas(cls: type) -> Mapping[str, Json]:
    """Return the JSON schema of each field: type, range, default and description."""
    properties: Mapping[str, Json] = TypeAdapter(cls).json_schema()["properties"]
    for base in filter(dataclasses.is_dataclass, cls.__mro__[1:]):
        for name, schema in schemas(base).items():  # pydantic reads a class's own texts only
            properties[name].setdefault("description", schema["description"])
    return properties


def schema_of(hint: Any) -> Json:
    """Return the JSON schema of a type."""
    return TypeAdapter(hint).json_schema()


def read_words(cls: type, name: str, words: str | list[str]) -> Any:
    """Return the value of a setting that the command line gives as text.

    Numbers are read from text here, and only here: in recipe files they are numbers already.
    """
    hint, schema = get_type_hints(cls, include_extras=True)[name], schemas(cls)[name]
    texts: Any = words
    if isinstance(words, list):  # 0.08 1.0, or 0.08,1.0, or [0.08, 1.0]
        texts = [text.strip() for text in ",".join(words).strip("[]").split(",")]
    if texts in ("null", ["null"]) and nullable(schema):
        return None
    return read_value(hint, f"--{name.replace('_', '-')}", texts)


def read_value(hint: Any, option: str, text: str | list[str]) -> Any:
    """Return the value of an option that is given as text."""
    try:
        return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False)).validate_python(text)
    except ValidationError as error:
        first, schema = error.errors(include_url=False)[0], schema_of(hint)
        if _cause(first) or first["type"] in _OUT_OF_RANGE:
            raise _refused(option, schema, text, first) from None
        said = text if isinstance(text, str) else " ".join(text)
        raise RecipeError(
            f"{option} got {said}, expected {kind(schema, nothing='null')}",
            _remedy(first["input"], schema),
        ) from None


def refusal(error: ValidationError, cls: type, values: Mapping[str, Any]) -> RbdcError:
    """Return the first mistake that pydantic found, as two plain lines."""
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # settings that do not go together
        cause = _cause(first)
        assert cause is not None, first
        return cause
    name = str(first["loc"][0])
    if name not in schemas(cls):
        return unknown_setting(name, list(schemas(cls)))
    return _refused(name, schemas(cls)[name], values[name], first)


def unknown_setting(name: str, known: list[str]) -> RecipeError:
    """Return the mistake of a name that no setting has."""
    return RecipeError(
        f"no setting is called {name!r}",
        nearest(name, known) or f"Known are {', '.join(known)}.",
    )


def _cause(first: Mapping[str, Any]) -> RbdcError | None:
    """Return the mistake that a validator of ours raised."""
    cause = first.get("ctx", {}).get("error")
    return cause if isinstance(cause, RbdcError) else None


def _refused(name: str, schema: Json, value: Any, first: Mapping[str, Any]) -> RecipeError:
    if cause := _cause(first):
        return RecipeError(f"{name}: {cause.problem}", cause.remedy)
    if first["type"] in _OUT_OF_RANGE:
        number = float(first["input"])
        return RecipeError(
            f"{name} is {number:g}, expected {limits(schema)}", "Give a value in this range."
        )
    return RecipeError(
        f"{name} is {value!r}, expected {kind(schema)}", _remedy(first["input"], schema)
    )


def _remedy(value: Any, schema: Json) -> str:
    if isinstance(value, str) and _is_number(value) and choices(schema) == []:
        return "Numbers are written 0.001 or 1.0e-3: YAML reads 1e-3 as text."
    near = nearest(value, choices(schema)) if isinstance(value, str) else ""
    return near or f"Give {kind(schema)}."


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _parts(schema: Json) -> list[Json]:
    """Return the schemas inside of one: alternatives, and the members of a list."""
    inner = [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    return [*inner, schema["items"]] if "items" in schema else inner


def nullable(schema: Json) -> bool:
    """Return whether the setting may be null."""
    return any(part.get("type") == "null" for part in schema.get("anyOf", ()))


def choices(schema: Json) -> list[str]:
    """Return the names that the setting, or a member of its list, may have."""
    inner = [choice for part in _parts(schema) for choice in choices(part)]
    return [*map(str, schema.get("enum", ())), *inner]


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
        return f"a list: {length}{kind(_parts(schema)[0])}"
    if schema.get("type") == "null":
        return nothing
    return _KINDS.get(schema.get("type", ""), "a length such as '500 steps' or '10%'")


def limits(schema: Json) -> str:
    """Return the range of a setting, or of its list's members, in words."""
    said = [f"{word} {schema[key]:g}" for key, word in _LIMITS.items() if key in schema]
    return " and ".join(said) or next(filter(None, map(limits, _parts(schema))), "")
