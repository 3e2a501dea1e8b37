"""Load a run's teacher ([distillation]), and the prompts that only it is shown. What cannot work is refused here."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config import Recipe
from groupwise.config.sections import DistillationSection
from groupwise.data import Prompt, PromptBuilder, where_of
from groupwise.data.prompts import as_messages
from groupwise.errors import ConfigError, DataError, did_you_mean
from groupwise.model import load_model, load_tokenizer, prepare
from groupwise.model.device import resolve_device, resolve_dtype
from groupwise.model.handle import ModelHandle
from groupwise.model.lora import is_lora
from groupwise.model.source import resolve_source
from groupwise.plugins import load_plugin
from groupwise.tasks.base import TaskRow
from groupwise.text import Say, excerpt, plural
from groupwise.training.update.teacher import Teacher

TEACHERS = "groupwise.teachers"
BUILTIN_TEACHERS = {"server": "groupwise.integrations.vllm.teacher:make_server_teacher"}
WITH_COLUMN = "{prompt}\n\nA correct answer, for reference:\n{COLUMN}\n\nNow answer in your own words."
NAME, BRACES = re.compile(r"\{(\w+)\}"), re.compile(r"(\{\{|\}\})")  # doubled braces are braces


def load_teacher(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    handle: ModelHandle,
    prompts: Sequence[Prompt],
    *,
    on_cpu: bool,
    compile: bool | None,
    say: Say,
) -> Teacher:
    """The teacher of a run with this ``model`` and these ``prompts``. on_cpu: its weights will be divided."""
    settings = recipe.distillation
    hub: dict[str, Any] = {"trust_remote_code": recipe.model.trust_remote_code, "revision": settings.revision}
    longest = max((len(prompt.teacher_ids or prompt.ids) for prompt in prompts), default=0)
    longest += recipe.sampling.max_new_tokens
    if settings.server is not None:
        make = load_plugin(TEACHERS, BUILTIN_TEACHERS, "server", "distillation.server")
        server = make(settings, tokenizer, recipe.model.source, longest, say)
        return Teacher(settings.server, "own", server=server)
    name = settings.teacher or ""
    if not settings.is_model:
        _check_window(handle, longest, settings)
        return Teacher(name, name)
    check_same_tokenizer(name, load_tokenizer(name, **hub), recipe.model.source, tokenizer)
    if _is_base(settings, recipe, model, handle):
        _check_window(handle, longest, settings)
        say(f"the teacher {name} is the model below the adapter: it takes no memory of its own")
        return Teacher(name, "base", adapted=model)
    device = resolve_device("cpu" if on_cpu else recipe.model.device)
    dtype = resolve_dtype(settings.dtype, resolve_device(recipe.model.device))
    teacher = load_model(name, dtype=dtype, device=device, **hub)
    teacher.requires_grad_(False)
    own = prepare(teacher, compile=compile, notice=lambda text: say(f"the teacher {name}: {text}"))
    check_vocabulary(name, own.vocabulary, recipe.model.source, tokenizer)
    _check_window(own, longest, settings)
    return Teacher(name, "own", handle=own)


def check_same_tokenizer(teacher: str, teachers: Any, model: str, own: Any) -> None:
    """Raise an error unless every token of the model has the same id in the teacher's vocabulary."""
    ids, theirs = own.get_vocab(), teachers.get_vocab()
    others = sorted((token for token, number in ids.items() if theirs.get(token) != number), key=ids.__getitem__)
    if others:
        token = others[0]
        other = f"is {theirs[token]}" if token in theirs else "does not exist"
        raise ConfigError(
            f"the teacher {teacher} has another tokenizer than the model {model}: {plural(len(others), 'token')} of "
            f"{len(ids):,} differ, the first, {token!r}, is {ids[token]} in the model and {other} in the teacher. "
            "Distillation compares the probabilities of tokens; choose a teacher with the model's tokenizer"
        )


