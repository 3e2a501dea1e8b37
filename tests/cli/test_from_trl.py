"""`groupwise from-trl`: scripts are read, not run; each field is explained; the exit status says if all is well."""

from __future__ import annotations

import json
import runpy
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.cli import main
from groupwise.config import load_recipe
from groupwise.errors import ConfigError
from groupwise.integrations.trl.config import GRPOConfig
from groupwise.integrations.trl.script import read_script
from groupwise.integrations.trl.translate import to_recipe
from groupwise.model import load_model
from groupwise.model.tiny import tiny_model, tiny_tokenizer
from tests.integrations.trl.fixtures import SCRIPTS

SCRIPT = """
    import os
    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl.rewards import think_format_reward

    open("was-run", "w").close()
    MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
    GROUP = 4
    common = dict(beta=0.04, epsilon=0.1)

    def length_reward(completions, **kwargs):
        return [float(len(text)) for text in completions]

    args = GRPOConfig(
        output_dir=os.path.join("runs", f"{MODEL.__len__}"),
        run_name=f"group-{GROUP * 2}",
        num_generations=GROUP * 2,
        learning_rate=1e-6 * 5,
        max_completion_length=2**6,
        reward_weights=[1.0, -0.5],
        model_init_kwargs={"dtype": torch.bfloat16},
        logging_steps=-(-10 // 3),
        dataloader_num_workers=4,
        eval_on_start=os.environ.get("EVAL") == "1",
        **common,
    )
    args.max_steps = 30
    trainer = GRPOTrainer(
        MODEL,
        [length_reward, think_format_reward],
        args,
        load_dataset("trl-lib/tldr", split="train"),
        peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
    )
    trainer.train()
"""


@pytest.fixture
def write(folder):
    def write(text, name="train.py"):
        (folder / name).write_text(textwrap.dedent(text))
        return name

    return write


def as_json(capsys, *words, status=0):
    capsys.readouterr()
    assert main(["from-trl", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def by_name(entries):
    return {entry["name"]: entry for entry in entries}


def test_a_script_that_runs_as_it_is(write, folder, output_of):
    text = output_of("from-trl", write(SCRIPT))
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.startswith("  ")}
    assert lines["beta"] == "beta 0.04 → loss.kl_coef = 0.04 (0 has no reference)"
    assert (
        lines["num_generations"] == "num_generations 8 → sampling.samples_per_prompt = 8 (completions of each prompt)"
    )
    assert "no effect: rows are in memory" in text
    assert "not known: os.environ.get('EVAL') == '1' (line 27)" in text
    assert "runs as it is, as far as it can be read (2 values not known)" in text
    assert "from groupwise.trl import GRPOConfig, GRPOTrainer" in text
    assert not (folder / "was-run").exists()


def test_a_field_that_changes_nothing_says_why(write, capsys):
    script = """
        import trl

        args = trl.GRPOConfig(
            "out",
            per_device_train_batch_size=4,  # cannot be without the next field
            num_generations=4,
            use_vllm=False,
            vllm_mode="server",
            ref_model_sync_steps=64,
            bf16=True,
            model_init_kwargs={"dtype": "bfloat16", "quantization_config": None},
            save_strategy="epoch",
        )
        trainer = trl.GRPOTrainer("model", len, args)
    """
    fields = by_name(as_json(capsys, write(script))["fields"])
    assert fields["use_vllm"]["text"] == "its default"
    for name in ("vllm_mode", "ref_model_sync_steps", "model_init_kwargs"):
        assert fields[name]["status"] == "no effect"
        assert "other fields leave it unused" in fields[name]["text"]
    assert "only with use_vllm" in fields["vllm_mode"]["text"]
    assert fields["save_strategy"]["status"] == "translated"  # it depends on the number of rows
    settings = fields["num_generations"]["settings"]
    assert settings["sampling.samples_per_prompt"] == 4
    assert not {"model.dtype", "train.local_batch_size"} & set(settings)


def test_a_config_class_of_the_script(write, capsys):
    script = """
        from dataclasses import dataclass
        from trl import GRPOConfig as Base, GRPOTrainer

        @dataclass
        class Config(Base):
            benchmarks: list[str] | None = None

        args = Config("out", beta=0.1, benchmarks=["aime24"], benchmark=3)
        GRPOTrainer("model", len, args)
    """
    fields = by_name(as_json(capsys, write(script), status=1)["fields"])
    assert fields["beta"]["settings"] == {"loss.kl_coef": 0.1}
    assert fields["benchmarks"]["text"] == "for the script: a field of its own class"
    assert fields["benchmark"]["status"] == "refused"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import trl\nfrom trl import ModelConfig", "import groupwise.trl as trl"),
        (
            "from trl import GRPOConfig as Config, GRPOTrainer, TrlParser",
            "from groupwise.trl import GRPOConfig as Config, GRPOTrainer, TrlParser",
        ),
        ("import trl\nfrom trl.trainer import GRPOTrainer", "from groupwise.trl import GRPOTrainer"),
    ],
)
def test_the_import_that_replaces_that_of_trl(write, output_of, before, after):
    trainer = "trl.GRPOTrainer" if "as trl" in after else "GRPOTrainer"
    text = output_of("from-trl", write(f"{before}\ntrainer = {trainer}('model', len)\n"))
    assert text.splitlines()[-2:] == ["runs as it is. Replace TRL's import by:", f"  {after}"]


