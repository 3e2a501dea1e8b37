"""What a server may do wrong, without vLLM: a small HTTP server of this process answers as one does, or does not."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from groupwise.config import make_recipe
from groupwise.distributed.ranks import Ranks
from groupwise.errors import ConfigError, InputError
from groupwise.generate import Sampling
from groupwise.generate.registry import make_generator
from groupwise.integrations.vllm.errors import ServerSetupError, VllmError
from groupwise.integrations.vllm.versions import find_version
from groupwise.model.handle import prepare
from groupwise.model.load import load_model
from groupwise.model.logprobs import completion_logps

PROMPTS = [[1, 2, 3], [4, 5], [6]]
SAMPLING = Sampling(max_new_tokens=6, eos_ids=())


class Server(ThreadingHTTPServer):
    """Answers like vLLM 0.32, and with the text of a broken one if ``broken`` says so for a route."""

    daemon_threads = True

    def __init__(self, model, **settings):
        super().__init__(("127.0.0.1", 0), Handler)
        self.handle = prepare(model)
        self.settings = {"version": "0.32.0", "logprobs_mode": "processed_logprobs", "max_model_len": 512} | settings
        self.broken, self.calls, self.prompts = {}, Counter(), []
        self.weights, self.key = "default", None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, *arguments):
        """A client that does not wait for the answer is what some tests are about."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, route, body):
        if route == "/version":
            return {"version": self.settings["version"]}
        if route == "/server_info":
            model = {name: self.settings[name] for name in ("logprobs_mode", "max_model_len")}
            model |= {"hf_overrides": {}, "dtype": "torch.float32"}
            return {"vllm_config": {"model_config": model, "device_config": {"device": "cuda"}}}
        if route == "/v1/models":
            return {"data": [{"id": "served"}]}
        if route == "/weight_info":
            return {"weight_version": self.weights}
        if route == "/update_weight_version":
            self.weights = body["new_version"]
        if route == "/reset_prefix_cache":
            return {"success": True}
        if route == "/v1/completions":
            return self.completions(body)
        return {}

    def completions(self, body):
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            with torch.no_grad():
                logps = completion_logps(self.handle, [ids[:1]], [[ids[1:]]]).logps[0].tolist()
            entries = [{str(token): {"logprob": logp}} for token, logp in zip(ids[1:], logps, strict=True)]
            return {"choices": [{"prompt_logprobs": [None, *entries]}]}
        self.prompts.append(tuple(body["prompt"]))
        count = body["max_tokens"]
        choices = [
            {
                "index": index,
                "token_ids": [(body["seed"] + index + place) % 250 for place in range(count)],
                "logprobs": {"token_logprobs": [-1.5] * count},
                "finish_reason": "length",
            }
            for index in range(body["n"])
        ]
        return {"choices": choices}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def reply(self):
        server, route = self.server, self.path.partition("?")[0]
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        server.calls[route] += 1
        if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
            return self.send(401, b'{"error": "Unauthorized"}')
        broken = server.broken.get(route)
        if broken is not None and (broken := broken(server.calls[route])) is not None:
            status, text = broken
            return self.send(status, text.encode()) if status else self.connection.close()
        return self.send(200, json.dumps(server.answer(route, json.loads(data) if data else None)).encode())

    def send(self, status, data):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = reply


@pytest.fixture(scope="module")
def model():
    return prepare(load_model("tiny", dtype="float32", device="cpu"))


@pytest.fixture
def start(model, monkeypatch):
    monkeypatch.setattr("groupwise.integrations.vllm.remote.RETRY_SECONDS", 0.1)
    started = []

    def make(count=1, **settings):
        started.extend(Server(model, **settings) for _ in range(count))
        return started[-count:]

    yield make
    for server in started:
        server.shutdown()
        server.server_close()


def generator_of(model, servers, **settings):
    recipe = make_recipe(
        {
            "train": {"steps": 1},
            "data": {"max_prompt_length": 32},
            "sampling": {"generator": "vllm", "max_new_tokens": 16},
            "vllm": {"servers": [server.url for server in servers], "timeout": 5.0, "wait": 2.0, **settings},
        }
    )
    return make_generator(recipe, prepare(model), Ranks())


def always(status, text=""):
    return lambda call: (status, text)


