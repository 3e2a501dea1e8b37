"""Recipes: three layers, one sentence for every fault, and what a schedule may drive."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.algorithms import ALGORITHMS
from groupwise.config import (
    Recipe,
    load_recipe,
    make_recipe,
    parse_override,
    resolve_scheduled,
    scheduled_names,
    setting_names,
)
from groupwise.config import names as names_module
from groupwise.config.fields import choices_of, kinds_of
from groupwise.config.layers import nested
from groupwise.config.names import KNOWN_ELSEWHERE
from groupwise.config.sections import CHOICES, LoraSection
from groupwise.core.kl import ESTIMATORS
from groupwise.core.losses import LOSSES
from groupwise.errors import ConfigError

NAMES = dict(setting_names())


def refused(table, **options):
    """The sentence with which a recipe is refused."""
    with pytest.raises(ConfigError) as caught:
        make_recipe(table, **options)
    return str(caught.value)


# --- the layers ------------------------------------------------------------------------------------------------------


def test_an_empty_recipe_is_the_default_preset():
    assert make_recipe() == make_recipe({}) == make_recipe({"algorithm": "dapo"}) == Recipe()


def test_preset_below_file_below_override_key_by_key(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('algorithm = "enhanced_grpo"\n[sampling]\ntop_k = 20\n[optimizer]\nlearning_rate = 3e-6\n')
    recipe = load_recipe(path, {"sampling.top_k": 5, "train.steps": 7})
    assert recipe.sampling.top_k == 5  # all three have it: the override
    assert recipe.optimizer.learning_rate == 3e-6  # preset and file: the file
    assert recipe.sampling.samples_per_prompt == 16  # the preset alone, in a section that the others touch
    assert recipe.train.steps == 7  # the override alone
    assert recipe.optimizer.beta2 == 0.999  # nobody: the default
    assert load_recipe(path).sampling.top_k == 20


def test_the_algorithm_itself_can_be_overridden(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('algorithm = "gspo"\n')
    recipe = load_recipe(path, {"algorithm": "dr_grpo"})
    assert (recipe.algorithm, recipe.loss.name, recipe.advantages.scale) == ("dr_grpo", "dr_grpo", "none")
    assert recipe.loss.clip_low == 0.2  # nothing of the file's preset is left


def test_a_section_that_is_off_can_be_switched_on_and_off(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("[model.lora]\nrank = 4\n")
    assert load_recipe(path).model.lora.rank == 4
    assert load_recipe(path, {"model.lora.alpha": 8.0}).model.lora.model_dump() == {
        **LoraSection().model_dump(),
        "rank": 4,
        "alpha": 8.0,
    }
    assert load_recipe(path, {"model.lora": None}).model.lora is None
    assert make_recipe(overrides={"model.lora.rank": 2}).model.lora.rank == 2
    with pytest.raises(ConfigError, match=r"'model.lora.rank' cannot be set: 'lora' is not a section"):
        make_recipe(overrides={"model.lora": None, "model.lora.rank": 2})


def test_tables_with_keys_of_ones_own_are_replaced_whole():
    below = make_recipe({"data": {"chat_template_kwargs": {"a": 1}}, "ramps": {"temperature": {"at": [[0, 1.0]]}}})
    above = below.with_settings({"data.chat_template_kwargs": {"b": 2}, "ramps": {"kl_coef": {"at": [[0, 1.0]]}}})
    assert above.data.chat_template_kwargs == {"b": 2}
    assert list(above.ramps) == ["kl_coef"]


def test_a_recipe_is_never_changed():
    recipe = make_recipe()
    with pytest.raises(ValidationError):
        recipe.train.steps = 5
    with pytest.raises(ValidationError):
        recipe.algorithm = "grpo"
    other = recipe.with_settings({"sampling.temperature": 0.5})
    assert (recipe.sampling.temperature, other.sampling.temperature) == (1.0, 0.5)
    assert other.with_settings({"sampling.temperature": 1.0}) == recipe
    with pytest.raises(ConfigError, match=r"the recipe: sampling.temperature = -1 cannot be used; it should"):
        recipe.with_settings({"sampling.temperature": -1})


def test_with_settings_keeps_what_differs_from_the_preset():
    recipe = make_recipe({"algorithm": "gspo", "loss": {"clip_low": 0.1}, "rewards": [{"function": "a:b"}]})
    other = recipe.with_settings({"loss.kl_coef": 0.5})
    assert other.loss.clip_low == 0.1
    assert other.rewards == recipe.rewards


def test_get():
    assert make_recipe().get("sampling.temperature") == 1.0
    assert make_recipe().get("task") == "rows"
    assert make_recipe().get("model.lora.rank") is None
    assert make_recipe({"model": {"lora": {}}}).get("model.lora.rank") == 16


# --- a run's recipe.json ---------------------------------------------------------------------------------------------


def test_a_resolved_recipe_is_read_back_as_it_was(tmp_path):
    recipe = make_recipe(
        {
            "algorithm": "enhanced_grpo",
            "model": {"lora": {"targets": ["q_proj"]}},
            "sampling": {"top_k": None, "stop": ["\n"]},
            "masks": {"keep_sampling_mask": False},
            "rewards": [{"function": "a:b", "weight": 2}],
            "phases": [{"name": "one", "steps": 3, "temperature": 0.7}],
        }
    )
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe.model_dump()))
    assert load_recipe(path) == recipe
    assert load_recipe(path).sampling.top_k is None  # no preset beneath, whose 40 would come back otherwise
    assert load_recipe(path, {"train.steps": 3}).train.steps == 3
    assert load_recipe(path, {"algorithm": "enhanced_grpo"}) == recipe


def test_no_preset_lies_beneath_a_resolved_recipe(tmp_path):
    path = tmp_path / "recipe.json"
    path.write_text('{"algorithm": "enhanced_grpo"}')
    assert load_recipe(path).model_dump() == {**Recipe().model_dump(), "algorithm": "enhanced_grpo"}
    with pytest.raises(ConfigError, match="holds every setting of a run of 'enhanced_grpo', so the preset 'grpo'"):
        load_recipe(path, {"algorithm": "grpo"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"train": {\n  "steps": }', r"recipe.json is no valid JSON: Expecting value \(at line 2, column 12\)"),
        ("[]", "recipe.json is no recipe: a run's recipe.json is one object"),
        ('{"trian": {}}', r"recipe.json: unknown section or key 'trian'; did you mean 'train'\?"),
    ],
)
def test_a_damaged_resolved_recipe(tmp_path, text, message):
    path = tmp_path / "recipe.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_missing_recipe_names_its_neighbour(tmp_path):
    (tmp_path / "quiz.toml").write_text("")
    with pytest.raises(ConfigError, match=rf"there is no recipe {tmp_path}/quizz.toml; did you mean .*quiz.toml\?"):
        load_recipe(tmp_path / "quizz.toml")
    with pytest.raises(ConfigError, match=r"there is no recipe .*nowhere.toml$"):
        load_recipe(tmp_path / "far" / "nowhere.toml")


def test_a_recipe_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"the recipe .* cannot be read: .*Is a directory"):
        load_recipe(tmp_path)
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"the recipe .*r.toml cannot be read: .*utf-8"):
        load_recipe(path)
    path.write_text("[train]\nsteps = 3\nbatch_size = four\n")
    with pytest.raises(ConfigError, match=r"r.toml is no valid TOML: .*\(at line 3, column 14\)"):
        load_recipe(path)


# --- names that do not exist -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"trian": {"steps": 3}}, "the recipe: unknown section or key 'trian'; did you mean 'train'?"),
        ({"train": {"stps": 3}}, "the recipe: unknown key 'train.stps'; did you mean 'steps'?"),
        ({"model": {"lora": {"rnak": 3}}}, "the recipe: unknown key 'model.lora.rnak'; did you mean 'rank'?"),
        ({"train": {"temperature": 1.0}}, "the recipe: unknown key 'train.temperature'; did you mean "
                                          "'sampling.temperature' or 'evaluate.temperature'?"),
        ({"seed": 3}, "the recipe: unknown section or key 'seed'; did you mean 'train.seed'?"),
        ({"rewards": [{"function": "a:b"}, {"function": "c:d", "wieght": 1}]},
         "the recipe: unknown key 'wieght' in [[rewards]] number 2; did you mean 'weight'?"),
        ({"reference": {"zzz": 1}}, "the recipe: unknown key 'reference.zzz' (there are: refresh_every, mix)"),
        ({"algorithm": "grop"}, "the recipe: unknown algorithm 'grop'; did you mean 'grpo'? (allowed: 'dapo', 'grpo', "
                                "'dr_grpo', 'gspo', 'cispo', 'enhanced_grpo', 'enhanced_grpo_literal', "
                                "'similarity_group_grpo', 'pg_grpo', 'dpo')"),
        ({"algorithm": 5}, "the recipe: unknown algorithm 5 (allowed: 'dapo', 'grpo', 'dr_grpo', 'gspo', 'cispo', "
                           "'enhanced_grpo', 'enhanced_grpo_literal', 'similarity_group_grpo', 'pg_grpo', 'dpo')"),
        ({"loss": {"name": "dapoo"}}, "the recipe: unknown loss 'dapoo'; did you mean 'dapo'? (allowed: grpo, bnpo, "
                                      "dr_grpo, dapo, gspo, luspo, cispo, sapo, vespo, reinforce, or module:function)"),
        ({"advantages": {"scale": "grup"}}, "the recipe: advantages.scale cannot be 'grup'; did you mean 'group'? "
                                            "(allowed: group, batch, none)"),
        ({"masks": {"off_policy": 3}}, "the recipe: masks.off_policy cannot be 3 (allowed: v3.2, document)"),
        ({"model": {"dtype": "bf16"}}, "the recipe: model.dtype cannot be 'bf16'; did you mean 'bfloat16'? (allowed: "
                                       "auto, float32, bfloat16, float16, float64)"),
    ],
)  # fmt: skip
def test_a_wrong_name_has_its_nearest_neighbour(table, sentence):
    assert refused(table) == sentence


@pytest.mark.parametrize(("theirs", "ours"), KNOWN_ELSEWHERE.items())
def test_names_of_other_libraries_are_recognised(theirs, ours):
    assert ours in NAMES
    # A setting of ours may have that name too; it is then named first.
    same = "".join(f"{name!r} or " for name in NAMES if name.endswith(f".{theirs}"))
    for table in ({theirs: 1}, {"train": {theirs: 1}}):
        assert refused(table).endswith(f"{theirs}'; did you mean {same}{ours!r}?")
    with pytest.raises(ConfigError, match=re.escape(f"unknown setting --{theirs}; did you mean {same}{ours!r}?")):
        parse_override(theirs, "1")


def test_the_names_of_the_second_document_are_all_known():
    for name in ("num_generations", "max_completion_length", "beta", "epsilon", "loss_type", "scale_rewards"):
        assert name in KNOWN_ELSEWHERE


# --- values that cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("train.batch_size", 4.5, "a whole number of at least 1"),
        ("train.batch_size", 4.0, "a whole number of at least 1: write 4"),
        ("train.batch_size", 0, "a whole number of at least 1"),
        ("train.batch_size", True, "a whole number of at least 1"),
        ("train.batch_size", "4", "a whole number of at least 1: write 4 without quotes"),
        ("train.batch_size", "many", "a whole number of at least 1"),
        ("train.seed", -1, "a whole number of at least 0"),
        ("sampling.top_k", "x", "a whole number of at least 0"),
        ("sampling.temperature", "hot", "a number above 0"),
        ("sampling.temperature", "0.5", "a number above 0: write 0.5 without quotes"),
        ("sampling.temperature", 0.0, "a number above 0"),
        ("sampling.temperature", float("nan"), "a number above 0, and finite"),
        ("sampling.top_p", 1.5, "a number above 0 and at most 1"),
        ("sampling.min_p", -0.5, "a number of at least 0 and at most 1"),
        ("optimizer.beta1", 1.0, "a number of at least 0 and below 1"),
        ("loss.entropy_coef", float("inf"), "a number, and finite"),
        ("loss.dual_clip", float("inf"), "a number above 1, and finite"),
        ("data.shuffle", "yes", "true or false"),
        ("data.shuffle", 1, "true or false"),
        ("model.source", 5, "a text"),
        ("sampling.stop", "x", 'a list of texts, such as ["one", "two"]'),
        ("sampling.stop", ["x", 5], 'a list of texts, such as ["one", "two"]'),
        ("data.chat_template_kwargs", 5, "a table, such as { name = true }"),
        ("model.lora.targets", 5, 'a text or a list of texts, such as ["one", "two"]'),
        ("model.lora.targets", [5, 6], 'a text or a list of texts, such as ["one", "two"]'),
        ("model", "tiny", "a section, written [model]"),
        ("model.lora", True, "a section, written [model.lora]"),
        ("rewards", {"function": "a:b"}, "a list of tables, each under its own [[rewards]]"),
        ("rewards", [{"function": "a:b"}, 5], "a list of tables, each under its own [[rewards]]"),
        ("phases", {"steps": 5}, "a list of tables, each under its own [[phases]]"),
        ("rules", ["x"], "a list of tables, each under its own [[rules]]"),
        ("ramps", {"temperature": 5}, "a table of tables, such as temperature = { from = 1.0, to = 0.7, steps = 200 } "
                                      "under [ramps]"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_in_plain_words(name, value, expected):
    sentence = f"{name} = {value!r} cannot be used; it should be {expected}"
    assert refused(nested({name: value}), where="r.toml") == f"r.toml: {sentence}"
    assert refused({}, where="r.toml", overrides={name: value}) == f"on the command line: {sentence}"


def test_entries_of_a_list_are_counted_from_one():
    table = {"rewards": [{"function": "a:b"}, {"function": "a:c", "weight": "2"}, {"weight": 1}]}
    assert refused(table) == (
        "the recipe: [[rewards]] number 2, weight = '2' cannot be used; it should be a number: write 2 without quotes; "
        "the recipe: [[rewards]] number 3 has no 'function'"
    )


def test_all_faults_are_listed_and_each_once():
    found = refused(
        {"train": {"steps": 4.5, "stps": 1}, "model": {"lora": {"targets": 5}}},
        where="r.toml",
        overrides={"train.seed": -1},
    )
    assert found.split("; ") == [
        "r.toml: model.lora.targets = 5 cannot be used",
        'it should be a text or a list of texts, such as ["one", "two"]',
        "r.toml: train.steps = 4.5 cannot be used",
        "it should be a whole number of at least 0",
        "on the command line: train.seed = -1 cannot be used",
        "it should be a whole number of at least 0",
        "r.toml: unknown key 'train.stps'",
        "did you mean 'steps'?",
    ]


def test_whole_numbers_do_where_a_number_is_expected():
    recipe = make_recipe({"sampling": {"temperature": 1}, "train": {"epochs": 2}})
    assert isinstance(recipe.sampling.temperature, float)
    assert recipe.train.epochs == 2.0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"loss": {"name": "gspo", "ratio": "token"}}, "the loss 'gspo' has no token ratio; leave loss.ratio out or "
                                                       "use 'sequence'"),
        ({"train": {"epochs": None}}, "give train.steps or train.epochs; without either the run would have no end"),
        ({"sampling": {"min_new_tokens": 300}}, "sampling.min_new_tokens 300 is more than sampling.max_new_tokens 256"),
        ({"sampling": {"samples_per_prompt": 1}}, "sampling.samples_per_prompt is 1, so no answer has a sibling"),
        ({"masks": {"keep_sampling_mask": True}}, "masks.keep_sampling_mask renormalises over what top_k, top_p and min_p leave, "
                                             "but none of them is set"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(table, message):
    assert refused(table).startswith(f"the recipe: {message}")


@pytest.mark.parametrize(
    "table",
    [
        {"sampling": {"samples_per_prompt": 1}, "advantages": {"baseline": "none"}},
        {"sampling": {"samples_per_prompt": 1}, "advantages": {"grouping": "mine:function"}},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"top_k": 5}},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"top_p": 0.9}},
        {"masks": {"keep_sampling_mask": True}, "sampling": {"min_p": 0.1}},
        {"train": {"epochs": None, "steps": 3}},
        {"loss": {"name": "mine:loss"}},
        *({"loss": {"name": name}} for name in LOSSES),
    ],
)
def test_settings_that_do(table):
    make_recipe(table)


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHOICES)
def test_the_choices_written_out_are_the_cores(name):
    assert sorted(choices_of(NAMES[name])) == sorted(CHOICES[name])
    for choice in CHOICES[name]:
        if name != "loss.ratio":  # not every loss has both
            assert make_recipe(nested({name: choice})).get(name) == choice


def test_every_choice_that_the_core_knows_is_held_to_it():
    """A new Literal is either in CHOICES, or one that is not the core's."""
    own = {name for name, field in NAMES.items() if choices_of(field)} - set(CHOICES)
    assert own == {"model.dtype", "data.on_too_long", "scoring.on_error", "optimizer.lr_schedule", "train.on_non_finite",
                   "run.export_dtype", "advantages.difficulty", "usmle.prompt", "usmle.reading", "usmle.reward",
                   "usmle.bad_rows", "grouping.method", "grouping.dtype", "preference.pairs",
                   "preference.on_too_long"}  # fmt: skip


