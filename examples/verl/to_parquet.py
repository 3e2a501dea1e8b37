"""Convert rows to the parquet files that verl reads.

    python to_parquet.py prompts.jsonl data --held-out 4

Rows come from any source of a groupwise recipe: a .jsonl, .json, .csv or .parquet file, a folder, or a hub id. The
column ``prompt`` is a text or a list of chat messages, ``ground_truth`` is optional. All other columns go to
``extra_info``, as JSON. Writes train.parquet and held_out.parquet.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from groupwise.data import Row, check_prompts, read_rows, where_of
from groupwise.errors import GroupwiseError, InputError


def convert(rows: Sequence[Row], *, data_source: str, split: str, system: str | None = None) -> list[dict[str, Any]]:
    """The rows with verl's columns: data_source, prompt, ability, reward_model and extra_info."""
    check_prompts(rows)
    return [_convert(row, number, data_source, split, system) for number, row in enumerate(rows)]


def _convert(row: Row, number: int, data_source: str, split: str, system: str | None) -> dict[str, Any]:
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system is not None:
        if messages[0]["role"] == "system":
            raise InputError(f"{where_of(row, number)} has a system message of its own; leave out --system")
        messages.insert(0, {"role": "system", "content": system})
    ground_truth = row.get("ground_truth")
    others = {name: value for name, value in row.items() if name not in ("prompt", "ground_truth")}
    request = "\n".join(message["content"] for message in messages if message["role"] == "user")
    return {
        "data_source": data_source,
        "prompt": [{"role": message["role"], "content": message["content"]} for message in messages],
        "ability": "writing",
        # One type in every row: parquet's columns have types, and a reward function for writing needs no ground truth.
        "reward_model": {"style": "rule", "ground_truth": "" if ground_truth is None else str(ground_truth)},
        "extra_info": {"split": split, "index": number, "request": request, "columns": json.dumps(others)},
    }


def write_files(
    source: str, folder: Path, *, held_out: int, data_source: str = "writing", system: str | None = None
) -> dict[str, int]:
    """Write the two files, the last ``held_out`` rows into the second; returns the number of rows in each."""
    rows = read_rows(source)
    if not 0 < held_out < len(rows):
        raise InputError(
            f"--held-out is {held_out}; {source} has {len(rows)} rows, so it must be from 1 to {len(rows) - 1}"
        )
    parts = {"train": rows[:-held_out], "held_out": rows[-held_out:]}
    tables = {
        split: pyarrow.Table.from_pylist(convert(part, data_source=data_source, split=split, system=system))
        for split, part in parts.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        pyarrow.parquet.write_table(table, folder / f"{split}.parquet")
    return {split: len(table) for split, table in tables.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Convert rows to verl's parquet files.")
    parser.add_argument("source", help="a .jsonl, .json, .csv or .parquet file, a folder, or a hub id owner/name")
    parser.add_argument("folder", type=Path, help="where train.parquet and held_out.parquet are written")
    parser.add_argument("--held-out", type=int, default=4, metavar="ROWS", help="last rows to hold out (default 4)")
    parser.add_argument("--data-source", default="writing", help="verl's data_source (default writing)")
    parser.add_argument("--system", help="a system message before every prompt")
    given = parser.parse_args(arguments)
    try:
        counts = write_files(
            given.source, given.folder, held_out=given.held_out, data_source=given.data_source, system=given.system
        )
    except (GroupwiseError, OSError) as error:
        print(f"to_parquet.py: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{given.folder / split}.parquet: {number} rows" for split, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
