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
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any

from groupwise import __version__
from groupwise.errors import GroupwiseError
from groupwise.text import one_line, plural
from groupwise.viewer import page
from groupwise.viewer.api import Api, answer_key
from groupwise.viewer.runs import ServedRun, ServedRuns

LIMIT = 8_000_000  # bytes of the file, of which ECharts takes 1.1 million
POINTS = 1000  # of a curve
STEPS = 12  # whose groups are shown
GROUPS = 6  # prompts of a step that are shown as one picture, and questions that are followed through the run
TOKEN_STEPS, TOKEN_SAMPLES = 3, 2  # steps whose tokens are shown; of each prompt so many of the best and of the worst
SHARED_FROM = 60  # characters of JSON from which on a part that occurs again is stored once
SIGNIFICANT = 6  # digits of a number
ABOUT = 5_000  # bytes for what the file says of itself


def encode(text: str) -> str:
    """A text as a string of JSON that neither ends a script element nor begins a comment."""
    return encode_basestring(text).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@dataclass
class Answers:
    """The answers of a report as JSON, by their keys, with a limit in bytes.

    A part that occurs in several answers is stored once, in ``shared``; in its places stands ``{"$": number}``.
    """

    limit: int
    texts: dict[str, str] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)
    size: int = 0
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, answer: Mapping[str, Any]) -> bool:
        """Whether there was room for it."""
        known = len(self.shared)
        text = self._pack(answer)
        added = sum(
            1 + len(part.encode("utf-8", "replace")) for part in (f"{encode(key)}:{text}", *self.shared[known:])
        )
        if self.size + added > self.limit:
            for part in self.shared[known:]:
                del self._places[part]
            del self.shared[known:]
            return False
        self.texts[key] = text
        self.size += added
        return True

    def _pack(self, value: Any) -> str:
        if isinstance(value, str):
            return encode(value)
        if isinstance(value, float):
            return f"{value:.{SIGNIFICANT}g}"
        if isinstance(value, list):
            text = f"[{','.join(map(self._pack, value))}]"
        elif isinstance(value, Mapping):
            text = f"{{{','.join(f'{encode(str(key))}:{self._pack(entry)}' for key, entry in value.items())}}}"
        else:
            return json.dumps(value)
        if len(text) < SHARED_FROM:
            return text
        place = self._places.setdefault(text, len(self.shared))
        if place == len(self.shared):
            self.shared.append(text)
        return f'{{"$":{place}}}'


@dataclass(frozen=True)
class Report:
    """A file's content, and sentences about what is not in it."""

    html: str
    left_out: list[str]


def run_report(path: Path, *, limit: int = LIMIT) -> Report:
    """The report of the run in a folder."""
    runs = ServedRuns([path])
    (run,) = runs.scan()
    contents = ReportContents(Api(runs), run, limit - len(_page("").encode()) - ABOUT)
    contents.collect()
    embedded = _embedded(f"#/run/{run.id}/summary", contents.answers, contents.left_out())
    return Report(_page(embedded, title=run.reader.name), contents.left_out())