def test_the_other_choices_are_those_of_the_code_they_go_to():
    from groupwise.data.prompts import TOO_LONG
    from groupwise.grouping.cluster import METHODS
    from groupwise.rewards.scorer import ON_ERROR
    from groupwise.training.rollout.difficulty import WEIGHTS
    from groupwise.training.schedule.learning_rate import DECAYS
    from groupwise.training.update.exact_kl import EXACT_KL_FACTORS

    assert set(choices_of(NAMES["advantages.difficulty"])) == {"none", *WEIGHTS}
    assert set(choices_of(NAMES["loss.kl"])) == {*ESTIMATORS, *EXACT_KL_FACTORS}
    assert choices_of(NAMES["grouping.method"]) == METHODS
    assert set(choices_of(NAMES["data.on_too_long"])) == set(TOO_LONG)
    assert set(choices_of(NAMES["scoring.on_error"])) == set(ON_ERROR)
    assert set(choices_of(NAMES["optimizer.lr_schedule"])) == set(DECAYS)


def test_every_setting_has_its_sentence():
    for name, field in NAMES.items():
        assert field.description, name
        assert "{" not in field.description.replace("{enable_thinking = false}", ""), name
    assert "vespo" in NAMES["loss.name"].description
    assert all(name in NAMES["algorithm"].description for name in ALGORITHMS)


