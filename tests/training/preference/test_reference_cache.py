"""Log-probs of pairs: the literal computation, kept on the disk without changing a bit."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.errors import InputError
from groupwise.model import LoraSettings
from groupwise.model.handle import prepare
from groupwise.model.logprobs import completion_logps
from groupwise.model.lora import add_lora
from groupwise.model.precision import MasterWeights
from groupwise.training.errors import SMALLEST_BUDGET, OutOfMemoryError
from groupwise.training.preference import reference_cache as module
from groupwise.training.preference.reference_cache import BLOCK, TokenPair, pair_logps, reference_logps
from groupwise.training.update.reference import Reference
from tests.model.models import VOCABULARY, tiny
from tests.training.factories import perturb, small_llama

BUDGET = 4096
ROOT = Path(__file__).parents[2]


def made_pairs(number, seed=0):
    """Random ids; a longer list starts with the pairs of a shorter one."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        return torch.randint(VOCABULARY, (int(torch.randint(1, most, (1,), generator=generator)),), generator=generator)

    return [TokenPair(tuple(ids(9).tolist()), ids(7), ids(7)) for _ in range(number)]


def made(model=None, **options):
    """A model and its reference, which is the model as it is now."""
    handle = prepare(small_llama() if model is None else model, **options)
    return handle, Reference(MasterWeights(handle.model))


@torch.no_grad()
def literal(model, pairs):
    """Each answer by itself through the model's own code."""
    rows = []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            logits = model(input_ids=torch.cat([torch.tensor(pair.prompt), answer])[None]).logits[0]
            logps = logits[len(pair.prompt) - 1 : -1].log_softmax(-1)
            rows.append(sum(logps[i, token] for i, token in enumerate(answer)))
    return torch.stack(rows).view(-1, 2)


class Passes:
    """The tokens of each pass through a model's trunk. Rows longer than ``most`` do not fit into memory."""

    def __init__(self, handle, most=10**9, error=None):
        self.seen = []
        self.most, self.error = most, error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        handle.trunk.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, trunk, arguments, options):
        self.seen.append(options["input_ids"].shape[1])
        if self.seen[-1] > self.most:
            raise self.error

    def taken(self):
        """Those since the last look."""
        seen, self.seen = self.seen, []
        return seen


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip_last_bit(weight):
    """The smallest change there is."""
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.element_size()]
    weight.data.view(integers).view(-1)[-1].bitwise_xor_(1)


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize("budget", [1, 40, 10**6])
def test_the_sums_are_those_of_the_plain_computation(budget, plain):
    pairs = made_pairs(30)
    handle = prepare(small_llama(), plain=plain)
    passes = Passes(handle)
    found = pair_logps(handle, pairs, token_budget=budget)
    assert found.dtype == torch.float64
    assert not found.requires_grad
    torch.testing.assert_close(found, literal(small_llama(), pairs), rtol=0, atol=1e-9)
    if plain:
        return
    once = [len(pair.prompt) + len(pair.chosen) + len(pair.rejected) - 2 for pair in pairs]  # no answer's last token
    if budget == 10**6:
        assert passes.seen == [sum(once)]
    else:
        longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
        assert len(passes.seen) > 1
        assert max(passes.seen) <= max(budget, longest)


def test_more_than_a_block_and_none_at_all(tmp_path):
    handle, reference = made()
    pairs = made_pairs(BLOCK + 5)
    done = []
    found = reference_logps(
        handle, reference, pairs, folder=tmp_path, token_budget=BUDGET, progress=lambda *d: done.append(d)
    )
    torch.testing.assert_close(found, literal(small_llama(), pairs), rtol=0, atol=1e-9)
    assert done == [(BLOCK, BLOCK + 5), (BLOCK + 5, BLOCK + 5)]
    assert torch.equal(found, pair_logps(handle, pairs, token_budget=BUDGET))
    assert pair_logps(handle, [], token_budget=BUDGET).shape == (0, 2)
    assert reference_logps(handle, reference, [], folder=tmp_path, token_budget=BUDGET).shape == (0, 2)


def test_a_long_answer_in_bfloat16_is_summed_exactly():
    """Its log-probs are float32 numbers, whose sum is not rounded to one of them."""
    handle = prepare(tiny("llama", torch.bfloat16))
    answer = torch.arange(120) % VOCABULARY
    found = pair_logps(handle, [TokenPair((3, 4), answer, answer[:1])], token_budget=BUDGET)
    assert found.dtype == torch.float64
    with torch.no_grad():
        tokens = completion_logps(handle, [[3, 4]], [[answer, answer[:1]]], token_budget=BUDGET).logps
    assert tokens.dtype == torch.float32
    assert found[0].tolist() == tokens.double().sum(1).tolist()


