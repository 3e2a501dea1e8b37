"""Prompt, sampled turns and given tokens are the tokens of the complete conversation in the template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from groupwise.conversations import Conversation, TurnTemplate, family_of
from groupwise.conversations.examples import example_tokens
from groupwise.conversations.formats import ChatFormat
from groupwise.errors import ConfigError, GroupwiseError, InputError
from groupwise.model.tiny import tiny_tokenizer
from tests.conversations.families import BY_NAME, FAMILIES, SEARCH, ModelFamily
from tests.fuzz import accepted
from tests.fuzz.texts import broken_text

MADE: dict[tuple[str, bool], TurnTemplate] = {}


def template_of(family: ModelFamily, *, tools: bool = False) -> TurnTemplate:
    key = (family.name, tools)
    if key not in MADE:
        MADE[key] = TurnTemplate(family.tokenizer(), [SEARCH] if tools else (), template_kwargs=family.kwargs)
    return MADE[key]


def spans_of(template: TurnTemplate, messages: list[dict[str, Any]]) -> tuple[list[int], list[tuple[int, int]]]:
    """The ids of a conversation as transformers has them, and the first and last token of each assistant's turn.

    A turn is what the template adds to the generation prompt, up to the token that ends it.
    """
    options = {"chat_template": template.chat_template, "tools": template.tools or None, **template.template_kwargs}
    apply = template.tokenizer.apply_chat_template
    text = apply(messages, tokenize=False, **options)
    encoded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = apply(messages[:number], tokenize=False, add_generation_prompt=True, **options)
            assert text.startswith(before)
            written = apply(messages[: number + 1], tokenize=False, **options)[len(before) :]
            token = template.tokenizer.convert_ids_to_tokens(template.end_of_turn[0])
            stop = len(before) + written.rindex(token) + len(token)
            inside = [
                place for place, (start, end) in enumerate(encoded["offset_mapping"]) if len(before) <= start < stop
            ]
            spans.append((inside[0], inside[-1] + 1))
            # A token that is partly inside could not have been sampled.
            assert all(end <= len(before) or start >= len(before) for start, end in encoded["offset_mapping"])
    return encoded["input_ids"], spans


WORDS = st.sampled_from(
    ["the", "weather", "in Paris", "42", "{", "}", "<", ">", "|", "[/", "]", "ß", "日本", "🙂", "\n", "\n\n", '"', "'",
     "think", "im_end", "answer.", "  ", "\t", "\\", "<b>", "$x^2$", "\u200d", "e\u0301"]
)  # fmt: skip
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map(" ".join).filter(str.strip)
ANSWERS = TEXTS.map(lambda text: f"So {text} ok")  # no white space at its ends, and tokens of its own


@st.composite
def conversations(draw: st.DrawFn, family: ModelFamily, tools: bool, opening: str) -> list[dict[str, Any]]:
    """Messages as the family writes them, which end with the assistant's."""
    messages: list[dict[str, Any]] = []
    if family.system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(ANSWERS)})
    messages.append({"role": "user", "content": draw(TEXTS)})
    turns = draw(st.integers(1, 3))
    for number in range(turns):
        answer = draw(ANSWERS)
        after_tool = messages[-1]["role"] == "tool"
        if opening == "<think>\n":
            if not after_tool:  # the model goes on where the outputs end
                answer = f"{opening}{draw(ANSWERS)}\n</think>\n\n{answer}"
        elif opening:
            answer = opening + answer
        elif family.thinking and draw(st.booleans()):
            answer = f"<think>\n{draw(ANSWERS)}\n</think>\n\n{answer}"
        turn: dict[str, Any] = {"role": "assistant", "content": answer}
        messages.append(turn)
        if number + 1 == turns:
            break
        if family.tool_role and draw(st.booleans()):
            count = draw(st.integers(1, max(1, family.calls)))
            ids = [f"call{number}{place:04}" for place in range(count)]
            if family.calls and tools:
                turn["tool_calls"] = [
                    {"id": key, "type": "function", "function": {"name": "search", "arguments": {"query": draw(TEXTS)}}}
                    for key in ids
                ]
                if family.family in ("llama3", "mistral"):  # calls are the complete turn
                    turn["content"] = ""
            messages += [{"role": "tool", "tool_call_id": key, "name": "search", "content": draw(TEXTS)} for key in ids]
        else:
            messages.append({"role": "user", "content": draw(TEXTS)})
    return messages