def check_vocabulary(teacher: str, rows: int, model: str, tokenizer: Any) -> None:
    """Raise an error if the teacher's weights have no row for a token. More rows than tokens are padding."""
    last = max(tokenizer.get_vocab().values(), default=0)
    if last >= rows:
        raise ConfigError(
            f"the teacher {teacher} has embeddings of {rows:,} tokens, but the model {model} has a token {last:,}; its "
            "tokenizer has tokens that its weights were never given. Choose another teacher, or enlarge its embeddings "
            "(resize_token_embeddings)"
        )


def with_teacher_ids(
    prompts: Sequence[Prompt], rows: Sequence[TaskRow], builder: PromptBuilder, show: str, column: str
) -> list[Prompt]:
    """The prompts with what the teacher sees in their place, by distillation.show."""
    template = show if "{" in show else WITH_COLUMN.replace("COLUMN", show)
    columns = {name for row in rows for name in row}
    for name in NAME.findall(BRACES.sub(" ", template)):
        if name != "prompt" and name not in columns:
            near = did_you_mean(name, sorted(columns))
            raise ConfigError(
                f"distillation.show names the column {name!r}, which the rows do not have{near} (there are: "
                f"{', '.join(sorted(columns))}); to show braces, write {{{{ and }}}}"
            )
    if not rows:
        return list(prompts)
    shown = [{**row, column: _shown(template, row, column, where_of(row, number))} for number, row in enumerate(rows)]
    longer = copy.copy(builder)
    longer.max_prompt_length = None
    built = longer.build(shown, column)
    return [Prompt(prompt.ids, prompt.text, other.ids) for prompt, other in zip(prompts, built, strict=True)]


def longest_addition(prompts: Sequence[Prompt]) -> int:
    """By how many tokens a teacher's prompt is longer than the student's, at most."""
    return max((len(prompt.teacher_ids) - len(prompt.ids) for prompt in prompts if prompt.teacher_ids), default=0)


def _shown(template: str, row: Mapping[str, Any], column: str, where: str) -> Any:
    """The teacher's prompt of a row: a text, or messages of which the last one of the user is the template's."""
    prompt = row[column]
    if isinstance(prompt, str):
        return _fill(template, {**row, "prompt": prompt}, where)
    messages = as_messages(prompt)
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(f"{where}: there is no message of the user, in which distillation.show could be shown")
    text = _fill(template, {**row, "prompt": messages[last]["content"]}, where)
    return [*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :]]


def _fill(template: str, values: Mapping[str, Any], where: str) -> str:
    def text(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if not isinstance(value, (str, int, float)):
            raise DataError(
                f"{where}: distillation.show needs a text or a number in the column {match[1]!r}, not {excerpt(value)}"
            )
        return str(value)

    parts = BRACES.split(template)
    return "".join(part[0] if part in ("{{", "}}") else NAME.sub(text, part) for part in parts)


def _is_base(settings: DistillationSection, recipe: Recipe, model: Any, handle: ModelHandle) -> bool:
    """Whether the teacher is the model below the policy's adapter, in the same dtype."""
    if not is_lora(model) or settings.revision != recipe.model.revision:
        return False
    location = resolve_source(
        settings.teacher or "", trust_remote_code=recipe.model.trust_remote_code, revision=settings.revision
    )
    if settings.dtype != "auto" and resolve_dtype(settings.dtype, handle.device) != handle.dtype:
        return False
    return bool(handle.model.name_or_path == location.name)


def _check_window(handle: ModelHandle, longest: int, settings: DistillationSection) -> None:
    if handle.context_length is not None and longest > handle.context_length:
        shown = ", or show it less (distillation.show)" if settings.show is not None else ""
        raise ConfigError(
            f"the teacher's longest prompt has, with sampling.max_new_tokens, {longest} tokens, more than its window "
            f"of {handle.context_length}; lower sampling.max_new_tokens or data.max_prompt_length{shown}"
        )