def test_the_reference_stays_when_the_policy_moves(tmp_path):
    pairs = made_pairs(20)
    handle, reference = made()
    perturb(handle.model)
    moved = {name: (weight.data_ptr(), weight.clone()) for name, weight in handle.model.named_parameters()}
    found = reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET)
    torch.testing.assert_close(found, literal(small_llama(), pairs), rtol=0, atol=1e-9)
    policy = pair_logps(handle, pairs, token_budget=BUDGET)
    assert (policy - found).abs().min() > 1e-4
    own = small_llama()
    perturb(own)
    torch.testing.assert_close(policy, literal(own, pairs), rtol=0, atol=1e-9)
    for name, weight in handle.model.named_parameters():
        assert weight.data_ptr() == moved[name][0]
        assert torch.equal(weight, moved[name][1])


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
def test_gradient_checkpointing_makes_no_difference(tmp_path, plain):
    handle, reference = made(plain=plain)
    pairs = made_pairs(5)
    wanted = pair_logps(handle, pairs, token_budget=BUDGET)
    handle.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle.model.train()
    assert torch.equal(pair_logps(handle, pairs, token_budget=BUDGET), wanted)
    assert torch.equal(reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET), wanted)
    assert handle.model.training


def adapted(dropout=0.0, alpha=32.0):
    return add_lora(small_llama(), LoraSettings(rank=2, alpha=alpha, dropout=dropout, targets=("q_proj", "v_proj")))


def test_the_reference_of_an_adapter_with_dropout(tmp_path):
    pairs = made_pairs(20)
    model = adapted(dropout=0.5)
    handle, reference = made(model)
    model.train()
    perturb(model, size=0.5)
    passes = Passes(handle)

    def reference_now():
        return reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET, dropout=True)

    found = reference_now()
    torch.testing.assert_close(found, literal(small_llama(), pairs), rtol=0, atol=1e-9)
    assert model.training
    assert handle.model.training
    reference.refresh()
    moved = reference_now()
    model.eval()
    assert torch.equal(moved, pair_logps(handle, pairs, token_budget=BUDGET))
    assert (moved - found).abs().max() > 1e-3
    assert len({name.split("/")[0] for name in files_in(tmp_path)}) == 2
    assert len(passes.taken()) == 3


# --- on the disk ------------------------------------------------------------------------------------------------------


def test_what_is_on_the_disk_is_not_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    pairs = made_pairs(BLOCK + 40)
    handle, reference = made()
    passes, done = Passes(handle), []
    first = reference_logps(handle, reference, pairs, token_budget=BUDGET)
    assert len(passes.taken()) >= 2
    files = files_in(tmp_path)
    assert len(files) == 2
    assert all(name.startswith("reference-logps/") and name.endswith(".safetensors") for name in files)
    perturb(handle.model)  # the policy is no part of a key
    again = reference_logps(handle, reference, pairs, token_budget=BUDGET, progress=lambda *d: done.append(d))
    assert passes.taken() == []
    assert torch.equal(again, first)
    assert done == [(BLOCK, BLOCK + 40), (BLOCK + 40, BLOCK + 40)]
    assert files_in(tmp_path) == files


def test_a_block_is_the_same_whatever_comes_after_it(tmp_path):
    handle, reference = made(small_llama(torch.float32))
    passes = Passes(handle)
    pairs = made_pairs(BLOCK + 9)
    pairs[-1] = pairs[-1]._replace(chosen=torch.arange(80))  # longer than the budget: this block's own affair
    kept, apart = tmp_path / "kept", tmp_path / "apart"
    first = reference_logps(handle, reference, pairs[: BLOCK + 3], folder=kept, token_budget=50)
    computed = passes.taken()
    longer = reference_logps(handle, reference, pairs, folder=kept, token_budget=50)
    assert 0 < len(passes.taken()) < len(computed) / 4
    assert torch.equal(longer[:BLOCK], first[:BLOCK])
    assert len(files_in(kept)) == 3
    assert torch.equal(reference_logps(handle, reference, pairs, folder=apart, token_budget=50), longer)
    assert len(passes.taken()) > len(computed) / 2
    assert torch.equal(pair_logps(handle, pairs, token_budget=50), longer)


def keys_of(tmp_path, model, pairs, *, budget=BUDGET, **options):
    """The names of the reference's folder and of the block's file."""
    folder = tmp_path / "fresh"
    handle, reference = made(model, **options)
    reference_logps(handle, reference, pairs, folder=folder, token_budget=budget)
    (name,) = files_in(folder)
    shutil.rmtree(folder)
    return name.split("/")


