"""The page of a run as one HTML file: the same scripts and views as `groupwise view`, with the answers inside.

The file needs no server and requests nothing: its Content-Security-Policy allows only the scripts and styles that it
holds, by their hashes. A run has more samples than a file should have, so some steps are chosen (the first, the last,
those of findings, some between), in order of importance until the limit is reached; the file says what is left out.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise import __version__
from groupwise.errors import GroupwiseError
from groupwise.rundir import json_bytes
from groupwise.text import one_line, plural
from groupwise.viewer import page
from groupwise.viewer.api import Api, answer_key
from groupwise.viewer.runs import ServedRun, ServedRuns

LIMIT = 8_000_000  # bytes of the file, of which ECharts takes 1.1 million
POINTS = 1000  # of a curve
STEPS = 12  # whose groups are shown
GROUPS = 6  # prompts of a step that are shown as one picture, and followed through the run
SHARED_FROM = 60  # characters of JSON from which on a part that occurs again is stored once
SIGNIFICANT = 6  # digits of a number

Request = tuple[str, dict[str, str]]  # a path below run/ID, and a query


@dataclass
class Answers:
    """The answers of a report, by their keys, with a limit in bytes. What occurs in several answers is stored once."""

    limit: int
    answers: dict[str, Any] = field(default_factory=dict)
    shared: list[Any] = field(default_factory=list)
    size: int = 0
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, answer: Mapping[str, Any]) -> bool:
        """Whether there was room for it."""
        known, places = len(self.shared), dict(self._places)
        text, size = self._pack(answer)
        if self.size + size > self.limit:
            del self.shared[known:]
            self._places = places
            return False
        self.answers[key] = json.loads(text)
        self.size += size
        return True

    def _pack(self, value: Any) -> tuple[str, int]:
        """The value as JSON, in which parts that occur elsewhere too are {"$": number}; and the bytes that it adds."""
        if isinstance(value, float):
            value = float(f"{value:.{SIGNIFICANT}g}")
        if not isinstance(value, (Mapping, list, tuple)):
            text = json.dumps(value)
            return text, len(text)
        added = 0
        if isinstance(value, Mapping):
            packed = []
            for name, entry in value.items():
                text, size = self._pack(entry)
                packed.append(f"{json.dumps(str(name))}:{text}")
                added += size - len(text)
            text = f"{{{','.join(packed)}}}"
        else:
            parts = [self._pack(entry) for entry in value]
            added = sum(size - len(text) for text, size in parts)
            text = f"[{','.join(text for text, _ in parts)}]"
        if len(text) < SHARED_FROM:
            return text, added + len(text)
        place = self._places.get(text)
        if place is None:
            place = self._places[text] = len(self.shared)
            self.shared.append(json.loads(text))
            added += len(text)
        reference = f'{{"$":{place}}}'
        return reference, added + len(reference)


@dataclass(frozen=True)
class Report:
    """A file's content, and sentences about what is not in it."""

    html: str
    left_out: list[str]


def run_report(api: Api, run: ServedRun, *, limit: int = LIMIT) -> Report:
    """The report of a run that ``api`` serves."""
    answers = Answers(limit - len(_page({})))
    left_out: list[str] = []
    summary = api.get(f"run/{run.id}/summary")
    steps = chosen_steps(run.reader.rollout_steps, summary)
    meta = api.get(f"run/{run.id}")
    meta |= {"path": run.reader.name, "rollout_steps": steps, "token_steps": _spread(run.reader.token_steps, 4)}
    answers.add(f"run/{run.id}", meta)
    missed: dict[str, int] = {}
    for path, query in _requests(api, run, summary, meta):
        name = f"run/{run.id}/{path}"
        if answer_key(name, query) in answers.answers:
            continue
        try:
            answer = api.get(name, query)
        except GroupwiseError:
            continue  # the run has no such part, or it is damaged, which the summary says
        if not answers.add(answer_key(name, {} if path == "metrics" else query), answer):
            missed[path] = missed.get(path, 0) + 1
    recorded = len(run.reader.rollout_steps)
    if recorded > len(steps):
        left_out.append(f"samples of {plural(recorded - len(steps), 'step')} of {recorded:,}")
    left_out += [f"{plural(number, 'answer')} about {path}, for the size" for path, number in missed.items()]
    embedded = {
        "start": f"#/run/{run.id}/summary",
        "made": time.strftime("%Y-%m-%d %H:%M %z"),
        "version": __version__,
        "left_out": left_out,
        "answers": answers.answers,
        "shared": answers.shared,
    }
    return Report(_page(embedded, title=run.reader.name), left_out)


