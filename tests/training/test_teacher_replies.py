"""What a teacher's server may answer that cannot be used, and addresses and keys that cannot: each refused by name."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.errors import ConfigError, GroupwiseError, TeacherServerError
from groupwise.integrations.vllm import teacher as client_of_teacher
from groupwise.integrations.vllm.errors import ServerSetupError
from groupwise.integrations.vllm.teacher import ServerTeacher
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from groupwise.training.update.teacher import Teacher
from tests.training.factories import make_updater, short_recipe
from tests.training.runs import even, small_trainer

KEY = "sk-a-key-of-the-teacher"
PROMPT, COMPLETION = [5, 6, 7], [8, 9]
IDS = [*PROMPT, *COMPLETION]
MODELS = {"data": [{"id": "teacher", "max_model_len": 512}]}


def entry(token, logp=-1.0, **more):
    return {str(token): {"logprob": logp, "rank": 1, "decoded_token": tiny_tokenizer().decode([token])}, **more}


def by_id(ids=IDS, **choice):
    entries = [None, *(entry(token) for token in ids[1:])]
    return {"choices": [{"index": 0, "text": "", "prompt_logprobs": entries, **choice}]}


def with_entry(place, value):
    reply = by_id()
    reply["choices"][0]["prompt_logprobs"][place] = value
    return reply


def with_logp(value):
    return with_entry(4, entry(9, value))


def echo(ids=IDS, **logprobs):
    texts = [*(tiny_tokenizer().decode([token]) for token in ids), "!"]
    values = [None, *(-1.0 for _ in ids)]
    return {"choices": [{"text": "", "logprobs": {"tokens": texts, "token_logprobs": values, **logprobs}}]}


class Drip:
    """A reply that never ends: a byte now and then, or many at once."""

    def __init__(self, data, pause, header=b""):
        self.data, self.pause, self.header = data, pause, header


@contextmanager
def serving(answer):
    """A server whose ``answer(body, headers)`` is JSON, bytes, a status with a text and headers, or a `Drip`."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None: ...

        def send(self, status, data, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.send(200, json.dumps(MODELS).encode(), {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            value = answer(body, self.headers)
            if isinstance(value, Drip):
                self.wfile.write(value.header or b"HTTP/1.1 200 OK\r\n\r\n")
                try:
                    while not ended.is_set():
                        self.wfile.write(value.data)
                        ended.wait(value.pause)
                except OSError:
                    return
            elif isinstance(value, tuple):
                status, text, headers = value
                self.send(status, text.encode(), headers)
            else:
                self.send(200, value if isinstance(value, bytes) else json.dumps(value).encode(), {})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def teacher_of(url, *, by_id=True, **settings):
    table = {"weight": 1.0, "server": url, "kl": "sampled", "wait": 0.2, "timeout": 5.0, **settings}
    teacher = ServerTeacher(make_recipe({"distillation": table}).distillation)
    teacher.model, teacher.by_id = "teacher", by_id
    if not by_id:
        teacher._decode = lambda token: tiny_tokenizer().decode([token])
    return teacher


def score(teacher, top_k=0):
    ((answer,),) = teacher.score([PROMPT], [[torch.tensor(COMPLETION)]], top_k)
    return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(client_of_teacher, "FIRST_PAUSE", 0.01)


MALFORMED = {
    "html": (b"<html>Welcome</html>", r"did not answer with JSON, but with '<html>Welcome"),
    "nothing": (b"", r"choices has no completion, but None"),
    "depth": (b"[" * 60_000, r"did not answer with JSON"),
    "cut": (json.dumps(by_id()).encode()[:-20], r"did not answer with JSON"),
    "a list": ([1], r"choices has no completion, but \[1\]"),
    "no choices": ({"object": "error"}, r"choices has no completion"),
    "empty choices": ({"choices": []}, r"choices has no completion"),
    "no log-probs": ({"choices": [{"text": ""}]}, r"prompt_logprobs is None, not a list"),
    "a text": (by_id(prompt_logprobs="none"), r"prompt_logprobs is 'none', not a list"),
    "too few": (by_id(IDS[:-1]), r"prompt_logprobs is about 4 tokens, but 5 were sent"),
    "too many": (by_id([*IDS, 3]), r"prompt_logprobs is about 6 tokens, but 5 were sent"),
    "another token": (with_entry(2, entry(8)), r"prompt_logprobs\[2\] has no .* sent, 7, but those of '8'"),
    "an empty entry": (with_entry(3, None), r"prompt_logprobs\[3\] has no .* sent, 8, but None"),
    "other ids": (by_id(prompt_token_ids=[1, *IDS[1:]]), r"prompt_token_ids are other tokens"),
    "a start token": ({**by_id(), "usage": {"prompt_tokens": 6}}, r"usage.prompt_tokens is 6, but 5 tokens"),
    "NaN": (with_logp(float("nan")), r'prompt_logprobs\[4\]\["9"\].logprob is nan; a log-prob is'),
    "minus infinity": (with_logp(-float("inf")), r'prompt_logprobs\[4\]\["9"\].logprob is -inf; a log-prob is'),
    "infinity": (with_logp(float("inf")), r"logprob is inf; a log-prob is"),
    "positive": (with_logp(0.7), r"logprob is 0.7; a log-prob is a number of at most 0"),
    "huge": (with_logp(10**400), r"logprob is 10+.*; a log-prob is|did not answer with JSON"),
    "null": (with_logp(None), r"logprob is None, not a number"),
    "text": (with_logp("-1"), r"logprob is '-1', not a number"),
    "true": (with_logp(True), r"logprob is True, not a number"),
    "no table": (with_entry(4, {"9": -1.0}), r"logprob is None, not a number"),
    "no id": (with_entry(4, entry(9, x={"logprob": -3.0})), r"names a token 'x', which is no token id"),
    "too probable": (with_entry(4, entry(9, 0.0, **entry(3, 0.0))), r"tokens in prompt_logprobs\[4\] add up"),
}  # fmt: skip
MALFORMED_ECHO = {
    "no log-probs": ({"choices": [{"logprobs": None}]}, r"logprobs is None, not a table"),
    "too few": (echo(token_logprobs=[None, -1.0]), r"token_logprobs is about 2 tokens, but 5 were sent"),
    "too many": (echo([*IDS, 1, 2]), r"token_logprobs is about 8 tokens, but 5 were sent"),
    "other texts": (echo([5, 6, 17, 18, 19]), r"logprobs.tokens are not those that were sent: 3 of 5 differ"),
    "NaN": (echo(token_logprobs=[None, *[-1.0] * 3, float("nan")]), r"token_logprobs\[4\] is nan"),
    "positive": (echo(token_logprobs=[None, *[-1.0] * 3, 3.5]), r"token_logprobs\[4\] is 3.5; a log-prob is"),
    "null": (echo(token_logprobs=[None, -1.0, None, -1.0, -1.0]), r"token_logprobs\[2\] is None, not a number"),
}


@pytest.mark.parametrize(
    ("is_by_id", "name"), [*((True, name) for name in MALFORMED), *((False, name) for name in MALFORMED_ECHO)]
)
def test_a_reply_that_cannot_be_used_is_refused_by_its_field(is_by_id, name):
    value, sentence = (MALFORMED if is_by_id else MALFORMED_ECHO)[name]
    requests = []
    with serving(lambda body, headers: requests.append(body) or value) as url:
        with pytest.raises(TeacherServerError, match=sentence) as caught:
            score(teacher_of(url, by_id=is_by_id, wait=60.0))
        assert url in str(caught.value)
        assert "load it with distillation.teacher" in str(caught.value)
        assert len(requests) == 3  # it may have been an accident, but not for a minute


def test_replies_that_are_right():
    answers = [by_id(), by_id(), echo(), echo(tokens=None)]
    answers[0]["choices"][0]["prompt_logprobs"][3:] = [entry(8, -9999.0), entry(9, 1e-6)]
    answers[1] |= {"usage": {"prompt_tokens": 5}}
    with serving(lambda body, headers: answers.pop(0)) as url:
        assert score(teacher_of(url)).logps.tolist() == [-100.0, 0.0]
        for is_by_id in (True, False, False):
            assert score(teacher_of(url, by_id=is_by_id)).logps.tolist() == [-1.0, -1.0]


def test_a_reply_that_comes_too_slowly_or_never_ends():
    slow = {
        "head": Drip(b"x", 0.05, b"HTTP/1.1 200 OK\r\nX-Long: "),
        "body": Drip(b" ", 0.05),
        "with a length": Drip(b" ", 0.05, b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"),
        "silence": Drip(b"", 0.05, b" "),
    }
    for name, value in slow.items():
        with serving(lambda body, headers, value=value: value) as url:
            start = time.monotonic()
            with pytest.raises(TeacherServerError, match=r"did not answer within 0.5 seconds, or not completely"):
                score(teacher_of(url, timeout=0.5))
            assert time.monotonic() - start < 4, name
    endless = pytest.raises(TeacherServerError, match=r"answered with more than \d\d,\d{3} bytes")
    with serving(lambda body, headers: Drip(b" " * 2**16, 0.0)) as url, endless:
        score(teacher_of(url))


@pytest.mark.parametrize(
    ("status", "text", "error", "sentence"),
    [
        (
            400,
            '{"error": {"message": "max_logprobs is 5 KEY"}}',
            ServerSetupError,
            "400: 'max_logprobs is 5 Bearer .*'",
        ),
        (401, "<b>no KEY</b>", ServerSetupError, r"401: '<b>no .*</b>'. Put the .*distillation.api_key_env names"),
        (403, " " * 90 + "KEY" * 9, ServerSetupError, r"403: .*distillation.api_key_env names"),
        (404, '{"detail": "Not Found"}', ServerSetupError, "answered 404: 'Not Found'"),
        (429, '["slow down"]', TeacherServerError, "for 0.2 seconds .*answered 429: .*slow down"),
        (500, '{"error": {"message": {"deep": [1]}}}', TeacherServerError, "answered 500: {'deep': "),
        (502, "<html>\x1b[31mBad Gateway</html>" * 1000, TeacherServerError, "answered 502: .*Bad Gateway"),
        (503, "[" * 200_000, TeacherServerError, "answered 503: "),
    ],
)
def test_an_error_status_is_shown_with_the_servers_reason(status, text, error, sentence, monkeypatch):
    monkeypatch.setenv("MY_TEACHER", KEY)
    requests = []

    def answer(body, headers):
        requests.append(headers["Authorization"])
        return status, text.replace("KEY", headers["Authorization"]), {}

    with serving(answer) as url, pytest.raises(error, match=sentence) as caught:
        score(teacher_of(url, api_key_env="MY_TEACHER"))
    assert set(requests) == {f"Bearer {KEY}"}
    assert len(requests) == 1 or error is TeacherServerError
    assert url in str(caught.value)
    assert KEY not in str(caught.value)
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status, monkeypatch):
    monkeypatch.setenv("MY_TEACHER", KEY)
    asked = []
    refused = pytest.raises(ServerSetupError, match=rf"{status}, a redirect to .*set distillation.server")
    with (
        serving(lambda body, headers: asked.append(headers["Authorization"]) or by_id()) as other,
        serving(lambda body, headers: (status, "", {"Location": f"{other}/v1/completions?token={KEY}"})) as url,
        refused as caught,
    ):
        score(teacher_of(url, api_key_env="MY_TEACHER"))
    assert asked == []
    assert KEY not in str(caught.value)


def test_of_many_requests_one_that_fails_for_good_ends_the_others_at_once():
    """They are not asked for one after another, each until distillation.wait is over."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    start, completions = time.monotonic(), [[torch.tensor(COMPLETION)] * 40]
    with pytest.raises(TeacherServerError, match=rf"{url} has failed for 0.5 seconds .*connection refused"):
        teacher_of(url, wait=0.5, concurrency=2).score([PROMPT], completions, 0)
    assert time.monotonic() - start < 5
    done = threading.Event()

    def answer(body, headers):
        if body["prompt"][0] == 5 and not done.wait(0.3):  # the others are under way by then
            return 400, "no", {}
        return Drip(b" ", 0.05)

    prompts, start = [PROMPT, *[[6, 6, 7]] * 8], time.monotonic()
    with serving(answer) as url, pytest.raises(ServerSetupError, match="answered 400: 'no'"):
        teacher_of(url, timeout=60.0).score(prompts, [[torch.tensor(COMPLETION)]] * 9, 0)
    assert time.monotonic() - start < 10


# --- addresses and keys -----------------------------------------------------------------------------------------------

ADDRESSES = {
    "ftp://host:21": r"'ftp://host:21' is not an address .*scheme 'ftp'; write it like 'http://host:8000'",
    "host:8000": r"'host:8000' is not an address .*no http:// or https://",
    "": r"no http:// or https://",
    "http://": r"'http://' names no host",
    "http://:8000": r"names no host",
    "http://host:99999": r"the port of 'http://host:99999' is not a number from 1 to 65535",
    "http://host:0": r"the port of",
    "http://host:-1": r"the port of",
    "http://host:eight": r"the port of",
    "http://[::1": r"is not an address",
    "http://a..b:8000": r"the host 'a..b' of .* cannot be a name",
    "http://a b:8000": r"cannot be a name",
    "http://" + "a" * 64 + ":8000": r"cannot be a name",
    "http://host:8000/v1": r"leave out everything behind its port, such as /v1",
    "http://host:8000?key=x": r"leave out everything behind its port",
    f"http://me:{KEY}@host:8000": r"must not have a user or a password in it",
    f"http://{KEY}@host:8000": r"must not have a user or a password in it",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_that_cannot_be_asked(address):
    for table, name in (
        ({"distillation": {"weight": 1.0, "server": address}}, "distillation.server: "),
        ({"sampling": {"generator": "vllm"}, "vllm": {"servers": [address]}}, "vllm.servers: "),
    ):
        with pytest.raises(ConfigError, match=name + r"(.|\n)*" + ADDRESSES[address]) as caught:
            make_recipe(table)
        assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["http://[::1]:8000", "https://host", "http://127.0.0.1:1/", "http://my_host.lan.:80"]
)
def test_an_address_that_can(address):
    make_recipe({"distillation": {"weight": 1.0, "server": address}})


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (KEY, None, "distillation.api_key_env must be the name of an environment variable, not the key itself"),
        ("MY_TEACHER", None, "variable MY_TEACHER is not set"),
        ("MY_TEACHER", "  ", "variable MY_TEACHER is not set"),
        ("MY_TEACHER", f"{KEY}\nX-Other: 1", "the value of MY_TEACHER cannot be a key"),
        ("MY_TEACHER", f"{KEY}ä", "the value of MY_TEACHER cannot be a key"),
    ],
)
def test_a_key_that_cannot_be_sent_is_not_shown(variable, value, sentence, monkeypatch):
    if value is not None:
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=sentence) as caught:
        teacher_of("http://host:8000", api_key_env=variable)
    assert KEY not in str(caught.value)


# --- a run ------------------------------------------------------------------------------------------------------------


class Scored:
    """What a teacher with log-probs of −1 answers; wrong from the request ``wrong_from`` on."""

    def __init__(self, wrong_from):
        self.requests, self.wrong_from = 0, wrong_from

    def __call__(self, body, headers):
        self.requests += 1
        return by_id(body["prompt"]) if self.requests < self.wrong_from else by_id(body["prompt"][:-1])


@pytest.mark.parametrize("wrong_from", [1, 2, 10])
def test_a_server_that_begins_to_answer_wrongly_ends_the_run_with_its_sentence(wrong_from, tmp_path):
    with serving(Scored(wrong_from)) as url:
        changes = {
            "distillation": {"weight": 1.0, "server": url, "kl": "sampled"},
            "train": {"steps": 2},
            "evaluate": {"before_training": False, "every": 0},
        }
        with pytest.raises(GroupwiseError, match=r"prompt_logprobs is about \d+ tokens, but \d+ were sent.*Serve it"):
            small_trainer(tmp_path / "run", changes, rewards=[even]).run()
    assert (tmp_path / "run").exists() == (wrong_from == 10)


def test_likely_tokens_beyond_the_students_vocabulary_count_as_the_rest():
    """A server's vocabulary may be padded to more rows than the student's."""
    recipe = short_recipe({"distillation.weight": 1.0, "distillation.teacher": "x"})
    updater = make_updater(recipe, model=tiny_model(3))
    size = updater.handle.vocabulary
    states = torch.randn(2, updater.handle.head.weight.shape[1])
    mask = torch.ones(1, 2, dtype=torch.bool)
    logps = torch.tensor([[[-0.5, -2.0], [-0.7, -3.0]]])

    def kl(second):
        from groupwise.training.update.teacher import TeacherKL, TeacherLogps

        said = TeacherLogps(torch.zeros(1, 2), torch.tensor([[[4, second], [5, second]]]), logps)
        term = TeacherKL(
            Teacher("x", "own"), updater.handle, None, [(1,)], [[torch.tensor([4, 5])]], said, 1.0, 99, False
        )
        return term.of(torch.tensor([0]), states, mask)[0]

    assert torch.equal(kl(size + 3), kl(-1))
    assert not torch.equal(kl(size - 1), kl(-1))