def with_one_bit(model, name):
    flip_last_bit(model.get_parameter(name))
    return model


def with_config(model, **settings):
    for name, value in settings.items():
        setattr(model.config, name, value)
    return model


def with_buffer(model, value, persistent):
    model.model.register_buffer("extra", torch.tensor(value), persistent=persistent)
    return model


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


def with_rounded_frequencies(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
    return model


def test_everything_that_decides_the_numbers_is_in_the_reference_key(tmp_path):
    pairs = made_pairs(3)

    def key(model, **options):
        found, block = keys_of(tmp_path, model, pairs, **options)
        blocks.add(block)
        return found

    blocks = set()
    norm, head, frozen = "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.base_layer.weight"
    lora_a = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    references = {
        "as it is": key(small_llama()),
        "one bit of a norm": key(with_one_bit(small_llama(), norm)),
        "one bit of the head": key(with_one_bit(small_llama(), head)),
        "float32": key(small_llama(torch.float32)),
        "bfloat16": key(small_llama(torch.bfloat16)),
        "one bit of a bfloat16": key(with_one_bit(small_llama(torch.bfloat16), head)),
        "tied": key(tied(small_llama())),
        "another setting": key(with_config(small_llama(), rms_norm_eps=1e-3)),
        "a buffer": key(with_buffer(small_llama(), 1.0, True)),
        "another buffer": key(with_buffer(small_llama(), 2.0, True)),
        "rounded frequencies": key(with_rounded_frequencies(small_llama())),
        "plain": key(small_llama(), plain=True),
        "lora": key(adapted()),
        "louder lora": key(adapted(alpha=64.0)),
        "one bit of what is not trained": key(with_one_bit(adapted().get_base_model(), frozen)),
        "one bit of the adapter": key(with_one_bit(adapted().get_base_model(), lora_a)),
    }
    assert len(set(references.values())) == len(references)
    assert len(blocks) == 1
    assert key(small_llama()) == references["as it is"]
    assert key(adapted()) == references["lora"]
    named = with_config(small_llama(), _name_or_path="elsewhere", use_cache=False, transformers_version="4.0.0")
    assert key(named) == references["as it is"]
    assert key(with_one_bit(with_one_bit(small_llama(), norm), norm)) == references["as it is"]
    torch.set_num_threads(2)
    assert key(small_llama()) != references["as it is"]


def test_everything_else_that_decides_them_is_in_the_block_key(tmp_path):
    pairs = made_pairs(3)
    first, second, third = pairs
    longer = torch.cat([second.chosen, second.rejected])
    cuts = [longer[:2], longer[2:]], [longer[:3], longer[3:]]
    changed = {
        "as they are": pairs,
        "another token": [first._replace(prompt=(*first.prompt[:-1], (first.prompt[-1] + 1) % VOCABULARY)), *pairs[1:]],
        "answers exchanged": [TokenPair(first.prompt, first.rejected, first.chosen), second, third],
        "one fewer": pairs[:2],
        "another order": [second, first, third],
        "cut here": [first, TokenPair(second.prompt, *cuts[0]), third],
        "cut there": [first, TokenPair(second.prompt, *cuts[1]), third],
    }
    found = {name: keys_of(tmp_path, None, own) for name, own in changed.items()}
    found["another budget"] = keys_of(tmp_path, None, pairs, budget=BUDGET + 1)
    assert len({reference for reference, _ in found.values()}) == 1
    assert len({block for _, block in found.values()}) == len(found)
    assert keys_of(tmp_path, None, pairs, budget=1) == keys_of(tmp_path, None, pairs, budget=2)  # the longest counts


def test_damaged_and_foreign_files_are_computed_anew(tmp_path):
    handle, reference = made(small_llama(torch.float32))
    passes, pairs = Passes(handle), made_pairs(3)
    others = made_pairs(3, seed=1)

    def found(own=pairs):
        return reference_logps(handle, reference, own, folder=tmp_path, token_budget=BUDGET)

    wanted = found()
    (name,) = files_in(tmp_path)
    path = tmp_path / name
    whole, tensors = path.read_bytes(), load_file(path)
    found(others)
    foreign = next(tmp_path / other for other in files_in(tmp_path) if other != name).read_bytes()

    def kept(logps, digest=None):
        """A file that holds these numbers, with the digest that is right for them."""
        own = module._digest(path.stem, logps) if digest is None else digest
        save_file({"logps": logps, "digest": own}, path)
        return path.read_bytes()

    logps, digest = tensors["logps"], tensors["digest"]
    kept(logps)
    passes.taken()
    assert torch.equal(found(), wanted)
    assert passes.taken() == []
    nan = logps.clone()
    nan[1, 0] = torch.nan
    contents = [b"", b"no tensors", foreign, whole + b"more", whole[:-1]]
    contents += [whole[:length] for length in range(0, len(whole), 16)]
    contents += [kept(nan), kept(logps.float()), kept(logps[:2]), kept(logps.view(2, 3))]
    contents += [kept(logps + 1, digest), kept(logps, digest[:3])]
    save_file({"logps": tensors["logps"]}, path)
    contents.append(path.read_bytes())
    for content in contents:
        path.write_bytes(content)
        passes.taken()
        assert torch.equal(found(), wanted)
        assert len(passes.taken()) == 1
        assert path.read_bytes() == whole
    for place in range(0, len(whole), 3):  # a flipped bit never shows, also where it does no harm
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert torch.equal(found(), wanted)


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    handle, reference = made()
    pairs, said = made_pairs(BLOCK + 3), []
    (tmp_path / "taken").write_text("a file")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        said.clear()
        found = reference_logps(handle, reference, pairs, folder=folder, token_budget=BUDGET, say=said.append)
        assert torch.equal(found, pair_logps(handle, pairs, token_budget=BUDGET))
        assert len(said) == 1
        assert said[0].startswith(f"the reference's log-probs cannot be kept in {folder}")
        assert said[0].endswith(
            f"so the next run will compute them again: {tmp_path / 'taken'} is a file, not a folder"
        )
    assert (tmp_path / "taken").read_text() == "a file"


def test_a_file_that_cannot_be_written_does_not_cost_the_others(tmp_path):
    handle, reference = made()
    passes, pairs, said = Passes(handle), made_pairs(BLOCK + 3), []

    def found():
        passes.taken()
        return reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET, say=said.append)

    wanted = found()
    path = next(tmp_path / name for name in files_in(tmp_path) if len(load_file(tmp_path / name)["logps"]) == BLOCK)
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    assert torch.equal(found(), wanted)
    assert len(passes.taken()) >= 1
    assert len(said) == 1
    assert len(files_in(tmp_path)) == 2


