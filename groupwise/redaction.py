"""Secret values: which settings hold one, how code gets its value, and how it is kept out of everything that is shown.

A setting is secret by its name (``api_key``, ``hub_token``, ``password``) or because its text is a URL with a password
or a key in it. A recipe holds such a value as a `Secret`, which shows only ``***``; a table ``{ env = "NAME" }`` names
the environment variable with the value instead, and is no secret itself. `hide_secrets` replaces known values in texts
that come from elsewhere, such as the message of an exception.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import quote, quote_plus

from groupwise.errors import ConfigError

HIDDEN = "***"
MIN_LENGTH = 6  # characters of a value that is replaced in texts; a shorter one may be a part of any word
MIN_VARIABLE_LENGTH = 12  # the same for environment variables that no recipe names
FOLDERS = {"PWD", "OLDPWD"}  # variables of the shell that look like passwords by their names

_known: set[str] = set()

# A name is split into words: OPENAI_API_KEY, X-Api-Key and apiKey end with "api key".
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = {
    "authorization", "bearer", "cookie", "cookies", "credential", "credentials", "passphrase", "passwd", "password",
    "passwords", "pwd", "secret", "secrets", "webhook",
    "accesskey", "accesstoken", "apikey", "apitoken", "authtoken", "privatekey", "secretkey",
}  # fmt: skip
# Words before "key" that make it a key to something; a bare "key" is usually the name of a column.
_KEYS = {
    "access", "account", "admin", "anthropic", "api", "auth", "azure", "client", "encryption", "google", "hf",
    "huggingface", "judge", "master", "openai", "private", "secret", "server", "service", "shared", "signing", "ssh",
    "subscription", "wandb",
}  # fmt: skip
# Words before "token" that make it a piece of text.
_TEXT_TOKENS = {
    "answer", "begin", "bos", "cls", "close", "closing", "delimiter", "end", "eos", "eot", "fill", "final", "first",
    "im", "image", "last", "mask", "new", "next", "open", "opening", "pad", "padding", "per", "prompt", "reasoning",
    "response", "sep", "separator", "special", "start", "stop", "target", "think", "thinking", "thought", "unk",
    "unknown", "word",
}  # fmt: skip
# Last words of a name that is about a secret but does not hold one, such as api_key_env.
_NOT_THE_VALUE = {"column", "count", "env", "field", "file", "folder", "length", "name", "path", "var", "variable"}

# The user's name and password of a URL, and its parameters.
_USER = re.compile(r"([A-Za-z0-9+.-]://)([^/\s@'\"<>]+)@")
_PARAMETER = re.compile(r"([?&]([A-Za-z0-9_.-]{1,60})=)([^&#\s'\"<>]+)")
_URL_PARAMETERS = {"key", "sig", "signature"}


class Secret:
    """A secret value. Its text, in messages and files too, is ``***``; `reveal` has the value."""

    __slots__ = ("_shown", "_value")

    def __init__(self, value: str, shown: str = HIDDEN) -> None:
        self._value, self._shown = value, shown
        if value != shown:
            remember_secret(value)
            for part in (*(match[2] for match in _USER.finditer(value)), *(m[3] for m in _PARAMETER.finditer(value))):
                remember_secret(part.rpartition(":")[2])

    def reveal(self) -> str:
        """The value, for the code that needs it."""
        return self._value

    @property
    def shown(self) -> str:
        """What is written in its place: ``***``, or a URL with ``***`` in it."""
        return self._shown

    def __repr__(self) -> str:
        return repr(self._shown)

    def __str__(self) -> str:
        return self._shown

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a setting, a header, a URL's parameter or an environment variable of this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name[:200])]
    if not words or words[-1] in _NOT_THE_VALUE:
        return False
    if _SECRET_WORDS.intersection(words) or words[-1] == "auth":
        return True
    pairs = set(pairwise(words))
    if any(last in ("key", "keys") and first in _KEYS for first, last in pairs) or ("connection", "string") in pairs:
        return True
    return words[-1] == "token" and (len(words) == 1 or words[-2] not in _TEXT_TOKENS)


def remember_secret(value: str) -> None:
    """Let `hide_secrets` replace a value from now on, also as URLs, JSON and Python write it."""
    for text in (value, *value.splitlines()):
        if len(text.strip()) >= MIN_LENGTH:
            _known.update(_spellings(text.strip()))


@lru_cache(maxsize=1024)
def _spellings(value: str) -> tuple[str, ...]:
    encodable = value.encode("utf-8", "replace").decode()
    return tuple(dict.fromkeys((value, repr(value)[1:-1], quote(encodable, safe=""), quote_plus(encodable))))


def hide_secrets(text: str) -> str:
    """The text with ``***`` in place of known secrets, of secret environment variables, and of passwords in URLs."""
    secrets = [secret for secret in _known if secret in text]
    for name, value in os.environ.items():
        if len(value) >= MIN_VARIABLE_LENGTH and name not in FOLDERS and is_secret_name(name):
            secrets += [spelling for spelling in _spellings(value) if spelling in text]
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, HIDDEN)
    return _hide_in_urls(text)


def _hide_in_urls(text: str) -> str:
    if "@" in text and "://" in text:
        text = _USER.sub(rf"\1{HIDDEN}@", text)
    if "=" in text:
        text = _PARAMETER.sub(_hidden_parameter, text)
    return text


def _hidden_parameter(match: re.Match[str]) -> str:
    name = match[2]
    return f"{match[1]}{HIDDEN}" if name.lower() in _URL_PARAMETERS or is_secret_name(name) else match[0]


def is_reference(value: object) -> bool:
    """Whether a value is ``{ env = "NAME" }``."""
    return isinstance(value, Mapping) and set(value) == {"env"}


def hold_secrets(value: Any, name: str = "") -> Any:
    """A setting's value, tables and lists included, with every secret text in it as a `Secret`."""
    if is_reference(value):
        return value
    if isinstance(value, Mapping):
        return {key: hold_secrets(entry, name if is_secret_name(name) else str(key)) for key, entry in value.items()}
    if isinstance(value, list):
        return [hold_secrets(entry, name) for entry in value]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return value
    if is_secret_name(name) and value != "":
        return Secret(str(value))
    if not isinstance(value, str):
        return value
    shown = _hide_in_urls(value)
    is_hidden = f"://{HIDDEN}@" in value or (f"={HIDDEN}" in value and "://" in value)  # read from a recipe.json
    return Secret(value, shown) if shown != value or is_hidden else value


