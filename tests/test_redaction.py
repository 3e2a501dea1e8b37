"""Which settings are secret, and that their values are shown nowhere."""

from __future__ import annotations

import copy
import json

import pytest

from groupwise.config import make_recipe, setting_names, with_settings
from groupwise.config.layers import load_recipe
from groupwise.errors import ConfigError
from groupwise.packaged import packaged_recipes
from groupwise.redaction import (
    Secret,
    hide_secrets,
    hold_secrets,
    is_secret_name,
    literal_secrets,
    remember_secret,
    resolve_secrets,
    without_secrets,
)

KEY = "sk-0123456789abcdef"

SECRET_NAMES = """
    api_key apiKey apikey API-Key X-Api-Key OPENAI_API_KEY openai_key judge_key access_key aws_secret_access_key
    secret secret_key client_secret private_key signing_key token api_token hub_token hf_token HF_TOKEN access_token
    auth_token authToken bearer bearer_token refresh_token password db_password PASSWORD passwd pwd passphrase
    authorization Authorization auth_header_authorization credentials credential auth basic_auth cookie session_cookie
    connection_string webhook webhook_url github_token
"""
PLAIN_NAMES = """
    max_new_tokens max_tokens min_tokens stop_token stop_tokens stop_token_ids token_budget tokenizer tokens token_ids
    num_tokens eos_token bos_token pad_token unk_token sep_token mask_token think_token end_token start_token
    special_token first_token answer_token tokenizer_name tokens_per_second key keys keyword keywords key_words column
    author authority api_key_env password_file password_length token_path secret_name api_key_variable monkey passage
    compass path model endpoint rubric scale temperature max_length public
"""


def test_names_of_secrets():
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in PLAIN_NAMES.split() if is_secret_name(name)] == []


def test_no_setting_of_ours_and_no_packaged_recipe_has_a_secret():
    assert [name for name, _ in setting_names() if is_secret_name(name.rpartition(".")[2])] == []
    for path in packaged_recipes().values():
        recipe = load_recipe(path)
        assert recipe.recorded() == recipe.model_dump()


def test_a_secret_shows_itself_nowhere():
    secret = Secret(KEY)
    shown = (repr(secret), str(secret), f"{secret}", f"{secret!r:>10}", repr({"key": [secret]}))
    assert not any(KEY in text for text in shown)
    assert secret.reveal() == KEY
    assert copy.deepcopy(secret) == secret != Secret("another-one")
    with pytest.raises(TypeError):
        json.dumps(secret)


def test_secrets_in_a_table_are_held_by_name_and_in_urls():
    options = {
        "api_key": KEY,
        "limit": 5,
        "url": "https://user:passw0rd@host/v1?api_key=abcdef&page=2",
        "headers": {"Authorization": "Bearer abc", "Accept": "text/plain"},
        "credentials": {"user": "me", "password": 123456, "tries": True},
        "models": [{"name": "a", "token": "tok-1"}],
        "password": {"env": "PASSWORD"},
        "stop_token": "</s>",
    }
    held = hold_secrets(options)
    assert without_secrets(held) == {
        "api_key": "***",
        "limit": 5,
        "url": "https://***@host/v1?api_key=***&page=2",
        "headers": {"Authorization": "***", "Accept": "text/plain"},
        "credentials": {"user": "***", "password": "***", "tries": True},
        "models": [{"name": "a", "token": "***"}],
        "password": {"env": "PASSWORD"},
        "stop_token": "</s>",
    }
    assert without_secrets(options) == without_secrets(held)
    assert hold_secrets(held) == held
    assert list(literal_secrets(held, "options")) == [
        "options.api_key",
        "options.url",
        "options.headers.Authorization",
        "options.credentials.user",
        "options.credentials.password",
        "options.models.0.token",
    ]
    expected = {**options, "credentials": {"user": "me", "password": "123456", "tries": True}}
    del expected["password"], held["password"]
    assert resolve_secrets(held, "options") == expected