def comparison_report(title: str, blocks: Sequence[Mapping[str, Any]], curves: Mapping[str, Any]) -> Report:
    """The report of a comparison of control runs: blocks of text, tables and curves, in order."""
    answers = Answers(LIMIT)
    answers.add("comparison", {"title": title, "blocks": list(blocks), "curves": dict(curves)})
    embedded = {
        "start": "#/comparison",
        "made": time.strftime("%Y-%m-%d %H:%M %z"),
        "version": __version__,
        "left_out": [],
        "answers": answers.answers,
        "shared": answers.shared,
    }
    return Report(_page(embedded, title=title), [])


def serve_one(path: Any) -> tuple[Api, ServedRun]:
    """An Api over one run's folder."""
    runs = ServedRuns([path])
    return Api(runs), runs.scan()[0]


def chosen_steps(recorded: Sequence[int], summary: Mapping[str, Any]) -> list[int]:
    """The steps whose samples are shown: the first, the last, those of findings' examples, and some between."""
    if not recorded:
        return []
    examples = [example["step"] for finding in summary["findings"] for example in finding["examples"]]
    wanted = [recorded[-1], recorded[0], *(step for step in dict.fromkeys(examples) if step in recorded)]
    wanted += _spread(recorded, STEPS)
    return sorted(list(dict.fromkeys(wanted))[:STEPS])


def _spread(steps: Sequence[int], number: int) -> list[int]:
    """At most ``number`` of the steps, evenly, with the first and the last."""
    if len(steps) <= number:
        return list(steps)
    return [steps[place * (len(steps) - 1) // (number - 1)] for place in range(number)]


def _requests(api: Api, run: ServedRun, summary: Mapping[str, Any], meta: Mapping[str, Any]) -> Iterator[Request]:
    """What the views of the page ask for, the most important first."""
    yield from ((path, {}) for path in ("summary", "curves", "time", "findings", "settings", "questions"))
    yield "metrics", {"points": str(POINTS)}
    steps = meta["rollout_steps"]
    shown = [*steps[-1:], *steps[:1], *steps[1:-1]]
    examples = [example for finding in summary["findings"] for example in finding["examples"]]
    samples = [row for entry in summary["samples"] for row in (*entry["best"], *entry["worst"])]
    for place in (*examples, *samples):
        yield "group", _place(place)
    for step in shown:
        yield "groups", {"step": str(step)}
    for step in meta["token_steps"]:
        yield "tokens", {"step": str(step)}


def _place(row: Mapping[str, Any]) -> dict[str, str]:
    return {"step": str(row["step"]), "prompt": str(row["prompt_number"])}


def _page(embedded: Mapping[str, Any], title: str = "report") -> str:
    """The page with its styles, scripts and answers inside."""
    style = "\n".join(_static(name) for name in page.styles())
    names = page.scripts()
    names.insert(names.index("app.js") + 1, "embedded.js")
    scripts = [_static(name) for name in names]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_source, scripts))}",
            f"style-src {_source(style)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    icon = base64.b64encode((page.STATIC / "icon.svg").read_bytes()).decode()
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n  <style>{style}</style>'
    text = page.index(head).replace("static/icon.svg", f"data:image/svg+xml;base64,{icon}")
    text = text.replace("<title>groupwise</title>", f"<title>{html.escape(one_line(title))} · groupwise</title>")
    data = f'<script type="application/json" id="report">{_script_json(embedded)}</script>'
    return text.replace("</body>", "\n".join([data, *(f"<script>{script}</script>" for script in scripts), "</body>"]))


def _static(name: str) -> str:
    """A script or a style sheet as it can stand in HTML, which ends it at its closing tag wherever that is."""
    return re.sub(r"<(?=/(?:script|style)|!--)", r"\\x3c", (page.STATIC / name).read_text(encoding="utf-8"), flags=re.I)


def _source(content: str) -> str:
    """A script or style in the policy, by its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _script_json(value: Any) -> str:
    """JSON that neither ends a script element nor begins a comment, whatever texts it has."""
    text = json_bytes(value, separators=(",", ":")).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
