"""run.json: what a run was asked for, what decides its result, and how it is run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rbdc.disk import read_json
from rbdc.errors import RunError
from rbdc.jobs.layout import RUN

FORMAT = 4  # of a run's folder; folders of other formats are refused


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the content of a folder's run.json, or None if there is none."""
    record = read_json(folder / RUN)
    if record is not None:
        check_format(folder, record)
    return record


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