def test_a_variable_is_read_when_it_is_needed(monkeypatch):
    options = {"api_key": {"env": "MY_KEY"}, "nested": [{"password": {"env": "MY_KEY"}}]}
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"rewards\.0\.options\.api_key: the environment variable MY_KEY is not set"):
        resolve_secrets(options, "rewards.0.options")
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    assert resolve_secrets(options, "") == {"api_key": KEY, "nested": [{"password": KEY}]}
    for wrong in (KEY, "", "A B", 7, None):
        with pytest.raises(ConfigError, match="must name an environment variable") as caught:
            resolve_secrets({"api_key": {"env": wrong}}, "options")
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("value", ["***", "https://***@host/v1", "https://host/v1?token=***"])
def test_a_value_that_was_not_recorded_is_asked_for(value):
    held = hold_secrets({"api_key" if value == "***" else "url": value})
    with pytest.raises(ConfigError, match=r"recipe\.json does not keep secrets.*--options\.\w+ '\{env = \"NAME\"\}'"):
        resolve_secrets(held, "options")


def test_known_values_are_hidden_in_texts(monkeypatch):
    remember_secret("geheim/ wort\"'1")
    remember_secret("short")
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    monkeypatch.setenv("SOME_SETTING", "not-a-secret-at-all")
    assert hide_secrets("a geheim/ wort\"'1 b") == "a *** b"
    assert hide_secrets("q=geheim%2F%20wort%22%271 geheim%2F+wort%22%271") == "q=*** ***"
    assert hide_secrets(str(ValueError({"a": "geheim/ wort\"'1"}))) == "{'a': '***'}"
    assert hide_secrets("short from-the-environment not-a-secret-at-all") == "short *** not-a-secret-at-all"
    assert hide_secrets("no http://h/a@b and mail@host") == "no http://h/a@b and mail@host"
    assert hide_secrets("(http://me:pw@h:1/?x=1&access_token=t#f)") == "(http://***@h:1/?x=1&access_token=***#f)"


def test_the_current_folder_is_not_a_secret(monkeypatch):
    for name in ("PWD", "OLDPWD"):
        monkeypatch.setenv(name, "/home/me/a-long-folder")
    assert hide_secrets("/home/me/a-long-folder/recipe.toml") == "/home/me/a-long-folder/recipe.toml"


def test_a_recipe_records_no_secret_and_keeps_it_for_its_steps(monkeypatch):
    entry = {"function": "judge", "options": {"api_key": KEY, "model": "m", "url": "http://a:b-c-d-e@h"}}
    table = {"data": {"train": "x", "chat_template_kwargs": {"token": KEY}}, "rewards": [entry]}
    recipe = make_recipe({**table, "task_options": {"password": KEY}, "train": {"steps": 1}})
    assert KEY not in repr(recipe)
    assert KEY not in json.dumps(recipe.recorded())
    assert "b-c-d-e" not in json.dumps(recipe.recorded())
    step = with_settings(recipe, {"sampling.temperature": 0.5})
    assert resolve_secrets(step.rewards[0].options, "")["api_key"] == KEY
    again = make_recipe(recipe.recorded(), base={})
    assert again.recorded() == recipe.recorded()
    with pytest.raises(ConfigError, match=r"rewards\.0\.options\.api_key is not here"):
        resolve_secrets(again.rewards[0].options, "rewards.0.options")


@pytest.mark.parametrize(
    "table",
    [
        {"rewards": [{"function": "f:g", "options": [{"api_key": KEY}]}]},
        {"rewards": {"function": "f:g", "options": {"api_key": KEY}}},
        {"rewards": [{"function": {"api_key": KEY}}]},
        {"task_options": [{"token": KEY}]},
        {"judge": {"api_key": KEY}},
        {"run": {"wandb": {"api_key": KEY}}},
        {"hub_token": KEY},
    ],
)
def test_an_error_of_a_recipe_does_not_show_a_secret(table):
    with pytest.raises(ConfigError) as caught:
        make_recipe({"train": {"steps": 1}, **table})
    assert KEY not in str(caught.value)


def test_a_key_without_quotes_is_not_repeated(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f"[[rewards]]\nfunction = 'f:g'\n[rewards.options]\napi_key = {KEY}\n")
    with pytest.raises(ConfigError, match=r'a text needs quotes: api_key = "\*\*\*"'):
        load_recipe(path)
