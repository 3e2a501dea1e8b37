"""The files of examples/verl that need no verl: the converter, the reward and the sample. tests/verl has the rest."""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import json
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from groupwise.errors import ConfigError, InputError, RewardError

FOLDER = Path(__file__).parents[1] / "examples" / "verl"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def to_parquet():
    return load("to_parquet")


@pytest.fixture(scope="module")
def reward():
    return load("reward")


def test_sample_is_converted(to_parquet, tmp_path, capsys):
    assert to_parquet.main([str(FOLDER / "prompts.jsonl"), str(tmp_path / "data"), "--held-out", "4"]) == 0
    assert "train.parquet: 20 rows" in capsys.readouterr().out
    rows = [json.loads(line) for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]
    train, held_out = (
        pq.read_table(tmp_path / "data" / f"{name}.parquet").to_pylist() for name in ("train", "held_out")
    )
    assert [row["prompt"] for row in train + held_out] == [[{"role": "user", "content": row["prompt"]}] for row in rows]
    assert len({row["prompt"] for row in rows}) == len(rows) == 24
    assert train[0] == {
        "data_source": "writing",
        "prompt": [{"role": "user", "content": rows[0]["prompt"]}],
        "ability": "writing",
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {
            "split": "train",
            "index": 0,
            "request": rows[0]["prompt"],
            "columns": '{"genre": "story"}',
        },
    }
    assert {row["extra_info"]["split"] for row in held_out} == {"held_out"}


def test_messages_system_and_ground_truth(to_parquet, tmp_path):
    chat = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "3"},
    ]
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": chat, "ground_truth": 7}, {"prompt": "plain"}]
    source.write_text("\n".join(map(json.dumps, rows)))
    to_parquet.write_files(str(source), tmp_path, held_out=1, data_source="mine", system="Be brief.")
    (first,) = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert first["prompt"] == [{"role": "system", "content": "Be brief."}, *chat]
    assert first["reward_model"]["ground_truth"] == "7"
    assert first["data_source"] == "mine"
    assert first["extra_info"]["request"] == "one\n3"


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ('{"text": "no prompt"}\n{"text": "2"}', [], "prompt"),
        ('{"prompt": "a"}\n{"prompt": ""}', [], "rows.jsonl"),
        ('{"prompt": "a"}\n{"prompt"', [], "line 2"),
        ('{"prompt": "a"}\n{"prompt": "b"}', ["--held-out", "2"], "must be from 1 to 1"),
        ('{"prompt": [{"role": "system", "content": "s"}]}\n{"prompt": "b"}', ["--system", "x"], "--system"),
    ],
    ids=["column", "empty", "json", "held out", "system"],
)
def test_rows_that_cannot_be_converted(text, options, message, to_parquet, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(text)
    assert to_parquet.main([str(tmp_path / "rows.jsonl"), str(tmp_path / "data"), "--held-out", "1", *options]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


REQUEST = "Write a story about a wolf that collects lost gloves."
DIFFERENT = " ".join(f"word{number}" for number in range(200))


def score(reward, answer, **options):
    return asyncio.run(reward.score("writing", answer, "", {"request": REQUEST}, **options))


def test_rules(reward):
    """By hand: two of five key words (story, wolf, collects, lost, gloves) are enough, as are 150 to 1,500 words."""
    full = {"score": 1.0, "keywords": 1.0, "repetition": 1.0, "length": 1.0}
    assert score(reward, f"thoughts </think>the wolf {DIFFERENT} its gloves") == full
    short = score(reward, "a wolf")
    assert short["keywords"] == pytest.approx(0.5)
    assert short["length"] == pytest.approx(2 / 150)
    assert short["score"] == pytest.approx((0.5 + 1.0 + 0.5 * 2 / 150) / 2.5)
    assert score(reward, "wolf gloves " * 100)["repetition"] == 0.0


def test_data_of_another_converter(reward):
    with pytest.raises(InputError, match=r"extra_info has no request; make the data with to_parquet\.py"):
        asyncio.run(reward.score("writing", "x", "", {"index": 0}))


class Judge(http.server.BaseHTTPRequestHandler):
    verdict = "Vivid. Score: 7"

    def log_message(self, *args):
        pass

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(question)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": self.verdict}}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": question["model"], "choices": [choice]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def judge():
    pytest.importorskip("openai")
    handler = type("ThisJudge", (Judge,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def test_judge(reward, judge):
    handler, endpoint = judge
    result = score(reward, "hm</think>a wolf", judge_endpoint=endpoint, judge_model="m")
    assert result["judge"] == pytest.approx((7 - 1) / 9)
    rules = 0.5 + 1.0 + 0.5 * 2 / 150
    assert result["score"] == pytest.approx((rules + 4 * 6 / 9) / 6.5)
    question = handler.asked[0]["messages"][-1]["content"]
    assert REQUEST in question
    assert "a wolf" in question
    assert "hm" not in question.split("The text:")[1].split("How good")[0]


def test_unreadable_verdict_is_an_error(reward, judge):
    handler, endpoint = judge
    handler.verdict = "I like it."
    with pytest.raises(RewardError, match="could not be judged"):
        score(reward, "a wolf", judge_endpoint=endpoint, judge_model="m")


def test_judge_without_a_model(reward):
    with pytest.raises(ConfigError, match=r"set reward_kwargs\.judge_model too"):
        score(reward, "a wolf", judge_endpoint="http://127.0.0.1:1/v1")