class ReportContents:
    """Asks for what the views of the page show, the most important first, until the limit is reached."""

    def __init__(self, api: Api, run: ServedRun, limit: int) -> None:
        self.api, self.run, self.answers = api, run, Answers(limit)
        self.steps: list[int] = []
        self._missed: dict[str, int] = {}
        self._choices: dict[int, dict[str, Any]] = {}  # what a step's groups can be filtered and sorted by

    def ask(self, path: str, **query: Any) -> dict[str, Any]:
        """The answer to a path below ``run/ID``, which is kept if there is room; {} if there is none.

        A part that cannot be read is left out: the summary names what is damaged.
        """
        texts = {name: str(value) for name, value in query.items()}
        name = f"run/{self.run.id}/{path}"
        key = answer_key(name, {} if path == "metrics" else texts)  # all metrics are in one answer
        if key in self.answers.texts:
            return {}
        try:
            answer = self.api.get(name, texts)
        except GroupwiseError:
            return {}
        if not self.answers.add(key, answer):
            self._missed[path] = self._missed.get(path, 0) + 1
        return answer

    def collect(self) -> None:
        summary = self.ask("summary")
        reader = self.run.reader
        self.steps = chosen_steps(reader.rollout_steps, summary["findings"])
        about = self.api.get(f"run/{self.run.id}")
        about |= {
            "path": reader.name,
            "rollout_steps": self.steps,
            "token_steps": _spread(reader.token_steps, TOKEN_STEPS),
        }
        self.answers.add(f"run/{self.run.id}", about)
        self.ask("curves")
        self.ask("metrics", points=POINTS)
        for path in ("findings", "time", "settings"):
            self.ask(path)
        examples = [example for finding in summary["findings"] for example in finding["examples"]]
        for row in [*examples, *(row for entry in summary["samples"] for row in (*entry["best"], *entry["worst"]))]:
            self.ask("group", step=row["step"], prompt=row["prompt_number"])
        by_importance = list(dict.fromkeys([*self.steps[-1:], *self.steps]))
        for step in by_importance:
            self._add_groups(step)
        self._add_questions()
        self.ask("tokens")
        for step in about["token_steps"][::-1]:
            self._add_tokens(step)
        for step in by_importance[:2]:
            self._add_choices(step)

    def _add_groups(self, step: int) -> None:
        """The first page of a step's groups, and some of them as one picture."""
        answer = self._choices[step] = self.ask("groups", step=step)
        groups = answer.get("groups", [])
        for number in [0, *(group["prompt_number"] for group in groups[:GROUPS])]:
            self.ask("group", step=step, prompt=number)
        if self.ask("clusters", step=step, prompt=0):
            for group in groups[1:GROUPS]:
                self.ask("clusters", step=step, prompt=group["prompt_number"])
        if self.run.reader.settings.get("preference.weight"):
            self.ask("pairs", step=step)

    def _add_choices(self, step: int) -> None:
        """The groups of a step by each filter and in each order."""
        self.ask("groups", step=step, page=2)
        for choice in self._choices[step].get("filters", []):
            if choice["count"]:
                self.ask("groups", step=step, filter=choice["name"])
        for choice in self._choices[step].get("sorts", [])[1:]:
            self.ask("groups", step=step, sort=choice["name"])

    def _add_questions(self) -> None:
        """The questions of each part, and some of them through the run."""
        answer = self.ask("questions")
        for part in answer.get("parts", []):
            shown = self.ask("questions", part=part["name"])
            for row in shown.get("rows", [])[:GROUPS]:
                held_out = {"held_out": 1} if part["name"] == "held_out" else {}
                self.ask("prompt", row=row["row"], **held_out)
            for status in shown.get("statuses", [])[1:]:
                self.ask("questions", part=part["name"], status=status["name"])

    def _add_tokens(self, step: int) -> None:
        """The answers of a step token by token: of each prompt the best and the worst one."""
        first = self.ask("tokens", step=step)
        for prompt in first.get("prompts", []):
            place = {"step": step, "prompt": prompt["prompt"]}
            siblings = self.ask("tokens", **place).get("siblings", [])
            siblings = sorted(siblings, key=lambda one: one["advantage"] or 0.0)
            for one in [*siblings[-TOKEN_SAMPLES:], *siblings[:TOKEN_SAMPLES]]:
                self.ask("tokens", **place, sample=one["sample"])

    def left_out(self) -> list[str]:
        """What is not in the file, in words."""
        recorded = len(self.run.reader.rollout_steps)
        steps = (
            [f"samples of {recorded - len(self.steps):,} of {plural(recorded, 'step')}"]
            if recorded > len(self.steps)
            else []
        )
        return steps + [f"{plural(number, 'part')} of {path}, for the size" for path, number in self._missed.items()]


def comparison_report(title: str, blocks: Sequence[Mapping[str, Any]], curves: Mapping[str, Any]) -> Report:
    """The report of a comparison of control runs: blocks of text, tables and curves, in order."""
    answers = Answers(sys.maxsize)  # a curve has 200 points at most
    answers.add("comparison", {"title": title, "blocks": list(blocks), "curves": dict(curves)})
    return Report(_page(_embedded("#/comparison", answers, []), title=title), [])


def chosen_steps(recorded: Sequence[int], findings: Iterable[Mapping[str, Any]]) -> list[int]:
    """The steps whose samples are shown: the first, the last, those of findings' examples, and some between."""
    if not recorded:
        return []
    examples = [example["step"] for finding in findings for example in finding["examples"]]
    wanted = [recorded[-1], recorded[0], *(step for step in examples if step in recorded), *_spread(recorded, STEPS)]
    return sorted(list(dict.fromkeys(wanted))[:STEPS])


def _embedded(start: str, answers: Answers, left_out: Sequence[str]) -> str:
    """What embedded.js reads: where the page opens, what the file says of itself, and the answers."""
    about = {"start": start, "made": time.strftime("%Y-%m-%d %H:%M %z"), "version": __version__}
    texts = ",".join(f"{encode(key)}:{text}" for key, text in answers.texts.items())
    facts = ",".join(f'"{name}":{encode(text)}' for name, text in about.items())
    listed = ",".join(map(encode, left_out))
    return f'{{{facts},"left_out":[{listed}],"answers":{{{texts}}},"shared":[{",".join(answers.shared)}]}}'


def _spread(steps: Sequence[int], number: int) -> list[int]:
    """At most ``number`` of the steps, evenly, with the first and the last."""
    if len(steps) <= number:
        return list(steps)
    return [steps[place * (len(steps) - 1) // (number - 1)] for place in range(number)]


def _page(embedded: str, title: str = "report") -> str:
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
    data = f'<script type="application/json" id="report">{embedded}</script>'
    return text.replace("</body>", "\n".join([data, *(f"<script>{script}</script>" for script in scripts), "</body>"]))


def _static(name: str) -> str:
    """A script or a style sheet as it can stand in HTML, which ends it at its closing tag wherever that is."""
    return re.sub(r"<(?=/(?:script|style)|!--)", r"\\x3c", (page.STATIC / name).read_text(encoding="utf-8"), flags=re.I)


def _source(content: str) -> str:
    """A script or style in the policy, by its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
