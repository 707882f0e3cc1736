"""run.json: what a run was asked for, what decides its result, and how it is run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rbdc.disk import Json, check_shape, read_json
from rbdc.errors import RunError
from rbdc.jobs.layout import RUN
from rbdc.jobs.records import RunRecord

FORMAT = 5  # of a run's folder; folders of other formats are refused


def read_record(folder: Path) -> Json | None:
    """Return the content of a folder's run.json, or None if there is none."""
    record = read_json(folder / RUN, Json)
    return None if record is None else check_record(folder, record)


def check_record(folder: Path, record: Json) -> Json:
    """Return the content of run.json; refuse another format, and one that lacks what is needed."""
    check_format(folder, record)
    remedy = "Choose another folder, or put its run.json back."
    return cast(Json, check_shape(record, RunRecord, str(folder / RUN), RunError, remedy))


def check_format(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse a folder that was written in another format."""
    found = record.get("format", "2 or older")
    if found != FORMAT:
        raise RunError(
            f"{folder} holds a run in format {found}, and this version reads format {FORMAT}",
            "Choose another folder, or use the version of rbdc that wrote it.",
        )


def check_same(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to continue a run with another request."""
    different = list(differences(old, new))
    if different:
        more = f" and {len(different) - 5} more" if different[5:] else ""
        raise RunError(
            f"{output} holds a run that was asked for otherwise: "
            + "; ".join(f"{name} was {was}, now {now}" for name, was, now in different[:5])
            + more,
            "Ask for the same to go on, or choose another folder.",
        )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, old value, new value) of everything that differs, nested names with dots."""
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{prefix}{name}.")
        elif was != now:
            yield f"{prefix}{name}", was, now