def test_kinds():
    assert kinds_of(NAMES["sampling.top_k"]) == {int, type(None)}
    assert kinds_of(NAMES["model.lora.targets"]) == {str, list}
    assert kinds_of(NAMES["loss.ratio"]) == {str, type(None)}
    assert kinds_of(NAMES["data.chat_template_kwargs"]) == {dict}
    assert kinds_of(NAMES["train.steps"]) == {int, type(None)}


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train.steps", "5", 5),
        ("train.steps", "1_000", 1000),
        ("train.steps", "007", 7),
        ("train.steps", "none", None),
        ("train.steps", "Null", None),
        ("train.steps", "4.0", 4.0),
        ("train.steps", "many", "many"),
        ("train.steps", "5\nbatch_size = 3", "5\nbatch_size = 3"),
        ("optimizer.learning_rate", "1", 1.0),
        ("optimizer.learning_rate", "1e-6", 1e-6),
        ("optimizer.learning_rate", ".5", 0.5),
        ("loss.entropy_coef", "-0.01", -0.01),
        ("loss.entropy_coef", "-1e-3", -1e-3),
        ("data.shuffle", "false", False),
        ("data.shuffle", "True", True),
        ("data.shuffle", "yes", "yes"),
        ("sampling.stop", '["a", "b"]', ["a", "b"]),
        ("model.lora.targets", '["q_proj"]', ["q_proj"]),
        ("model.lora.targets", "all-linear", "all-linear"),
        ("data.chat_template_kwargs", "{ enable_thinking = false }", {"enable_thinking": False}),
        ("model.source", "tiny", "tiny"),
        ("model.source", '"tiny"', "tiny"),
        ("data.train", "2024-01-01", "2024-01-01"),
        ("run.name", "5", "5"),
        ("run.name", "True", "True"),
        ("run.name", "none", None),
        ("advantages.scale", "none", "none"),
        ("advantages.baseline", "none", "none"),
        ("loss.ratio", "none", None),
        ("model.lora", "none", None),
        ("rewards", '[{ function = "a:b" }]', [{"function": "a:b"}]),
    ],
)
def test_overrides_are_read(name, text, value):
    found = parse_override(name, text)
    assert found == value
    assert type(found) is type(value)