def test_fields_of_trls_own_classes_in_yaml(write, capsys):
    script = write(
        "from trl import GRPOTrainer, TrlParser\nargs, = TrlParser(()).parse()\nGRPOTrainer('m', len, args)\n"
    )
    text = "dtype: bfloat16\nattn_implementation: sdpa\nlora_r: 16\noutput_dir: out\n"
    fields = by_name(as_json(capsys, script, "--config", write(text, "a.yaml"))["fields"])
    assert fields["attn_implementation"]["text"] == "for the script: a field of TRL's own classes"
    assert fields["lora_r"]["text"] == "only with use_peft"
    text += "use_peft: true\nuse_rslora: true\nload_in_4bit: true\nuse_dora: false\n"
    fields = by_name(as_json(capsys, script, "--config", write(text, "b.yaml"), status=1)["fields"])
    assert fields["lora_r"]["settings"] == {"model.lora.rank": 16}
    assert fields["use_rslora"]["settings"] == {"model.lora.rslora": True}
    assert [name for name, entry in fields.items() if entry["status"] == "refused"] == ["load_in_4bit"]


def test_the_values_of_a_script(write, capsys):
    answer = as_json(capsys, write(SCRIPT))
    fields, arguments = by_name(answer["fields"]), by_name(answer["arguments"])
    assert answer["runs"]
    assert fields["output_dir"]["status"] == fields["eval_on_start"]["status"] == "not known"
    assert fields["run_name"]["settings"] == {"run.name": "group-8"}
    assert fields["learning_rate"]["settings"] == {"optimizer.learning_rate": 1e-6 * 5}
    assert fields["max_completion_length"]["settings"] == {"sampling.max_new_tokens": 64}
    assert fields["logging_steps"]["settings"] == {"run.log_every": 4}
    assert fields["max_steps"]["settings"] == {"train.steps": 30}
    assert fields["epsilon"]["settings"] == {"loss.clip_low": 0.1}
    assert fields["dataloader_num_workers"]["status"] == "no effect"
    assert arguments["model"]["settings"] == {"model.source": "Qwen/Qwen2.5-0.5B-Instruct"}
    assert arguments["train_dataset"]["settings"] == {"data.train": "trl-lib/tldr", "data.train_split": "train"}
    assert arguments["peft_config"]["settings"] == {"model.lora.rank": 8, "model.lora.alpha": 16.0}
    assert answer["rewards"] == [
        {"function": "rewards.py:length_reward", "weight": 1.0},  # importing the script would train
        {"function": "trl.rewards:think_format_reward", "weight": -0.5},
    ]


