"""``arrivals.jsonl``: which groups an asynchronous run drew, learned and dropped, in order.

A group is a prompt with its completions, numbered as it was drawn. When a group is ready depends on how long its
rewards take, and so does the batch that it becomes a part of. This record holds all that timing decides, so a run
that follows it (``train.replay``) has the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groupwise.errors import ConfigError, RunDirError
from groupwise.paths import MEGABYTE, kind_of, read_file
from groupwise.rundir.files import set_aside, write_bytes
from groupwise.text import error_reason, excerpt

ARRIVALS = "arrivals.jsonl"
LARGEST = 1024 * MEGABYTE

Number = Annotated[int, Field(ge=0, lt=2**53)]


class Arrival(BaseModel):
    """One round of a step. Rounds after the first resample prompts (``train.resample_rounds``)."""

    model_config = ConfigDict(strict=True, extra="forbid")

    step: Annotated[int, Field(ge=1, lt=2**53)]
    round: Number = 0
    dropped: list[tuple[Number, str]] = []
    """groups that are not learned, and why; their rows are drawn again"""
    drawn: list[list[tuple[Number, Number]]] = []
    """for each draw, its groups and their rows"""
    taken: list[Number] = []
    """the groups of the batch, in its order"""
    versions: list[tuple[Number, Number]] = []
    """of each of these: the oldest and the newest version of the weights that sampled it"""


def append_arrival(folder: Path, arrival: Arrival) -> None:
    """Add a line to the run's record."""
    path = folder / ARRIVALS
    try:
        with open(path, "ab", buffering=0) as file:
            length, line = file.tell(), arrival.model_dump_json().encode() + b"\n"
            if file.write(line) != len(line):
                file.truncate(length)
                raise OSError("the disk is full")
    except OSError as error:
        raise RunDirError(f"{path} could not be written: {error_reason(error)}. Earlier lines are untouched") from error


def rewind_arrivals(folder: Path, step: int) -> str | None:
    """Delete the lines after ``step``, to resume from there; a damaged file is renamed, and the result says so."""
    path = folder / ARRIVALS
    if not path.exists():
        return None
    try:
        kept = [arrival for arrival in _read(path) if arrival.step <= step]
    except RunDirError as error:
        return f"{error}: it was renamed to {set_aside(path).name}, and this run cannot be replayed"
    write_bytes(path, b"".join(arrival.model_dump_json().encode() + b"\n" for arrival in kept))
    return None


def read_arrivals(source: str) -> Mapping[tuple[int, int], Arrival]:
    """A run's record by step and round. ``source``: the run's folder, or the file itself."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / ARRIVALS
    if kind_of(path, ConfigError) is None:
        raise ConfigError(
            f"train.replay: {path} does not exist; give the folder of a run with train.max_staleness above 0"
        )
    arrivals = _read(path)
    if not arrivals:
        raise ConfigError(f"train.replay: {path} has no complete line")
    return {(arrival.step, arrival.round): arrival for arrival in arrivals}


def _read(path: Path) -> list[Arrival]:
    """The complete lines; an unfinished last one is ignored."""
    lines = read_file(path, RunDirError, limit=LARGEST).split(b"\n")[:-1]
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, start=1):
        try:
            arrivals.append(Arrival.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or excerpt(line.decode(errors="replace"))
            raise RunDirError(f"{path}, line {number} is damaged: {place}: {first['msg']}") from error
    return arrivals