@given(value=st.integers(1, 10**9))
def test_whole_numbers_go_there_and_back(value):
    assert parse_override("train.steps", str(value)) == value


@given(value=st.floats(1e-300, 1e300))
def test_numbers_go_there_and_back(value):
    assert parse_override("optimizer.learning_rate", repr(value)) == value


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_a_name(text):
    """What is a text in TOML is that text; "none" is none; everything else is what was typed."""
    found = parse_override("run.name", text)
    if text.lower() in ("none", "null"):
        assert found is None
        return
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        table = {}
    quoted = table["value"] if len(table) == 1 and isinstance(table["value"], str) else None
    assert found == (text if quoted is None else quoted)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("train.setps", "unknown setting --train.setps; did you mean 'train.steps'?"),
        ("trian.steps", "unknown setting --trian.steps; did you mean 'train.steps'? ("),
        ("modle.source", "unknown setting --modle.source; did you mean 'model.source'?"),
        ("temperature", "unknown setting --temperature; did you mean 'sampling.temperature' or "
                        "'evaluate.temperature'?"),
        ("max_new_tokns", "unknown setting --max_new_tokns; did you mean 'sampling.max_new_tokens' or "
                          "'evaluate.max_new_tokens'?"),
        ("zzz", "unknown setting --zzz (`groupwise train --help` lists all)"),
        ("reference", "--reference is a section and has no value of its own; its settings are "
                      "--reference.refresh_every, --reference.mix"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("text", ["1", "word", "true"])
def test_an_override_of_nothing(name, sentence, text):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_override(name, text)


# --- schedules -------------------------------------------------------------------------------------------------------


def test_scheduled_settings_by_bare_and_by_dotted_name():
    recipe = make_recipe()
    for bare, full in (
        ("temperature", "sampling.temperature"),
        ("kl_coef", "loss.kl_coef"),
        ("samples_per_prompt", "sampling.samples_per_prompt"),
        ("learning_rate", "optimizer.learning_rate"),
        ("clip_low", "loss.clip_low"),
        ("eps", "advantages.eps"),  # the optimizer's is fixed
        ("batch_size", "train.batch_size"),  # the warm-up's is fixed
    ):
        assert resolve_scheduled(recipe, bare) == resolve_scheduled(recipe, full) == full


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("seed", "'seed' is fixed for a run and cannot be scheduled"),
        ("model.source", "'model.source' is fixed for a run and cannot be scheduled"),
        ("optimizer.eps", "'optimizer.eps' is fixed for a run"),
        ("shuffle", "'shuffle' is fixed for a run"),
        ("unbiased", "'unbiased' is fixed for a run"),  # no number
        ("tempature", r"unknown setting 'tempature' in a schedule; did you mean 'temperature'\?$"),
        ("loss.klcoef", r"unknown setting 'loss.klcoef' in a schedule; did you mean 'loss.kl_coef'\?$"),
        ("lr", r"unknown setting 'lr' in a schedule; did you mean 'optimizer.learning_rate'\?$"),
        ("bf16", "unknown setting 'bf16' in a schedule$"),  # known elsewhere, but nothing to schedule
    ],
)
def test_settings_that_no_schedule_drives(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_scheduled(make_recipe(), name)


def test_a_bare_name_that_could_be_two(monkeypatch):
    monkeypatch.setattr(names_module, "NOT_SCHEDULED", set())
    with pytest.raises(ConfigError, match=r"'eps' could be advantages.eps or optimizer.eps; write the one that"):
        resolve_scheduled(make_recipe(), "eps")
    assert resolve_scheduled(make_recipe(), "optimizer.eps") == "optimizer.eps"


def test_what_a_schedule_may_drive_are_numbers_that_a_step_reads():
    found = scheduled_names(make_recipe({"loss": {"kl_coef": 0.3}}))
    assert found["loss.kl_coef"] == 0.3
    assert found["sampling.top_k"] is None
    assert all(not isinstance(value, (bool, str)) for value in found.values())
    sections = {name.partition(".")[0] for name in found}
    assert sections == {"sampling", "advantages", "loss", "preference", "masks", "reference", "optimizer", "scoring",
                        "train"}  # fmt: skip
    assert "train.steps" not in found
    assert "sampling.max_num_seqs" not in found


def test_no_setting_is_literal_outside_its_words():
    """`choices_of` finds what the annotation says, also behind `| None`."""
    assert choices_of(NAMES["masks.off_policy"]) == ("v3.2", "reference_drift")
    assert choices_of(NAMES["loss.name"]) == ()
    assert get_origin(NAMES["optimizer.lr_schedule"].annotation) is Literal
    assert get_args(NAMES["optimizer.lr_schedule"].annotation) == choices_of(NAMES["optimizer.lr_schedule"])


BESIDE = """
task = "own.py:task"
rewards = [{ function = "own.py:one" }, { function = "groupwise.rewards:length" }, { function = "none.py:two" }]
[data]
train = "rows.jsonl"
held_out = "owner/name"
[loss]
name = "own.py:loss"
[advantages]
function = "own.py:advantage"
grouping = "prompt"
"""


def test_files_beside_a_recipe(tmp_path, monkeypatch):
    folder, here = tmp_path / "some recipes", tmp_path / "here"
    for each in (folder, here):
        each.mkdir()
    for name in ("own.py", "rows.jsonl", "recipe.toml"):
        (folder / name).write_text(BESIDE)
    (here / "own.py").write_text("")
    monkeypatch.chdir(here)
    found = load_recipe("../some recipes/recipe.toml", {"advantages.grouping": "own.py:grouping"})
    beside = "../some recipes"
    assert found.task == f"{beside}/own.py:task"
    assert [each.function for each in found.rewards] == [
        f"{beside}/own.py:one",
        "groupwise.rewards:length",
        "none.py:two",
    ]
    assert (found.data.train, found.data.held_out) == (f"{beside}/rows.jsonl", "owner/name")
    assert (found.loss.name, found.advantages.function) == (f"{beside}/own.py:loss", f"{beside}/own.py:advantage")
    assert found.advantages.grouping == "own.py:grouping"
    # A run keeps the names by which it found its files, and looks for nothing beside its own recipe.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "own.py").write_text("")
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(found.model_dump()))
    assert load_recipe(tmp_path / "run" / "recipe.json") == found


@pytest.mark.parametrize("text", ["rewards = 3", "rewards = [3]", "data = 3", "task = 3", "[data]\ntrain = 3"])
def test_a_fault_where_a_file_may_be_named(tmp_path, text):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.toml: "):
        load_recipe(tmp_path / "recipe.toml")