def test_a_recipe_is_the_translation(write, output_of):
    script = """
        from trl import GRPOConfig, GRPOTrainer

        def reward(completions, **kwargs):
            return [0.0 for _ in completions]

        def main():
            config = GRPOConfig("runs/a", num_generations=4, warmup_steps=0.1, max_grad_norm=0.0, use_cpu=True)
            GRPOTrainer("tiny", reward, config, train_dataset=None).train()

        if __name__ == "__main__":
            main()
    """
    assert "wrote recipe.toml" in output_of("from-trl", write(script), "--rows", "100", "--write", "recipe.toml")
    recipe = load_recipe("recipe.toml")
    args = GRPOConfig("runs/a", num_generations=4, warmup_steps=0.1, max_grad_norm=0.0, use_cpu=True)
    rewards = [{"function": "train.py:reward"}]
    expected = to_recipe(args, rows=100, more={"model.source": "tiny", "rewards": rewards})
    different = {"data": {"max_prompt_length": 32768}, "optimizer": {"max_grad_norm": 1e30}}
    for section, values in expected.model_dump().items():
        assert recipe.model_dump()[section] == (values | different[section] if section in different else values)


@pytest.mark.slow
def test_the_recipe_of_a_script_trains_to_the_same_bits(folder, write):
    rows = [{"prompt": f"Say {number}: "} for number in range(8)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tiny_model().save_pretrained("start")
    tiny_tokenizer().save_pretrained("start")
    script = f"""
        from datasets import Dataset
        from groupwise.trl import GRPOConfig, GRPOTrainer

        def letters(completions, **kwargs):
            return [float(len(set(text))) for text in completions]

        if __name__ == "__main__":
            args = GRPOConfig(
                "out", 4, num_generations=4, steps_per_generation=4, gradient_accumulation_steps=2, beta=0.1,
                max_completion_length=6, max_steps=5, warmup_steps=2, learning_rate=1e-3, bf16=False, use_cpu=True,
                save_strategy="no", disable_tqdm=True,
            )
            trainer = GRPOTrainer("start", letters, args, Dataset.from_list({rows}))
            trainer.train()
    """
    path = write(script)
    trained = runpy.run_path(path, run_name="__main__")["trainer"].model.state_dict()
    assert main(["from-trl", path, "--rows", "8", "--write", "recipe.toml"]) == 0
    assert main(["train", "recipe.toml", "--data.train", "rows.jsonl", "--run.folder", "native"]) == 0
    model = load_model("native/model", dtype="float32", device="cpu")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, trained[name]), name
    assert not torch.equal(weight, load_model("start", dtype="float32", device="cpu").state_dict()[name])


def test_processes_and_rows_count(write, capsys):
    script = "from trl import *\nfrom trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('m', f, GRPOConfig('out'))"
    one = as_json(capsys, write(script), "--rows", "100")["settings"]
    four = as_json(capsys, write(script), "--rows", "100", "--processes", "4")["settings"]
    assert (one["train.batch_size"], one["train.steps"]) == (1, 300)
    assert (four["train.batch_size"], four["train.steps"]) == (4, 75)


def test_what_is_refused_is_said_and_no_recipe_is_written(write, folder, capsys):
    script = """
        import trl

        config = trl.GRPOConfig(output_dir="out", neftune_noise_alpha=5.0, num_generation=4, max_prompt_length=512)
        trainer = trl.GRPOTrainer(model, f, args=config, quantization_config=bnb, callbacks=None, tokenizer=tokenizer)
    """
    assert main(["from-trl", write(script), "--write", "recipe.toml"]) == 1
    text = capsys.readouterr().out
    assert "refused: 5.0 is not supported; noise on the embeddings" in text
    assert "has no such field; did you mean 'num_generations'?" in text
    assert "max_prompt_length" in text
    assert "prompts have no maximum length" in text
    assert "refused: quantized models are not supported" in text
    assert "GRPOTrainer of TRL 1.16 has no such argument; write processing_class" in text
    assert "does not run as it is: 5 things to change" in text
    assert "recipe.toml was not written" in text
    assert not (folder / "recipe.toml").exists()