@pytest.mark.parametrize("tools", [False, True], ids=["", "tools"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
@given(data=st.data())
def test_the_pieces_are_the_complete_conversation(family: ModelFamily, tools: bool, data: st.DataObject):
    if tools and not family.shows_tools:
        return
    template = template_of(family, tools=tools)
    messages = data.draw(conversations(family, tools, template._frame.opening))
    ids, spans = spans_of(template, messages)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    conversation = Conversation(template.prompt(messages[: turns[0]]))
    for place, (turn, (start, end)) in enumerate(zip(turns, spans, strict=True)):
        assert conversation.ids == ids[:start]
        conversation.add_sampled(ids[start:end])
        assert template.ended(ids[start:end])
        if place + 1 < len(turns):
            conversation.add_given(template.given_after(messages[turn + 1 : turns[place + 1]], True))
    assert conversation.ids == ids[: spans[-1][1]]
    assert conversation.completion_mask == [
        any(start <= place < end for start, end in spans) for place in range(spans[0][0], spans[-1][1])
    ]
    assert template.conversation_ids(messages) == ids
    example = example_tokens(ChatFormat(template), messages[: turns[0]], messages[turns[0] : turns[-1] + 1])
    assert example.ids.tolist() == conversation.completion_ids
    assert example.sampled.tolist() == conversation.completion_mask


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_each_family_is_recognised(family: ModelFamily):
    template = template_of(family)
    assert template.family.name == family.family
    assert template.tokenizer.convert_ids_to_tokens(list(template.end_of_turn))[0] == family.end
    assert (template.replaced is not None) == family.is_replaced
    assert template.has_tool_role == family.tool_role
    assert template.trims == family.trims
    assert template.opens_thinking == (family.name == "deepseek_r1")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.is_replaced], ids=str)
def test_a_replaced_template_writes_the_same_prompts(family: ModelFamily):
    tools = [SEARCH] if family.shows_tools else ()
    template = TurnTemplate(family.tokenizer(), tools, template_kwargs=family.kwargs)
    assert template.replaced is not None
    assert template.chat_template != family.chat_template
    for messages in (
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hello\n"}],
    ):
        expected = template.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tools=list(tools) or None, **family.kwargs
        )["input_ids"]
        assert template.prompt(messages) == expected


def test_tokens_between_two_turns_of_chatml_by_hand():
    template = template_of(BY_NAME["chatml"])

    def encode(text: str) -> list[int]:
        return template.tokenizer(text, add_special_tokens=False)["input_ids"]

    end = template.tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = encode("\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n")
    reply = [{"role": "user", "content": "More?"}]
    assert template.given_after(reply, True) == expected
    assert template.given_after(reply, False) == [end, *expected]
    assert template.end_of_turn == (end,)
    assert template.turn_text([*encode("Hi there"), end]) == "Hi there"
    assert template.turn_message(encode("Hi")) == {"role": "assistant", "content": "Hi"}
    assert template.ended([end])
    assert not template.ended(encode("Hi"))
    assert not template.ended([])


def test_a_sample_that_was_cut_off_gets_the_end_of_its_turn():
    template = template_of(BY_NAME["mistral"])
    ended, cut = (template.given_after([{"role": "user", "content": "a"}], ended) for ended in (True, False))
    assert cut == [template.tokenizer.eos_token_id, *ended]


def test_a_turn_that_the_prompt_began_is_written_with_its_beginning():
    template = template_of(BY_NAME["deepseek_r1"])
    ids = template.tokenizer("Hm.\n</think>\n\n4", add_special_tokens=False)["input_ids"]
    assert template.opens_thinking
    assert template.turn_text(ids) == "Hm.\n</think>\n\n4"
    assert template.turn_message(ids)["content"] == "<think>\nHm.\n</think>\n\n4"
    prompt = template.prompt("2 + 2?")
    assert template.opens_thinking_after(prompt)
    assert template.turn_message(ids, prompt)["content"] == "<think>\nHm.\n</think>\n\n4"
    given = template.given_after([{"role": "tool", "content": "4"}], True)
    assert not template.opens_thinking_after(given)
    assert template.turn_message(ids, given)["content"] == "Hm.\n</think>\n\n4"
    assert not template_of(BY_NAME["chatml"]).opens_thinking_after(prompt)