def once(status, text=""):
    return lambda call: (status, text) if call == 2 else None  # the first call is the check of the weights


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ((500, '{"error": {"message": "engine dead"}}'), "engine dead"),
        ((200, "<html>"), "JSON"),
        ((200, '{"choices": []}'), "0 completions instead of 2"),
        ((200, '{"choices": 7}'), "without completions"),
        ((0, ""), "connection"),
        (
            (200, '{"choices": [{"index": 0, "token_ids": [1, 2], "logprobs": {"token_logprobs": [-1]}}]}'),
            "2 tokens with 1 log-probs",
        ),
        (
            (200, '{"choices": [{"index": 0, "token_ids": [9999], "logprobs": {"token_logprobs": [-1]}}]}'),
            "outside the vocabulary",
        ),
    ],
)
def test_a_reply_that_cannot_be_used_is_asked_for_again(model, start, fault, reason):
    (server,) = start()
    generator = generator_of(model, [server])
    generator.update_weights(4)
    server.broken["/v1/completions"] = once(*fault)
    failures = []
    fail = generator._failed
    generator._failed = lambda *arguments: (failures.append(str(arguments[-1])), fail(*arguments))
    loads = server.calls["/collective_rpc"]
    rollout = generator.generate(PROMPTS, 2, SAMPLING)
    assert len(failures) == 1
    assert reason in failures[0]
    assert server.url in failures[0]
    assert server.calls["/collective_rpc"] == loads + 1  # the weights again, before the next prompt
    assert rollout.lengths.tolist() == [6] * 6
    assert rollout.versions.unique().tolist() == [4]
    assert set(server.prompts) == set(map(tuple, PROMPTS))
    generator.close()


def test_a_prompt_that_always_fails_ends_the_run(model, start):
    servers = start(2)
    generator = generator_of(model, servers, wait=60.0)
    generator.update_weights(0)
    for server in servers:
        server.completions = lambda body, answer=server.completions: answer(body) if "prompt_logprobs" in body else 7
    with pytest.raises(VllmError, match=r"5 times.*without completions"):
        generator.generate([[1, 2]], 2, SAMPLING)


def test_prompts_of_a_dead_server_go_to_another_and_none_is_doubled(model, start):
    servers = start(2)
    generator = generator_of(model, servers)
    generator.update_weights(0)
    expected = generator.generate(PROMPTS * 4, 3, SAMPLING, keys=range(12))
    servers[1].broken["/v1/completions"] = servers[1].broken["/version"] = always(0)
    rollout = generator.generate(PROMPTS * 4, 3, SAMPLING, keys=range(12))
    assert torch.equal(rollout.ids, expected.ids)
    assert rollout.groups.tolist() == [prompt for prompt in range(12) for _ in range(3)]
    generator.update_weights(1)  # one server is enough
    assert generator.generate(PROMPTS, 1, SAMPLING).versions.unique().tolist() == [1]
    generator.check_health()


def test_a_server_that_was_restarted_unnoticed_gets_the_weights_first(model, start):
    (server,) = start()
    generator = generator_of(model, [server])
    generator.update_weights(2)
    server.weights = "default"  # as after a restart
    loads = server.calls["/collective_rpc"]
    rollout = generator.generate(PROMPTS, 2, SAMPLING)
    assert rollout.versions.unique().tolist() == [2]
    assert server.calls["/collective_rpc"] == loads + 1
    assert server.weights.endswith("-2")


def test_an_aborted_completion_goes_on_after_its_tokens(model, start):
    """As in an update of the weights: each token has the version of the weights that sampled it."""
    (server,) = start()
    generator = generator_of(model, [server])
    generator.update_weights(0)
    complete = server.completions

    def cut(body):
        reply = complete(body)
        if "prompt_logprobs" not in body and len(body["prompt"]) == 3:  # not continued yet
            for choice in reply["choices"]:
                kept = 1 + choice["index"]
                choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:kept], "abort"
                choice["logprobs"]["token_logprobs"] = [-0.5] * kept
            if not server.calls["/moved"]:
                server.calls["/moved"] += 1
                generator.version = generator.servers[0].version = 1  # what an update does at last
        return reply

    server.completions = cut
    rollout = generator.generate([[1, 2, 3]], 3, SAMPLING)
    assert rollout.lengths.tolist() == [6] * 3
    assert rollout.versions.tolist() == [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert rollout.logps.tolist() == [[-0.5 if version == 0 else -1.5 for version in row] for row in rollout.versions]
    first = rollout.ids.tolist()
    assert sorted(server.prompts[1:]) == sorted((1, 2, 3, *row[: number + 1]) for number, row in enumerate(first))


def test_a_reload_that_fails_midway_is_repeated_completely(model, start):
    (server,) = start()
    generator = generator_of(model, [server], wait=30.0)
    generator.update_weights(0)
    server.broken["/resume"] = lambda call: (500, "died") if call == 2 else None
    generator.update_weights(1)
    assert server.calls["/collective_rpc"] == 3
    assert generator.servers[0].version == 1
    assert server.weights.endswith("-1")


def test_nobody_answers(model, start):
    (server,) = start()
    generator = generator_of(model, [server], wait=0.5)
    generator.update_weights(0)
    server.shutdown()
    server.server_close()
    with pytest.raises(VllmError, match=rf"{server.url}.*refused.*--resume"):
        generator.generate(PROMPTS, 1, SAMPLING)
    with pytest.raises(VllmError, match="refused"):
        generator.check_health()
    with pytest.raises(VllmError, match=r"no vLLM server could be used for 0\.5 seconds"):
        generator.update_weights(1)


def test_a_server_that_hangs_is_left_after_the_timeout(model, start):
    servers = start(2)
    generator = generator_of(model, servers, timeout=1.0)
    generator.update_weights(0)
    generator.max_num_seqs = 2  # one prompt at once on each
    hanging, release = threading.Event(), threading.Event()

    def hang(call):
        hanging.set()
        release.wait(30)

    servers[1].broken["/v1/completions"] = hang
    servers[0].broken["/v1/completions"] = lambda call: hanging.wait(30) and None
    assert generator.generate(PROMPTS * 2, 2, SAMPLING).lengths.tolist() == [6] * 12
    assert "did not answer within 1 seconds" in generator.servers[1].failure
    release.set()


def test_a_server_that_keeps_prompts_of_the_old_weights_is_not_used(model, start):
    (server,) = start()
    server.broken["/reset_prefix_cache"] = lambda call: (200, '{"success": false}') if call == 1 else None
    generator = generator_of(model, [server])
    generator.update_weights(0)
    assert server.calls["/collective_rpc"] == 2
    assert generator.servers[0].version == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "processed_logprobs"),
        ({"max_model_len": 20}, "--max-model-len 48"),
        ({"version": "0.29.1"}, r"0\.29\.1.*vllm==0\.26\.0.*vllm==0\.32\.0"),
    ],
)
def test_a_server_that_was_started_wrongly_is_refused_with_the_command(model, start, settings, words):
    with pytest.raises(ServerSetupError, match=words):
        generator_of(model, start(**settings))