def without_secrets(value: Any, name: str = "") -> Any:
    """A setting's value for files and messages: every secret in it is replaced by ``***``."""
    if isinstance(value, Secret):
        return value.shown
    if is_reference(value):
        return value
    if isinstance(value, Mapping):
        return {key: without_secrets(entry, name if is_secret_name(name) else str(key)) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(entry, name) for entry in value]
    held = hold_secrets(value, name)
    return held.shown if isinstance(held, Secret) else value


def resolve_secrets(value: Any, place: str) -> Any:
    """A setting's value for the code that uses it: secrets as plain texts, environment variables read.

    ``place`` names the setting in the error about a missing variable, or about a value that a run's recipe.json does
    not have.
    """
    if isinstance(value, Secret):
        if HIDDEN in value.reveal() and value.reveal() == value.shown:  # read from a recipe.json
            raise ConfigError(
                f"the value of {place} is not here: a run's recipe.json does not keep secrets. Use the recipe that the "
                f"run was started with, or give the value: --{place} '{{env = \"NAME\"}}' takes it from the "
                "environment variable NAME"
            )
        return value.reveal()
    if is_reference(value):
        return _from_environment(value["env"], place)
    if isinstance(value, Mapping):
        return {key: resolve_secrets(entry, f"{place}.{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [resolve_secrets(entry, f"{place}.{number}") for number, entry in enumerate(value)]
    return value


def literal_secrets(value: Any, place: str) -> Iterator[str]:
    """The names of the settings that hold a secret itself, not the name of an environment variable."""
    if isinstance(value, Secret):
        yield place
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from literal_secrets(entry, f"{place}.{key}")
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from literal_secrets(entry, f"{place}.{number}")


def _from_environment(variable: object, place: str) -> str:
    if not isinstance(variable, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
        # The value is not repeated, in case it is the secret itself.
        raise ConfigError(
            f'{place} must name an environment variable, as in {{ env = "OPENAI_API_KEY" }}, and not hold the value'
        )
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ConfigError(f"{place}: the environment variable {variable} is not set; set it to the value")
    remember_secret(value)
    return value
