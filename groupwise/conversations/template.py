"""A chat template turn by turn: what the model is given before each of its turns, as tokens.

Sampled tokens are never encoded again. After a sampled turn, `TurnTemplate.given_after` has the tokens that the
template writes between this turn and the next one. Prompt, samples and given tokens together are the tokens of the
complete conversation in the template, provided that it does not change earlier turns when messages follow. A template
that does is replaced by one of this package that does not, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from groupwise.chat_template import TemplateError, render_chats
from groupwise.conversations.call_formats import TAGS
from groupwise.conversations.families import family_of
from groupwise.conversations.frames import (
    ANSWER,
    LATER,
    USER,
    FrameError,
    Message,
    contexts,
    is_open,
    prefix_problem,
    text_after,
    turn_frame,
)
from groupwise.conversations.special_tokens import SpecialTokens
from groupwise.conversations.tool_calls import call_id
from groupwise.data.prompts import RESERVED, as_messages
from groupwise.data.rows import check_message, check_prompt, check_text
from groupwise.errors import ConfigError, InputError
from groupwise.text import error_reason

REPLY_ROLES = ("user", "tool", "system")
REPLY = "ReplyZQX"  # a text that no template writes by itself


class TurnTemplate:
    """The chat template of a tokenizer, or ``chat_template``, for conversations of several turns.

    tools: schemas of tools, or Python functions, which the template shows to the model.
    template_kwargs: arguments of the template, such as ``{"enable_thinking": False}``.

    end_of_turn: ids that end a turn; stop_ids: these, and the tokenizer's end of text.
    opens_thinking: the generation prompt ends inside a block of thinking, so a sample begins in it.
    has_tool_role: tool messages are shown to the model. Otherwise give a tool's output as a user message.
    trims: the template trims what the assistant said. Sampled tokens keep their white space, so only a conversation
        that is rendered again by the template differs, and only in that.
    replaced: why the template was replaced by the one in ``chat_template``; None if it was not.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Any] = (),
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.template_kwargs = dict(template_kwargs or {})
        reserved = [name for name in (*RESERVED.split(), "tools", "chat_template") if name in self.template_kwargs]
        if reserved:
            raise ConfigError(f"template_kwargs may not set {', '.join(reserved)}; remove it")
        self.tokenizer = tokenizer
        self.tools = [_schema(tool) for tool in tools]
        original = _template_text(tokenizer, chat_template, self.tools)
        self.family = family_of(original)
        self.replaced: str | None = None
        self._special = SpecialTokens(tokenizer, original + "".join(self.family.templates()), TAGS)
        self.chat_template = original
        problem = self._problem()
        if problem is not None:
            self._replace(problem)
        if self.tools and self._render([[_user()]])[0] == self._render([[_user()]], tools=False)[0]:
            raise ConfigError(
                "the chat template does not show tools to the model; describe them in a system message, "
                "and leave tools out"
            )
        self.end_of_turn = tuple(self._special.ids[text] for text in self._end_tokens)
        end_of_text = getattr(tokenizer, "eos_token_id", None)
        self.stop_ids = tuple(dict.fromkeys([*self.end_of_turn, *([] if end_of_text is None else [end_of_text])]))
        self.opens_thinking = is_open(self._frame.opening)
        self.trims = self._trims()
        self._check_encoding()
        self._takes_role = {role: self._takes(role) for role in REPLY_ROLES}
        self.has_tool_role = self._takes_role["tool"] is None

    def prompt(self, messages: str | Sequence[Message]) -> list[int]:
        """The ids of a conversation, with the beginning of the assistant's turn."""
        check_prompt(messages, "the conversation", "prompt")
        hidden = [self._hide(message) for message in as_messages(messages)]
        return self._special.encode(self._render_hidden(hidden, add_generation_prompt=True))

    def conversation_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a complete conversation, in which the assistant's turns keep their white space."""
        for number, message in enumerate(messages, start=1):
            what = f"message {number} of the conversation"
            check_text(check_message(message, what), what, may_be_empty=True)
        hidden = [self._hide(message) for message in as_messages(messages)]
        for message in hidden:
            if message["role"] == "assistant" and message["content"]:
                message["content"] = self._special.keep_space(message["content"])
        return self._special.encode(self._render_hidden(hidden, add_generation_prompt=False))

    def given_after(self, reply_messages: Sequence[Message], ended_with_eos: bool) -> list[int]:
        """The ids between a sampled turn and the next one: the end of the turn, the replies, the next beginning.

        ended_with_eos: the sample ends with one of ``end_of_turn`` (see `ended`), which is then not given again.
        What looks like a special token in a reply, or like a tag of the template, is encoded as ordinary text.
        """
        replies = self._check_replies(reply_messages)
        hidden = self._special.hide(replies, all_tokens=True)
        text, reason = self._text_after(hidden)
        if text is None:
            raise InputError(f"the chat template cannot continue a conversation with these messages: {reason}")
        if ended_with_eos:
            return self._special.encode(text)[1:]
        return self._special.encode(self._frame.end.removesuffix(self._frame.end_token) + text)

    def turn_ids(self, message: Message, before: Sequence[Message], context: Sequence[int]) -> list[int]:
        """The ids of an assistant's message, as if it had been sampled, with its end.

        It follows the messages ``before``, whose ids, up to where the model speaks, are ``context``.
        """
        complete, start = self.conversation_ids([*before, message]), len(context)
        end = next((place for place in range(start, len(complete)) if complete[place] in self.end_of_turn), None)
        if end is None or complete[:start] != list(context):
            raise InputError("the chat template does not write this turn of the assistant after what came before it")
        return complete[start : end + 1]

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a sample ended its turn."""
        return bool(ids) and ids[-1] in self.end_of_turn

    def turn_text(self, ids: Sequence[int]) -> str:
        """The text of a sampled turn, without the token that ended it."""
        ids = list(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(ids, **options) if ids else ""
        return text

    def opens_thinking_after(self, ids: Sequence[int]) -> bool:
        """Whether a sample after the prompt or the given tokens ``ids`` begins inside a block of thinking."""
        return self.opens_thinking and self._opened(ids)

    def turn_message(self, ids: Sequence[int], before: Sequence[int] | None = None) -> dict[str, str]:
        """A sampled turn as a message, with the thinking that the generation prompt opened.

        before: the prompt or the given tokens before the turn. Some templates (DeepSeek-R1) open thinking after a
        question, but not after a tool's output.
        """
        opening = self._frame.opening if before is None or self._opened(before) else ""
        return {"role": "assistant", "content": opening + self.turn_text(ids).removeprefix(self._frame.lead)}

    def _opened(self, ids: Sequence[int]) -> bool:
        tail = self.turn_text(ids[-len(self._frame.opening) - 8 :])  # a token has a character, or is a part of one
        return tail.endswith(self._frame.opening)

    def _problem(self) -> str | None:
        """Why the present template cannot be used turn by turn; its frame is found on the way."""
        try:
            self._frame = turn_frame(self._render, self._special.first)
            self._end_tokens = self._end_of_turn_tokens()
            problem = prefix_problem(self._render, self._frame, thinks="</think>" in self.chat_template)
            return problem or self._later_replies_problem()
        except FrameError as error:
            return str(error)
        except TemplateError as error:
            if error.is_limit:
                raise ConfigError(f"the chat template {error}, so it was stopped; use another model") from error
            return f"it refuses an ordinary conversation ({error})"

    def _later_replies_problem(self) -> str | None:
        """Whether replies are written differently later in a conversation; None if they are not."""
        for role in ("user", "tool"):
            reply = {"role": role, "content": REPLY}
            for context in contexts([reply]):
                with suppress(FrameError, TemplateError):
                    first = text_after(self._render, self._end_tokens, context, [reply])
                    earlier = [*context, {**reply, "content": LATER}, *context[1:]]  # without its first question
                    if text_after(self._render, self._end_tokens, earlier, [reply]) != first:
                        return f"it writes {role} messages differently later in a conversation"
                    break
        return None

    def _replace(self, problem: str) -> None:
        """Take the first template of the family that writes the same prompts, and does not have the problem."""
        originals = self._sample_prompts()
        for template in self.family.templates():
            self.chat_template = template
            pairs = zip(self._sample_prompts(), originals, strict=True)
            if all(original in (None, prompt) for prompt, original in pairs) and self._problem() is None:
                self.replaced = f"the model's chat template was replaced for several turns: {problem}"
                return
        raise ConfigError(
            f"the chat template cannot be used for several turns: {problem}, so the model would be trained on other "
            "tokens than it is given later; set chat_template to one that writes earlier turns as they were"
        )

    def _sample_prompts(self) -> list[str | None]:
        """Prompts of different kinds, None where the template refuses one."""
        answer = {"role": "assistant", "content": ANSWER}
        output = {"role": "tool", "content": REPLY, "tool_call_id": call_id(0)}
        chats = [
            [_user()],
            [_user(f" {USER}\n")],
            [{"role": "system", "content": REPLY}, _user()],
            [_user(), answer, output, output],
        ]
        if not self.tools:  # some templates move the tools to the last question
            chats.append([_user(), answer, _user(LATER)])
        prompts: list[str | None] = []
        for chat in chats:
            try:
                prompts += self._render([chat])
            except TemplateError:
                prompts.append(None)
        return prompts

    def _check_encoding(self) -> None:
        """Raise a ConfigError unless texts are encoded as the tokenizer does, which may have code of its own."""
        (prompt,) = self._render([[_user()]], tools=False)  # with nothing hidden in it
        expected = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        after, _ = self._text_after([_user(LATER)])
        begins = self._special.encode(after or "")[:1]
        if self._special.encode(prompt) != expected or begins != [self.end_of_turn[0]]:
            raise ConfigError(
                f"the tokenizer, a {type(self.tokenizer).__name__}, does not encode texts as its tokenizer.json says, "
                "so pieces of a conversation cannot be joined; use another model"
            )

    def _end_of_turn_tokens(self) -> tuple[str, ...]:
        """Llama 3.1 ends a turn that calls a built-in tool with another token."""
        others = [text for text in ("<|eom_id|>",) if text in self.chat_template and text in self._special.ids]
        return tuple(dict.fromkeys([self._frame.end_token, *others]))

    def _trims(self) -> bool:
        spaced = {"role": "assistant", "content": f"{self._frame.opening} {ANSWER} "}
        return f" {ANSWER} {self._frame.end}" not in self._render([[_user(), spaced]])[0]

    def _takes(self, role: str) -> str | None:
        """Why the template does not show a message with this role after a turn; None if it does."""
        text, reason = self._text_after([{"role": role, "content": REPLY}])
        if text is not None and REPLY not in text:
            return f"it does not show messages with the role {role!r}"
        return reason

    def _text_after(self, replies: Sequence[Message]) -> tuple[str | None, str | None]:
        """What the template writes from the end of a turn on, or why it does not."""
        reason = None
        likely = contexts(replies)
        for context in (*likely, likely[-1]):  # the last one twice: the template may write a date, and midnight passed
            try:
                return text_after(self._render, self._end_tokens, context, replies), None
            except (FrameError, TemplateError) as error:
                reason = error_reason(error)
        return None, reason

    def _check_replies(self, replies: Sequence[Message]) -> list[dict[str, Any]]:
        if isinstance(replies, (str, Mapping)) or not replies:
            raise InputError('replies must be messages such as [{"role": "tool", "content": "…"}], at least one')
        for number, reply in enumerate(replies, start=1):
            check_message(reply, f"message {number} after the turn")
            role = reply["role"]
            if role not in REPLY_ROLES:
                raise InputError(f"message {number} after the turn has the role {role!r}; the assistant's are sampled")
            reason = self._takes_role[role]
            if reason is not None:
                remedy = "; give a tool's output as a user message" if role == "tool" else ""
                raise InputError(f"the chat template takes no {role} messages after a turn: {reason}{remedy}")
        return as_messages(replies)

    def _hide(self, message: Message) -> dict[str, Any]:
        hidden: dict[str, Any] = self._special.hide(message, all_tokens=message["role"] == "tool")
        return hidden

    def _render_hidden(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            return self._render([messages], add_generation_prompt=add_generation_prompt)[0]
        except TemplateError as error:
            raise InputError(f"the chat template rejects this conversation: {error}") from error

    def _render(
        self, chats: Sequence[Sequence[Message]], *, add_generation_prompt: bool = True, tools: bool = True
    ) -> list[str]:
        return render_chats(
            self.tokenizer,
            [list(chat) for chat in chats],
            chat_template=self.chat_template,
            tools=self._special.hide(self.tools) if self.tools and tools else None,
            add_generation_prompt=add_generation_prompt,
            **self.template_kwargs,
        )


def _template_text(tokenizer: Any, chat_template: str | None, tools: Sequence[Any]) -> str:
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "the tokenizer has no chat template; set chat_template, use a model with one, or use PlainTextTemplate"
        )
    try:
        template: str = tokenizer.get_chat_template(chat_template, list(tools) or None)
    except Exception as error:  # several templates without a default, or one that is no text
        raise ConfigError(f"the chat template cannot be read: {error_reason(error)}") from error
    return template


def _schema(tool: Any) -> Any:
    """The description of a tool; one that is a Python function is described by its signature and docstring."""
    from transformers.utils.chat_template_utils import get_json_schema

    if isinstance(tool, Mapping):
        return dict(tool)
    try:
        return get_json_schema(tool)
    except Exception as error:  # no function, or one without type hints or a docstring
        raise ConfigError(f"a tool is a JSON schema, or a function with type hints and a docstring: {error}") from error


def _user(content: str = USER) -> dict[str, str]:
    return {"role": "user", "content": content}