def test_development_routes_that_are_missing(model, start):
    (server,) = start()
    server.broken["/server_info"] = always(404, '{"detail": "Not Found"}')
    with pytest.raises(ServerSetupError, match="VLLM_SERVER_DEV_MODE=1"):
        generator_of(model, [server])


def test_another_model_is_noticed(start):
    other = load_model("tiny", dtype="float32", device="cpu", seed=7)
    with pytest.raises(ServerSetupError, match=r"differ from the trainer's by .*model\.source"):
        generator_of(other, start()).update_weights(0)


def test_prompts_that_do_not_fit(model, start):
    generator = generator_of(model, start(max_model_len=48))
    generator.update_weights(0)
    with pytest.raises(ServerSetupError, match="room for 48 tokens"):
        generator.generate([[1] * 45], 1, SAMPLING)


def test_the_key_is_sent_and_never_shown(model, start, monkeypatch):
    (server,) = start()
    server.key = "very-secret-key"
    with pytest.raises(ServerSetupError, match=r"401.*vllm\.api_key_env"):
        generator_of(model, [server])
    with pytest.raises(ConfigError, match="variable VLLM_KEY is not set"):
        generator_of(model, [server], api_key_env="VLLM_KEY")
    monkeypatch.setenv("VLLM_KEY", "very-secret-key")
    generator = generator_of(model, [server], api_key_env="VLLM_KEY")
    generator.update_weights(0)
    assert generator.generate(PROMPTS, 1, SAMPLING).lengths.tolist() == [6] * 3


def test_the_folder_holds_the_last_version_only_and_is_removed(model, start, tmp_path):
    generator = generator_of(model, start(), folder=str(tmp_path / "weights"))
    generator.update_weights(0)
    generator.update_weights(1)
    (folder,) = (tmp_path / "weights").iterdir()
    assert folder.name == "version-1"
    generator.close()
    assert not list((tmp_path / "weights").iterdir())


def test_kept_sets_are_refused(model, start):
    generator = generator_of(model, start())
    with pytest.raises(InputError, match="token sets"):
        generator.generate(PROMPTS, 1, Sampling(top_k=5, keep_sets=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"masks.keep_sampling_mask": True, "sampling.top_k": 5}, r"masks\.keep_sampling_mask.*vLLM"),
        ({"loss.importance_cap": 2.0, "sampling.top_k": 5}, r"loss\.importance_cap.*sampling\.top_k"),
        ({"loss.rejection_high": 2.0, "sampling.min_new_tokens": 5}, r"rejection_high.*min_new_tokens"),
        ({"masks.off_policy": "v3.2", "sampling.top_p": 0.9}, r"masks\.off_policy.*top_p"),
        ({"sampling.min_p": 0.1, "sampling.top_k": 5}, r"sampling\.order"),
        ({"vllm.servers": ["localhost:8000"]}, "http://host:8000"),
        ({"vllm.servers": ["http://host:8000/v1"]}, "http://host:8000"),
        ({"vllm.weights": "nccl"}, r"vllm\.servers is empty"),
    ],
)
def test_settings_that_vllm_cannot_do_are_refused_at_once(settings, words):
    sections: dict[str, dict[str, object]] = {"train": {"steps": 1}, "sampling": {"generator": "vllm"}}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    with pytest.raises(ConfigError, match=words):
        make_recipe(sections)


def test_versions():
    assert find_version("0.26.0", "x").number == "0.26"
    assert find_version("0.32.1+cpu", "x").number == "0.32"
    with pytest.raises(ServerSetupError, match=r"this environment has vLLM 0\.3\.0; .* 0\.26 and 0\.32"):
        find_version("0.3.0", "this environment")