def test_tools_and_environments_become_settings(write, capsys):
    script = """
        from trl import GRPOConfig, GRPOTrainer

        def search(query: str) -> str: ...

        class Shop: ...

        def main():
            config = GRPOConfig("out", max_completion_length=64, max_tool_calling_iterations=3)
            GRPOTrainer("m", f, config, {given})
    """
    settings = as_json(capsys, write(script.replace("{given}", "tools=[search]")))["settings"]
    assert settings["environment.tools"] == ["train.py:search"]
    assert (settings["environment.max_tokens"], settings["environment.max_turns"]) == (64, 4)
    report = as_json(capsys, write(script.replace("{given}", "environment_factory=Shop")))
    assert report["settings"]["environment.factory"] == "train.py:Shop"
    assert report["runs"]
    report = as_json(capsys, write(script.replace("{given}", "environment_factory=make_shop(), tools=None")))
    assert "environment.factory" not in report["settings"]
    both = as_json(capsys, write(script.replace("{given}", "tools=[search], environment_factory=Shop")))
    assert any("not both" in note for note in both["notes"])
    several = as_json(capsys, write(script.replace("{given}", "environment_factory={'a': Shop}")), status=1)
    assert not several["runs"]
    mixed = as_json(capsys, write(script.replace("{given}", "tools=[search], rollout_func=search")), status=1)
    assert mixed["problems"] == ["rollout_func cannot be combined with tools or environment_factory"]
    (entry,) = (entry for entry in report["arguments"] if entry["name"] == "environment_factory")
    assert (entry["status"], entry["text"]) == ("trainer", "called as in TRL; in a recipe environment.factory")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("GRPOConfig('out', per_device_train_batch_size=6)", "divisible by num_generations"),
        ("GRPOConfig('out', bf16=True, fp16=True)", "fp16 and bf16"),
        ("GRPOConfig('out', top_p=1.5)", "1.5 is not a finite number above 0 and at most 1"),
        ("GRPOConfig('out', steps_per_generation=3, gradient_accumulation_steps=2)", "multiple of the other"),
        ("GRPOConfig('out', num_generations='eight')", "no config can be made"),
    ],
)
def test_values_that_no_run_could_have(write, capsys, call, words):
    answer = as_json(capsys, write(f"from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('m', f, {call})"), status=1)
    texts = [*answer["problems"], *(entry["text"] for entry in answer["fields"] if entry["status"] == "refused")]
    assert any(words in text for text in texts), texts


def test_other_fields_are_explained_where_no_config_can_be_made(write, capsys):
    fields = "num_generations=6, per_device_train_batch_size=8, beta=0.1, optim='lion_32bit'"
    script = write(f"from trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('m', f, GRPOConfig('out', {fields}))")
    answer = as_json(capsys, script, status=1)
    (problem,) = answer["problems"]
    entries = by_name(answer["fields"])
    assert "divisible by num_generations (6)" in problem
    assert entries["num_generations"]["text"] == "see the problem below"
    assert entries["beta"]["settings"] == {"loss.kl_coef": 0.1}
    assert entries["optim"]["status"] == "refused"
    assert main(["from-trl", script]) == 1
    assert "2 things to change" in capsys.readouterr().out


PARSED = """
    from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

    if __name__ == "__main__":
        parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
        script_args, training_args, model_args = parser.parse_args_and_config()
        trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args, reward_funcs=f)
"""


def test_a_parser_is_said_and_its_yaml_is_read(write, capsys, output_of):
    script = write(PARSED)
    text = output_of("from-trl", script)
    assert "the config comes from TrlParser" in text
    assert "as far as it can be read (the config not known)" in text
    write("model_name_or_path: Qwen/Qwen3-0.6B\nbeta: 0.1\nnum_generation: 4\n", "grpo.yaml")
    answer = as_json(capsys, script, "--config", "grpo.yaml")
    fields = by_name(answer["fields"])
    assert answer["settings"]["model.source"] == "Qwen/Qwen3-0.6B"
    assert fields["beta"]["settings"] == {"loss.kl_coef": 0.1}
    assert "did you mean 'num_generations'" in fields["num_generation"]["text"]


def test_a_script_whose_import_is_changed_already(write, output_of):
    script = "from groupwise.trl import GRPOConfig, GRPOTrainer\nGRPOTrainer('m', f, GRPOConfig('out'))"
    assert output_of("from-trl", write(script)).splitlines()[-1] == "runs as it is"