def test_white_space_of_turns_where_the_template_trims():
    template = template_of(BY_NAME["llama3"])
    messages = [{"role": "user", "content": " a "}, {"role": "assistant", "content": " b\n"}]
    ids = template.conversation_ids(messages)
    header = "<|start_header_id|>assistant<|end_header_id|>"
    assert template.tokenizer.decode(ids).endswith(f"\n\na<|eot_id|>{header}\n\n b\n<|eot_id|>")
    asked = [*messages, {"role": "user", "content": "c"}]  # what a row says of earlier turns is the template's to trim
    expected = template.tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    assert template.prompt(asked) == expected


def test_llama_ends_a_call_of_a_built_in_tool_with_another_token():
    template = template_of(BY_NAME["llama3"])
    tokens = template.tokenizer.convert_ids_to_tokens(list(template.end_of_turn))
    assert tokens == ["<|eot_id|>", "<|eom_id|>"]
    built_in = TurnTemplate(BY_NAME["llama3"].tokenizer(), template_kwargs={"builtin_tools": ["search"]})
    given = built_in.given_after([{"role": "tool", "content": "x"}], False)
    assert built_in.tokenizer.convert_ids_to_tokens(given[0]) == "<|eom_id|>"


def test_two_outputs_where_a_turn_has_one_call():
    template = template_of(BY_NAME["llama3"])
    given = template.given_after([{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}], True)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    outputs = "".join(f'{header.format("ipython")}"{text}"<|eot_id|>' for text in "ab")
    assert template.tokenizer.decode(given) == outputs + header.format("assistant")


def test_end_of_text_stops_a_sample_but_does_not_end_its_turn():
    template = template_of(BY_NAME["phi4"])
    text, turn = (template.tokenizer.convert_tokens_to_ids(name) for name in ("<|endoftext|>", "<|im_end|>"))
    assert template.stop_ids == (turn, text)
    assert not template.ended([text])