# --- other processes --------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from groupwise.training.preference.reference_cache import BLOCK, reference_logps
from tests.training.preference.test_reference_cache import BUDGET, made, made_pairs

torch.set_num_threads(1)
folder, deadly = Path(sys.argv[1]), int(sys.argv[2])
pairs = made_pairs(3 * BLOCK)
prepared, reference = made()
print("ready", flush=True)
sys.stdin.readline()
found = reference_logps(prepared, reference, pairs, folder=folder / "shared", token_budget=BUDGET)
torch.save(found, folder / "found.pt")

def die(*details):
    global deadly
    deadly -= 1
    if not deadly:
        os.kill(os.getpid(), signal.SIGKILL)

prepared.trunk.register_forward_hook(die)
reference_logps(prepared, reference, pairs, folder=folder / "cut", token_budget=BUDGET)
"""


def test_two_processes_at_once_and_one_that_is_killed(tmp_path):
    """Another process computes the same in the same folder, and again in another one, where it is killed at work."""
    pairs = made_pairs(3 * BLOCK)
    handle, reference = made()
    passes = Passes(handle)
    by_block = []
    for first in range(0, len(pairs), BLOCK):
        pair_logps(handle, pairs[first : first + BLOCK], token_budget=BUDGET)
        by_block.append(passes.taken())
    deadly = len(by_block[0]) + len(by_block[1]) + 1
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(deadly)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as other:
        ready = other.stdout.readline()
        other.stdin.write(b"go\n")
        other.stdin.flush()
        found = reference_logps(handle, reference, pairs, folder=tmp_path / "shared", token_budget=BUDGET)
        _, errors = other.communicate(timeout=120)
    assert (ready, other.returncode) == (b"ready\n", -signal.SIGKILL), errors.decode()
    assert torch.equal(found, pair_logps(handle, pairs, token_budget=BUDGET))
    assert torch.equal(found, torch.load(tmp_path / "found.pt"))
    assert len(files_in(tmp_path / "shared")) == 3

    assert len(files_in(tmp_path / "cut")) == 2
    passes.taken()
    resumed = reference_logps(handle, reference, pairs, folder=tmp_path / "cut", token_budget=BUDGET)
    assert torch.equal(resumed, found)
    assert passes.taken() == by_block[2]
    assert files_in(tmp_path / "cut") == files_in(tmp_path / "shared")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [None, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")], ids=["gpu", "cpu"]
)
def test_where_memory_runs_out_the_packs_are_halved(tmp_path, error):
    pairs, said = made_pairs(BLOCK + 30), []
    small, its_reference = made()
    wanted = reference_logps(small, its_reference, pairs, folder=tmp_path / "small", token_budget=100)
    handle, reference = made()
    passes = Passes(handle, most=120, error=error)

    def found(folder, budget=401):
        return reference_logps(handle, reference, pairs, folder=folder, token_budget=budget, say=said.append)

    assert torch.equal(found(tmp_path / "own"), wanted)
    sentence = "memory ran out: the log-probs of pairs are computed with a token budget of {}"
    assert said == [sentence.format(200), sentence.format(100)]
    seen = passes.taken()
    assert sum(tokens > 120 for tokens in seen) == 2
    assert files_in(tmp_path / "own") == files_in(tmp_path / "small")  # under the budget that was enough

    assert torch.equal(found(tmp_path / "own"), wanted)
    assert len(passes.taken()) == 2  # those that fail
    assert torch.equal(pair_logps(handle, pairs, token_budget=401), wanted)
    passes.error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        found(tmp_path / "other")


def test_the_longest_pair_is_the_end(tmp_path):
    for length, budget, halves in ((5, 256, [128, SMALLEST_BUDGET]), (90, 256, [128, 64]), (90, 80, [])):
        handle, reference = made()
        own = {name: weight.data_ptr() for name, weight in handle.model.named_parameters()}
        pairs, said = [TokenPair((1, 2), torch.arange(length), torch.tensor([3]))] * 100, []
        Passes(handle, most=1)
        with pytest.raises(OutOfMemoryError, match=rf"a single answer of a pair, {length + 2} tokens with its prompt"):
            reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=budget, say=said.append)
        assert [int(sentence.split()[-1]) for sentence in said] == halves
        assert {name: weight.data_ptr() for name, weight in handle.model.named_parameters()} == own
    assert files_in(tmp_path) == []


# --- bad input --------------------------------------------------------------------------------------------------------


def test_log_probs_that_are_not_finite_name_their_pair_and_are_not_kept(tmp_path):
    low = [tuple(torch.as_tensor(ids) % 50 for ids in pair) for pair in made_pairs(BLOCK + 20)]
    pairs = [TokenPair(tuple(prompt.tolist()), chosen, rejected) for prompt, chosen, rejected in low]
    broken = BLOCK + 7
    pairs[broken] = TokenPair((1, 2), torch.tensor([3, 4]), torch.tensor([5, 60, 6]))
    model = small_llama()
    model.model.embed_tokens.weight.data[60] = torch.nan
    handle, reference = made(model)
    sentence = rf"log-probs of pair {broken} \(counted from 0\) are -\d.* for the chosen and nan for the rejected"
    with pytest.raises(InputError, match=sentence):
        reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET)
    assert len(files_in(tmp_path)) == 1
    with pytest.raises(InputError, match=sentence):
        pair_logps(handle, pairs, token_budget=BUDGET)
    del pairs[broken]
    assert reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET).isfinite().all()


GOOD = TokenPair((1, 2), torch.tensor([3]), torch.tensor([4]))


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (GOOD._replace(prompt=()), r"^the prompt of pair 2 \(counted from 0\) is empty"),
        (GOOD._replace(chosen=torch.tensor([], dtype=torch.long)), r"^the chosen answer of pair 2 .* is empty"),
        (
            GOOD._replace(rejected=torch.tensor([VOCABULARY])),
            r"^the rejected answer of pair 2 .* the vocabulary",
        ),
        (GOOD._replace(chosen=torch.tensor([0.5])), r"^the chosen answer of pair 2 .* whole numbers"),
        (
            GOOD._replace(rejected=torch.ones(127, dtype=torch.long)),
            r"^the prompt and the longer answer of pair 2 .* have 129 tokens; the model's window is 128",
        ),
    ],
    ids=["no prompt", "no answer", "no such token", "no ids", "too long"],
)
def test_a_bad_pair_is_named_before_anything_is_computed(tmp_path, bad, sentence):
    handle, reference = made()
    passes = Passes(handle)
    with pytest.raises(InputError, match=sentence):
        reference_logps(handle, reference, [GOOD, GOOD, bad], folder=tmp_path, token_budget=BUDGET)
    with pytest.raises(InputError, match=sentence):
        pair_logps(handle, [GOOD, GOOD, bad], token_budget=BUDGET)
    assert passes.seen == []
    assert files_in(tmp_path) == []