def test_a_secret_is_not_printed(write, output_of):
    script = """
        from trl import GRPOConfig, GRPOTrainer
        TOKEN = "hf_0123456789"
        GRPOTrainer("m", f, GRPOConfig("out", hub_token=TOKEN, push_to_hub=True))
    """
    assert "hf_0123456789" not in output_of("from-trl", write(script))
    assert "hf_0123456789" not in output_of("from-trl", write(script), "--json")


def test_a_class_derived_from_the_trainer_is_said(write, output_of):
    script = """
        from trl import GRPOConfig as Config, GRPOTrainer

        class MyTrainer(GRPOTrainer):
            pass

        MyTrainer("m", f, Config("out"), None)
    """
    text = output_of("from-trl", write(script))
    assert "MyTrainer is a class of the script" in text
    assert "GRPOConfig at line 7" in text


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_the_scripts_that_run_with_the_drop_in_are_said_to_run(path, capsys):
    answer = as_json(capsys, str(path))
    assert answer["runs"]
    assert not [entry for entry in answer["fields"] if entry["status"] == "not known"]
    assert answer["fields"] or answer["parser"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "train.py, line 1: not valid Python"),
        ("print('hello')\n", "is not a script with TRL's GRPOTrainer"),
        ("from trl import SFTTrainer\nSFTTrainer('m')", "it imports trl.SFTTrainer"),
        ("\0", "not valid Python"),
        ("x = " + "(" * 5000, "train.py"),
        ("-" * 200_000 + "1", "train.py"),
    ],
)
def test_what_is_not_such_a_script(write, error_of, text, words):
    assert words in error_of("from-trl", write(text))


def test_a_script_with_two_trainers_is_not_read_as_one(write):
    with pytest.raises(ConfigError, match=r"makes 2 trainers \(lines 2, 3\)"):
        read_script(write("from trl import GRPOTrainer\nGRPOTrainer('a')\nGRPOTrainer('b')"))


def test_errors_of_the_command(write, error_of, folder):
    script = write(SCRIPT)
    assert "No such file" in error_of("from-trl", "missing.py")
    assert "--rows must be at least 1" in error_of("from-trl", script, "--rows", "0")
    assert "exists already" in error_of("from-trl", script, "--write", write("", "old.toml"))
    assert "not valid YAML" in error_of("from-trl", script, "--config", write("a: [1", "bad.yaml"))
    assert "not a table of fields" in error_of("from-trl", script, "--config", write("- 1", "list.yaml"))


def test_names_that_have_several_values_are_not_known(write):
    script = read_script(
        write(
            """
            from trl import GRPOConfig, GRPOTrainer
            a = 1
            a = 2
            if input():
                b = 3
            for c in range(3):
                d = c
            def f(e, g=1):
                h = 2
                config = GRPOConfig(top_k=a, seed=b, max_steps=d, beta=e, epsilon=g, num_iterations=h, delta=zeta)
                if e:
                    config.max_steps = 9
                return GRPOTrainer("m", [], config)
            """
        )
    )
    known = {name: value.value for name, value in script.config.arguments.items() if value.known}
    assert known == {"num_iterations": 2}


NUMBERS = st.one_of(st.integers(-50, 50), st.floats(-100, 100, allow_nan=False), st.booleans())
EXPRESSIONS = st.recursive(
    st.one_of(NUMBERS.map(repr), st.text("ab ", max_size=4).map(repr)),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        inner.map(lambda part: f"(-{part})"),
        inner.map(lambda part: f"(not {part})"),
        inner.map(lambda part: f'f"x{{{part}}}"' if '"' not in part and "'" not in part else part),
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.tuples(inner, inner, inner).map(lambda parts: f"({parts[0]} if {parts[1]} else {parts[2]})"),
        st.tuples(st.sampled_from(["int", "float", "str", "bool", "len"]), inner).map(
            lambda parts: f"{parts[0]}({parts[1]})"
        ),
    ),
    max_leaves=6,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(expression=EXPRESSIONS)
def test_a_known_value_is_the_one_that_python_computes(tmp_path_factory, expression):
    path = tmp_path_factory.getbasetemp() / "expression.py"
    path.write_text(f"from trl import *\nimport trl\ntrl.GRPOTrainer('m', f, trl.GRPOConfig(value={expression}))")
    read = read_script(path).config.arguments["value"]
    if read.known:
        assert repr(read.value) == repr(eval(expression))
