"""Properties of plans, and `groupwise plan` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.cli import main
from groupwise.config import make_recipe, with_settings
from groupwise.errors import ConfigError
from groupwise.planning.gpus import GPUS
from groupwise.planning.layouts import COLOCATED, DISAGGREGATED, colocated, disaggregated, train_share
from groupwise.planning.memory import training_bytes
from groupwise.planning.plan import advice, bound, make_plan, plan_step, recommended_settings
from groupwise.planning.shapes import SHAPES
from groupwise.planning.work import StepWork

H100 = GPUS["h100"]
shapes = st.sampled_from([SHAPES[name] for name in ("smollm2-135m", "qwen2.5-1.5b", "llama-3.1-8b")])


@st.composite
def works(draw):
    longest = draw(st.integers(16, 4096))
    return StepWork(
        prompts=draw(st.integers(1, 300)),
        prompt_tokens=draw(st.integers(1, 2000)),
        samples=draw(st.integers(1, 32)),
        answer_tokens=draw(st.floats(max(1.0, longest / 50), longest)),
        max_tokens=longest,
        checkpointing=draw(st.booleans()),
        updates=draw(st.integers(1, 4)),
        forwards=draw(st.integers(0, 2)),
    )


@settings(max_examples=40, deadline=None)
@given(shapes, works(), st.integers(1, 64), st.integers(1, 64))
def test_with_ideal_links_more_gpus_are_never_slower(shape, work, gpus, more):
    for sharding in ("optimizer", "weights"):
        few = colocated(shape, work, H100, gpus, sharding, ideal=True)
        many = colocated(shape, work, H100, gpus + more, sharding, ideal=True)
        assert many.step_seconds <= few.step_seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(shapes, works(), st.integers(1, 200), st.integers(1, 16))
def test_more_prompts_or_tokens_cost_more(shape, work, more, gpus):
    def seconds(changed):
        return colocated(shape, changed, GPUS["b200"], gpus, "optimizer").step_seconds

    base = seconds(work)
    assert seconds(replace(work, prompts=work.prompts + more)) >= base * (1 - 1e-9)
    assert seconds(replace(work, forwards=work.forwards + 1)) > base
    longer = replace(work, prompt_tokens=work.prompt_tokens, max_tokens=work.max_tokens * 2)
    assert seconds(replace(longer, answer_tokens=work.answer_tokens * 2)) > base


@settings(max_examples=40, deadline=None)
@given(shapes, works(), st.integers(1, 512), st.sampled_from(["optimizer", "weights"]))
def test_more_ranks_never_need_more_memory(shape, work, ranks, sharding):
    def need(number):
        return sum(training_bytes(shape, work.share(number), number, sharding, 8192).values())

    assert need(2 * ranks) <= need(ranks) * (1 + 1e-9)


@settings(max_examples=15, deadline=None)
@given(shapes, works(), st.integers(2, 32))
def test_a_plan_is_consistent(shape, work, gpus):
    try:
        plan = plan_step(shape, work, H100, gpus)
    except ConfigError:
        return
    for layout in plan.layouts:
        assert layout.missing is None
        assert layout.most_memory <= H100.memory
        assert layout.servers + layout.training.ranks == gpus if layout.servers else layout.training.ranks == gpus
        assert layout.step_seconds <= layout.synchronous_seconds
        assert layout.tokens_per_second == pytest.approx(work.sampled_tokens / layout.step_seconds)
        assert 0 < bound(layout)[1] <= 1
    assert plan.best in plan.layouts
    assert len(list(advice(plan))) >= 4


def test_the_exchanges_of_zero_1_by_hand():
    """Gradients in float32 and weights in bfloat16, of which each of 8 ranks sends 7/8."""
    shape, work = SHAPES["qwen2.5-7b"], StepWork(64, 100, 8, 100, 100, updates=3)
    gradients, weights = train_share(shape, work, GPUS["b200"], 8, "optimizer").exchanges
    assert gradients.bytes == pytest.approx(3 * 4 * shape.parameters * 7 / 8)
    assert weights.bytes == pytest.approx(3 * 2 * shape.parameters * 7 / 8)
    assert gradients.seconds > weights.seconds


def test_the_exchanges_of_fsdp_are_hidden_behind_the_computation():
    shape, work = SHAPES["llama-3.1-8b"], StepWork(64, 200, 8, 400, 400, checkpointing=True)
    training = train_share(shape, work, H100, 8, "weights")
    packs = work.share(8).packs(training.budget).number
    gathered, reduced = training.exchanges
    assert gathered.bytes == pytest.approx(2 * packs * 2 * shape.parameters * 7 / 8)
    assert reduced.bytes == pytest.approx(packs * 4 * shape.parameters * 7 / 8)
    slow = replace(H100, link=1e9)
    assert sum(part.seconds for part in training.exchanges) < 0.1 * sum(training.seconds.values())
    exposed = train_share(shape, work, slow, 8, "weights")
    alone = sum(part.bytes for part in exposed.exchanges) / (0.8 * 1e9)
    waited = sum(part.seconds for part in exposed.exchanges)
    computed = sum(part for name, part in exposed.seconds.items() if name != "optimizer")
    assert waited == pytest.approx(alone * (1 + 1 / shape.layers) - computed, rel=0.01)


def test_disaggregated_overlaps_and_colocated_does_not():
    shape, work = SHAPES["qwen2.5-7b"], StepWork(256, 200, 8, 400, 400, checkpointing=True)
    apart = disaggregated(shape, work, H100, 16, 8, 1, "weights")
    assert apart.step_seconds == max(apart.sampling_seconds + apart.transfer_seconds, apart.training_seconds)
    together = colocated(shape, work, H100, 16, "weights")
    assert together.step_seconds == together.synchronous_seconds
    transfer = next(part for part in apart.exchanges if "servers" in part.name)
    assert (transfer.bytes, transfer.link) == (2 * shape.parameters, "network")


def test_a_model_that_fits_nowhere_else_is_divided():
    work = StepWork(512, 256, 16, 1000, 4096, checkpointing=True)
    plan = plan_step(SHAPES["llama-3.1-70b"], work, H100, 64)
    assert [layout.kind for layout in plan.layouts] == [DISAGGREGATED]
    assert plan.best.tensor_parallel > 1
    assert plan.best.training.sharding == "weights"
    assert any("does not fit on GPUs that do both" in sentence for sentence in advice(plan))


def test_the_engine_needs_room_for_a_group():
    """32 B in bfloat16 leave room for a few completions, of which a group has 16; a server takes any number."""
    work = StepWork(512, 256, 16, 1000, 4096, checkpointing=True)
    together = colocated(SHAPES["qwen2.5-32b"], work, H100, 64, "weights")
    assert together.missing is not None
    assert "one prompt" in together.missing
    fewer = replace(work, samples=2, max_tokens=512, answer_tokens=300)
    assert colocated(SHAPES["qwen2.5-32b"], fewer, H100, 64, "weights").missing is None
    assert disaggregated(SHAPES["qwen2.5-32b"], work, H100, 64, 32, 2, "weights").missing is None


def test_each_mini_batch_is_divided():
    """With four updates per pass, a quarter of the prompts is there for all ranks at a time."""
    shape, work = SHAPES["smollm2-135m"], StepWork(64, 256, 16, 400, 400)
    one, four = (train_share(shape, replace(work, updates=updates), H100, 64, "optimizer") for updates in (1, 4))
    learned = [sum(part for name, part in each.seconds.items() if name != "optimizer") for each in (one, four)]
    assert learned[1] == pytest.approx(4 * learned[0])
    plan = plan_step(shape, replace(work, updates=4), H100, 512)
    assert any("Whole prompts are divided" in sentence for sentence in advice(plan))


def test_one_gpu_samples_and_learns():
    plan = make_plan(make_recipe({"model": {"source": "smollm2-135m"}}), GPUS["h200"], 1)
    assert [layout.kind for layout in plan.layouts] == [COLOCATED]
    assert plan.best.all_exchanges == ()
    assert plan.as_dict()["layouts"][0]["predicted"] is False


# --- the command line ------------------------------------------------------------------------------------------------


def run(capsys, *words):
    status = main(["plan", *words])
    return status, *capsys.readouterr()


def test_the_command_shows_a_plan(capsys):
    status, out, err = run(capsys, "gsm8k", "--gpus", "64", "--gpu", "h100", "--model-shape", "qwen2.5-7b")
    assert (status, err) == (0, "")
    for words in ("predicted", "recommended", "memory per GPU", "AdamW", "sent per GPU", "network", "bound by"):
        assert words in out
    assert "Set model.sharding" in out
    assert "everything beyond one GPU is predicted" in out
    assert "data sheet" in out


def test_the_command_prints_json(capsys):
    words = ("--gpus", "8", "--answer-tokens", "100", "--train.batch_size", "64", "--json")
    status, out, _ = run(capsys, "gsm8k", *words)
    plan = json.loads(out)
    assert status == 0
    assert (plan["gpus"], plan["gpu"]) == (8, "h100")
    assert {layout["kind"] for layout in plan["layouts"]} == {COLOCATED, DISAGGREGATED}
    assert plan["recommended"] in (COLOCATED, DISAGGREGATED)
    for layout in plan["layouts"]:
        parts = [*layout["sampling_seconds"].values(), *layout["training_seconds"].values()]
        parts += [part["seconds"] for part in layout["exchanges"]]
        assert layout["synchronous_seconds"] == pytest.approx(sum(parts))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gsm8k", "--gpu", "h10"), "h100"),
        (("gsm8k", "--gpus", "0"), "--gpus must be an integer of at least 1"),
        (("gsm8k", "--gpus", "many"), "--gpus must be"),
        (("gsm8k", "--model-shape", "llama-3.1-7b"), "llama-3.1-70b"),
        (("gsm8k", "--model.source", "somebody/unknown"), "--model-shape"),
        (("gsm8k", "--model.source", "./nowhere"), "--model-shape"),
        (("gsm8k", "--answer-tokens", "100000"), "sampling.max_new_tokens"),
        (("gsm8k", "--answer-tokens", "0"), "at least 1"),
        (("gsm8k", "--prompt-tokens", "-5"), "at least 1"),
        (("gsm8k", "--prompt-tokens", "nan"), "--prompt-tokens must be"),
        (("gsm8k", "--model.dtype", "float32"), "bfloat16"),
        (("preference-data", "--loss.policy_coef", "0", "--loss.kl_coef", "0"), "samples nothing"),
        (("gsm8k", "--train.steps", "0"), "samples nothing"),
        (("gsm8k", "--gpus", "1", "--gpu", "rtx-4090", "--model-shape", "qwen2.5-7b"), "does not fit"),
        (("gsm8k", "--gpus", "1", "--gpu", "rtx-4090", "--model-shape", "qwen2.5-7b"), "What helps: "),
        (("no-such-recipe",), "no-such-recipe"),
    ],
)
def test_wrong_words_get_a_sentence(capsys, words, message):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("shape", "gpus"), [("qwen2.5-0.5b", 1), ("qwen2.5-7b", 64), ("llama-3.1-70b", 1024)])
def test_what_is_recommended_are_settings(shape, gpus):
    plan = plan_step(SHAPES[shape], StepWork(512, 250, 16, 1000, 1024, checkpointing=True), H100, gpus)
    servers = make_recipe({"vllm": {"servers": ["http://host:8000"]}})
    for layout in plan.layouts:
        recommended = recommended_settings(layout)
        assert with_settings(servers, recommended).get("sampling.generator") == recommended["sampling.generator"]


def test_what_is_said_to_help_does_help():
    with pytest.raises(ConfigError, match=r"What helps: .*--gpus 16"):
        make_plan(make_recipe({}), GPUS["rtx-4090"], 1, model_shape="qwen2.5-7b")
    assert make_plan(make_recipe({}), GPUS["rtx-4090"], 16, model_shape="qwen2.5-7b").best.most_memory < 24e9


def test_a_plan_needs_no_torch():
    code = "import sys\nfrom groupwise.cli import main\nmain(['plan', 'gsm8k', '--gpus', '2'])\n"
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_teacher_takes_memory_and_a_forward_pass():
    def plan(distillation):
        table = {"model": {"source": "Qwen/Qwen2.5-0.5B"}, "distillation": distillation}
        return make_plan(make_recipe(table), GPUS["h200"], 2)

    plain = plan({})
    other = plan({"weight": 1.0, "teacher": "Qwen/Qwen2.5-7B"})
    teacher, parts = SHAPES["qwen2.5-7b"].parameters, 2 if other.best.training.sharding == "weights" else 1
    assert other.best.training.memory["teacher"] == 2 * teacher / parts
    assert not plain.best.training.memory["teacher"]
    assert other.work.forwards - plain.work.forwards == pytest.approx(teacher / plain.shape.parameters)
    itself = plan({"weight": 1.0, "teacher": "policy", "show": "answer"})
    assert (itself.work.forwards - plain.work.forwards, itself.work.teacher) == (1, 0)
    with pytest.raises(ConfigError, match=r"distillation\.teacher: the shape"):
        plan({"weight": 1.0, "teacher": "a/b"})
    alone = make_recipe({"loss": {"policy_coef": 0.0}, "distillation": {"weight": 1.0, "server": "http://h:1"}})
    assert any("server answers" in line for line in make_plan(alone, GPUS["h200"], 2, model_shape="qwen2.5-7b").assumed)