BROKEN = {
    "drops turns": (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}{{ '<|im_start|>' + m.role + '\n' + m.content "
        "+ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "writes an assistant's turn differently",
    ),
    "counts": (
        "{{ messages | length }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "generation prompt|before the first turn",
    ),
    "last system": (
        "{% for m in messages %}{% if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "moves the system message",
    ),
    "lower case": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content | lower) + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "does not write what the assistant said",
    ),
    "no end": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "no special token at the end",
    ),
    "refuses": ("{{ raise_exception('no assistants') }}", "no assistants"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_template_that_changes_earlier_turns_is_refused(template, problem, monkeypatch):
    monkeypatch.setattr("groupwise.chat_template.SECONDS", 0.3)
    with pytest.raises(ConfigError, match=problem):
        TurnTemplate(BY_NAME["chatml"].tokenizer(), chat_template=template)


def test_tools_that_move_to_the_last_question_are_refused():
    """As in Mistral's templates, in which the last question is found by comparing messages."""
    template = BY_NAME["chatml"].chat_template.replace(
        "message.content",
        "(tools | tojson if tools and message == (messages | selectattr('role', 'equalto', 'user') | list)[-1] else '')"
        " + message.content",
    )
    TurnTemplate(BY_NAME["chatml"].tokenizer(), chat_template=template)
    with pytest.raises(ConfigError, match="moves the tools"):
        TurnTemplate(BY_NAME["chatml"].tokenizer(), [SEARCH], chat_template=template)


def test_replies_that_are_written_differently_later_are_refused():
    """As DeepSeek-R1 does, of which only the first group of tool outputs is opened."""
    template = BY_NAME["chatml"].chat_template.replace(
        "message.content", "('first ' if loop.index0 == 2 else '') + message.content"
    )
    with pytest.raises(ConfigError, match="user messages differently later"):
        TurnTemplate(BY_NAME["chatml"].tokenizer(), chat_template=template)


def test_tools_that_the_template_does_not_show_are_refused():
    with pytest.raises(ConfigError, match="does not show tools"):
        TurnTemplate(BY_NAME["gemma"].tokenizer(), [SEARCH])


def test_a_tool_may_be_a_function():
    def search(query: str) -> str:
        """Look something up.

        Args:
            query: What to look up.
        """
        return query

    template = TurnTemplate(BY_NAME["qwen2_5"].tokenizer(), [search])
    assert "What to look up." in template.tokenizer.decode(template.prompt("Hello"))
    with pytest.raises(ConfigError, match="type hints and a docstring"):
        TurnTemplate(BY_NAME["qwen2_5"].tokenizer(), [lambda query: query])


@pytest.mark.parametrize(
    ("replies", "problem"),
    [
        ([], "at least one"),
        ("hello", "must be messages"),
        ([{"role": "assistant", "content": "a"}], "the assistant's are sampled"),
        ([{"role": "user"}], "no 'content'"),
        ([{"role": "bot", "content": "a"}], "unknown role"),
        ([{"role": "user", "content": 3}], "of type int"),
        (["a"], "of type str"),
    ],
)
def test_invalid_replies(replies, problem):
    with pytest.raises(GroupwiseError, match=problem):
        template_of(BY_NAME["chatml"]).given_after(replies, True)


def test_a_tool_message_where_the_template_has_none():
    for name in ("gemma", "phi3"):  # the one refuses it, the other would leave it out
        with pytest.raises(InputError, match=r"takes no tool messages after a turn.*as a user message"):
            template_of(BY_NAME[name]).given_after([{"role": "tool", "content": "42"}], True)
        assert template_of(BY_NAME[name]).given_after([{"role": "user", "content": "42"}], True)


def test_roles_that_may_not_follow_each_other():
    with pytest.raises(InputError, match="must alternate"):
        template_of(BY_NAME["gemma"]).given_after([{"role": "user", "content": "a"}] * 2, True)
    with pytest.raises(InputError, match="must alternate"):
        template_of(BY_NAME["gemma"]).prompt([{"role": "user", "content": "a"}] * 2)


def test_a_tool_output_may_have_a_lone_surrogate():
    template = template_of(BY_NAME["chatml"])
    given = template.given_after([{"role": "tool", "content": "a\ud800b"}], True)
    assert "a\ufffdb" in template.tokenizer.decode(given)
    broken = {**SEARCH, "function": {**SEARCH["function"], "description": "\ud800"}}
    assert TurnTemplate(BY_NAME["qwen2_5"].tokenizer(), [broken]).prompt("a")


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral"])
@given(text=broken_text(), call=broken_text(3) | st.integers(), ended=st.booleans())
def test_any_text_of_a_tool(name: str, text: str, call: Any, ended: bool):
    template = template_of(BY_NAME[name])
    messages = [{"role": "tool", "content": text, "tool_call_id": call, "name": call}]
    ids = accepted("what tools say", lambda: template.given_after(messages, ended))
    assert ids is None or (ids[0] == template.end_of_turn[0]) != ended
    assert template.given_after([{"role": "tool", "content": text}], ended)


def test_settings_that_are_the_classs_own():
    with pytest.raises(ConfigError, match="may not set add_generation_prompt"):
        TurnTemplate(tiny_tokenizer(), template_kwargs={"add_generation_prompt": False})


def test_a_tokenizer_without_a_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="PlainTextTemplate"):
        TurnTemplate(tokenizer)


def test_a_tokenizer_with_code_of_its_own():
    class Lower(PreTrainedTokenizerFast):
        def __call__(self, text, **options):
            return super().__call__(text.lower(), **options)

    tokenizer = Lower(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="<|end|>")
    with pytest.raises(ConfigError, match="a Lower, does not encode texts"):
        TurnTemplate(tokenizer, chat_template=tiny_tokenizer().chat_template)


def test_a_family_that_is_not_known():
    assert family_of("{{ messages }}").name == "unknown"


def test_the_tiny_model():
    template = TurnTemplate(tiny_tokenizer())
    assert (
        template.prompt("hi")
        == template.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)[
            "input_ids"
        ]
    )
    assert template.end_of_turn == (258,)
