"""Special tokens only where the chat template wrote them.

A tokenizer turns the text ``<|im_start|>`` into the token that opens a turn, whoever wrote it: a template, a user or a
web page that a tool has read. Here these texts are hidden in messages before the template is rendered, so that what is
found in its output is the template's own. Then the template's own become names that only a copy of the tokenizer
knows, and the hidden texts are put back. The copy encodes the complete text at once, so everything else about the
tokenizer stays as it is: tokens that span a message and the template's text around it, normalisation, white space that
a special token takes away.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from groupwise.errors import ConfigError
from groupwise.text import error_reason

# Private-use characters: no normaliser changes them, and no template writes them.
HIDDEN, NAMED, GUARD, END = "\ue010", "\ue011", "\ue012", "\ue013"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MARKUP = re.compile(r"<\S+>|\[\S+\]")


class SpecialTokens:
    """Hides special tokens in messages, and encodes what a template makes of them.

    Special are the tokenizer's special tokens, and added tokens that look like markup and that the template writes;
    they are hidden in all messages. ``explained`` are those of them that a prompt may explain to the model, such as
    ``<think>``: they are hidden only in what tools and environments say (``all_tokens=True``).
    """

    def __init__(self, tokenizer: Any, template: str, explained: frozenset[str] = frozenset()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "to_str"):
            raise ConfigError(
                f"conversations of several turns need a tokenizer of the tokenizers library, got a "
                f"{type(tokenizer).__name__}, which cannot encode a message without special tokens; use a model whose "
                "folder has a tokenizer.json"
            )
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values() if token.content}
        named = {text for text, is_special in added.items() if is_special or text in tokenizer.all_special_tokens}
        markup = {text for text in added if _MARKUP.fullmatch(text) and (text in template or text in explained)}
        special = named | (markup - explained)
        texts = sorted(named | markup, key=lambda text: (-len(text), text))
        self.ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        """The id of each added token."""
        nonce = str(secrets.randbelow(10**12))  # nobody outside can write a name
        self._hidden = {text: f"{HIDDEN}{nonce}x{number}{END}" for number, text in enumerate(texts)}
        self._named = {text: f"{NAMED}{nonce}x{number}{END}" for number, text in enumerate(texts)}
        self._guard = f"{GUARD}{nonce}{END}"
        self._is_guard = re.compile(f"{_or_escaped(GUARD)}{nonce}{_or_escaped(END)}")
        self._special = _any_of(text for text in texts if text in special)
        self._all = _any_of(texts)
        self._is_hidden = re.compile(f"{_or_escaped(HIDDEN)}{nonce}x([0-9]+){_or_escaped(END)}")
        self._texts = texts
        self._beginnings = {text[:length] for text in texts for length in range(1, len(text))}
        self._endings = {text[length:] for text in texts for length in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)
        self._backend, self._renamed = _with_other_names(backend, self._named, self.ids)

    def hide(self, value: Any, *, all_tokens: bool = False) -> Any:
        """A message, a list of messages or any other value of them, with special tokens hidden in all its texts."""
        pattern = self._all if all_tokens else self._special

        def hidden(part: Any) -> Any:
            if isinstance(part, str):
                return self._guarded(pattern.sub(lambda match: self._hidden[match[0]], part))
            if isinstance(part, Mapping):
                return {hidden(key): entry if _is_role(key, entry) else hidden(entry) for key, entry in part.items()}
            return [hidden(entry) for entry in part] if isinstance(part, (list, tuple)) else part

        return hidden(value)

    def keep_space(self, text: str) -> str:
        """The text, such that a template cannot trim it."""
        return f"{self._guard}{text}{self._guard}"

    def show(self, text: str) -> str:
        """A rendered text as it is read: with the hidden texts."""
        return self._is_hidden.sub(lambda match: self._texts[int(match[1])], self._is_guard.sub("", text))

    def first(self, text: str, start: int = 0) -> tuple[int, int] | None:
        """Where the first special token that the template wrote is, after ``start``."""
        match = self._all.search(text, start)
        return None if match is None else match.span()

    def encode(self, text: str) -> list[int]:
        """The ids of a text that a template made of hidden messages.

        Lone surrogates, which tools may return, but no tokenizer takes, become U+FFFD.
        """
        named = self._all.sub(lambda match: self._named[match[0]], text)
        ids: list[int] = self._backend.encode(
            _LONE_SURROGATE.sub("\ufffd", self.show(named)), add_special_tokens=False
        ).ids
        return [self._renamed.get(token, token) for token in ids]

    def _guarded(self, text: str) -> str:
        """The text, with a guard where it could form a special token together with what comes before or after it."""
        lengths = range(1, min(len(text), self._longest) + 1)
        before = any(text[:length] in self._endings for length in lengths)
        after = any(text[-length:] in self._beginnings for length in lengths)
        return f"{self._guard if before else ''}{text}{self._guard if after else ''}"


def _or_escaped(character: str) -> str:
    """A pattern of the character; a template may also write it as JSON in ASCII."""
    return rf"(?:{character}|\\u{ord(character):04x})"


def _is_role(key: Any, value: Any) -> bool:
    """Roles stay as they are: templates compare them, and some make special tokens of them, as in ``<|user|>``."""
    return key == "role" and isinstance(value, str) and value.isidentifier()


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """The longest of the texts at a place, as the tokenizer matches its added tokens.

    Their common beginnings are matched once: some tokenizers have thousands of unused special tokens.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}  # a text ends here
    return re.compile(_pattern(tree) if tree else r"(?!)")


def _pattern(node: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _pattern(rest) for character, rest in sorted(node.items()) if character]
    if not branches:
        return ""
    return branches[0] if len(node) == 1 else f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _with_other_names(backend: Any, names: Mapping[str, str], ids: Mapping[str, int]) -> tuple[Any, dict[int, int]]:
    """A copy of a tokenizer whose special tokens have other texts, and their ids in the copy that differ."""
    from tokenizers import Tokenizer

    parts = json.loads(backend.to_str())
    parts["truncation"] = parts["padding"] = parts["post_processor"] = None
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = parts["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, Mapping):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    try:
        copy = Tokenizer.from_str(json.dumps(parts))
    except Exception as error:  # of the tokenizers library, which has no classes of errors
        raise ConfigError(f"the tokenizer cannot be copied: {error_reason(error)}; use another model") from error
    there = {copy.token_to_id(names.get(text, text)): number for text, number in ids.items()}
    return copy, {number: original for number, original in there.items() if number is not None}
