"""Prepares docstrings for the site's API reference, where they are read as Markdown.

Parameters are described in lines such as ``logps, old_logps: (B, T) under …``. In Markdown, lines in a row are one
paragraph, so each of them becomes an entry of a list.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

NAME = r"\*{0,2}[A-Za-z_]\w*"
NAMES = re.compile(rf"({NAME}(?:(?:, | and ){NAME})*): ")


def as_markdown(text: str, parameters: set[str]) -> str:
    """The docstring with a list of the parameters it describes, and without Sphinx's roles."""
    lines: list[str] = []
    in_list = False
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    for line in re.sub(
        rf"(?<=\.) (?={NAMES.pattern})", lambda space: _line_break(space, parameters), text
    ).splitlines():
        match = NAMES.match(line)
        names = re.findall(r"\w+", match[1].replace(" and ", " ")) if match else []
        if match and set(names) <= parameters:
            if not in_list and lines and lines[-1]:
                lines.append("")
            lines.append(f"- {', '.join(f'**`{name}`**' for name in names)}: {line[match.end() :]}")
            in_list = True
        else:
            in_list = in_list and bool(line.strip())
            lines.append(f"  {line.strip()}" if in_list else line)
    return "\n".join(lines)


def _line_break(space: re.Match[str], parameters: set[str]) -> str:
    """A new line where a sentence ends and the next parameter is described."""
    match = NAMES.match(space.string, space.end())
    names = set(re.findall(r"\w+", match[1].replace(" and ", " "))) if match else set()
    return "\n" if names and names <= parameters else " "


class MarkdownDocstrings(Extension):
    """Rewrites each docstring of a function or class when it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None or not (obj.is_function or obj.is_class):
            return
        parameters = {parameter.name.lstrip("*") for parameter in getattr(obj, "parameters", ())}
        if obj.is_class:
            parameters |= set(obj.members)
        obj.docstring.value = as_markdown(obj.docstring.value, parameters)
