"""Log-probs of pairs: the same as the naive computation, and bit-identical when read from disk."""

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
from groupwise.training.preference.reference_cache import TokenPair, pair_logps, reference_logps
from groupwise.training.update.reference import Reference
from tests.model.models import VOCABULARY, tiny
from tests.training.factories import perturb, small_llama

BLOCK, BUDGET = 64, 4096
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", BLOCK)


def make_pairs(number, seed=0):
    """Random ids; a longer list starts with the pairs of a shorter one."""
    generator = torch.Generator().manual_seed(seed)

    def ids(most):
        return torch.randint(VOCABULARY, (int(torch.randint(1, most, (1,), generator=generator)),), generator=generator)

    return [TokenPair(tuple(ids(9).tolist()), ids(7), ids(7)) for _ in range(number)]


def make_handle(model=None, **options):
    """A model and its reference."""
    handle = prepare(small_llama() if model is None else model, **options)
    return handle, Reference(MasterWeights(handle.model))


@torch.no_grad()
def naive(model, pairs):
    """Each completion on its own, by the unmodified model."""
    rows = []
    for pair in pairs:
        for answer in (pair.chosen, pair.rejected):
            logits = model(input_ids=torch.cat([torch.tensor(pair.prompt), answer])[None]).logits[0]
            logps = logits[len(pair.prompt) - 1 : -1].log_softmax(-1)
            rows.append(sum(logps[i, token] for i, token in enumerate(answer)))
    return torch.stack(rows).view(-1, 2)


class Passes:
    """Records the tokens of each forward pass. Rows longer than ``most`` do not fit into memory."""

    def __init__(self, handle, most=10**9, error=None):
        self.seen = []
        self.most, self.error = most, error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        handle.trunk.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, trunk, arguments, options):
        self.seen.append(options["input_ids"].shape[1])
        if self.seen[-1] > self.most:
            raise self.error

    def taken(self):
        """Those since the last call."""
        seen, self.seen = self.seen, []
        return seen


def files_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def flip_last_bit(weight):
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weight.element_size()]
    weight.data.view(integers).view(-1)[-1].bitwise_xor_(1)


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
@pytest.mark.parametrize("budget", [1, 40, 10**6])
def test_the_sums_are_those_of_the_naive_computation(budget, plain):
    pairs = make_pairs(30)
    handle = prepare(small_llama(), plain=plain)
    passes = Passes(handle)
    result = pair_logps(handle, pairs, token_budget=budget)
    assert result.dtype == torch.float64
    assert not result.requires_grad
    torch.testing.assert_close(result, naive(small_llama(), pairs), rtol=0, atol=1e-9)
    if plain:
        return
    once = [
        len(pair.prompt) + len(pair.chosen) + len(pair.rejected) - 2 for pair in pairs
    ]  # last tokens are not computed
    if budget == 10**6:
        assert passes.seen == [sum(once)]
    else:
        longest = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
        assert len(passes.seen) > 1
        assert max(passes.seen) <= max(budget, longest)


def test_more_than_one_block_and_no_pairs(tmp_path):
    handle, reference = make_handle()
    pairs = make_pairs(BLOCK + 5)
    done = []
    result = reference_logps(
        handle, reference, pairs, folder=tmp_path, token_budget=BUDGET, progress=lambda *d: done.append(d)
    )
    torch.testing.assert_close(result, naive(small_llama(), pairs), rtol=0, atol=1e-9)
    assert done == [(BLOCK, BLOCK + 5), (BLOCK + 5, BLOCK + 5)]
    assert torch.equal(result, pair_logps(handle, pairs, token_budget=BUDGET))
    assert pair_logps(handle, [], token_budget=BUDGET).shape == (0, 2)
    assert reference_logps(handle, reference, [], folder=tmp_path, token_budget=BUDGET).shape == (0, 2)


def test_a_long_completion_in_bfloat16_is_summed_exactly():
    """Log-probs are float32, their sum is float64."""
    handle = prepare(tiny("llama", torch.bfloat16))
    answer = torch.arange(120) % VOCABULARY
    result = pair_logps(handle, [TokenPair((3, 4), answer, answer[:1])], token_budget=BUDGET)
    assert result.dtype == torch.float64
    with torch.no_grad():
        tokens = completion_logps(handle, [[3, 4]], [[answer, answer[:1]]], token_budget=BUDGET).logps
    assert tokens.dtype == torch.float32
    assert result[0].tolist() == tokens.double().sum(1).tolist()


def test_the_reference_does_not_follow_the_policy(tmp_path):
    pairs = make_pairs(20)
    handle, reference = make_handle()
    perturb(handle.model)
    moved = {name: (weight.data_ptr(), weight.clone()) for name, weight in handle.model.named_parameters()}
    result = reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET)
    torch.testing.assert_close(result, naive(small_llama(), pairs), rtol=0, atol=1e-9)
    policy = pair_logps(handle, pairs, token_budget=BUDGET)
    assert (policy - result).abs().min() > 1e-4
    model = small_llama()
    perturb(model)
    torch.testing.assert_close(policy, naive(model, pairs), rtol=0, atol=1e-9)
    for name, weight in handle.model.named_parameters():
        assert weight.data_ptr() == moved[name][0]
        assert torch.equal(weight, moved[name][1])


@pytest.mark.parametrize("plain", [False, True], ids=["packed", "plain"])
def test_gradient_checkpointing_makes_no_difference(tmp_path, plain):
    handle, reference = make_handle(plain=plain)
    pairs = make_pairs(5)
    wanted = pair_logps(handle, pairs, token_budget=BUDGET)
    handle.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    handle.model.train()
    assert torch.equal(pair_logps(handle, pairs, token_budget=BUDGET), wanted)
    assert torch.equal(reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET), wanted)
    assert handle.model.training


def adapted(dropout=0.0, alpha=32.0):
    return add_lora(small_llama(), LoraSettings(rank=2, alpha=alpha, dropout=dropout, targets=("q_proj", "v_proj")))


def test_the_reference_of_an_adapter_with_dropout(tmp_path):
    pairs = make_pairs(20)
    model = adapted(dropout=0.5)
    handle, reference = make_handle(model)
    model.train()
    perturb(model, size=0.5)
    passes = Passes(handle)

    def logps_of_reference():
        return reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET, dropout=True)

    result = logps_of_reference()
    torch.testing.assert_close(result, naive(small_llama(), pairs), rtol=0, atol=1e-9)
    assert model.training
    assert handle.model.training
    reference.refresh()
    moved = logps_of_reference()
    model.eval()
    assert torch.equal(moved, pair_logps(handle, pairs, token_budget=BUDGET))
    assert (moved - result).abs().max() > 1e-3
    assert len({name.split("/")[0] for name in files_in(tmp_path)}) == 2
    assert len(passes.taken()) == 3


# --- the files --------------------------------------------------------------------------------------------------------


def test_blocks_on_disk_are_not_computed_again(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path))
    pairs = make_pairs(BLOCK + 40)
    handle, reference = make_handle()
    passes, done = Passes(handle), []
    first = reference_logps(handle, reference, pairs, token_budget=BUDGET)
    assert len(passes.taken()) >= 2
    files = files_in(tmp_path)
    assert len(files) == 2
    assert all(name.startswith("reference-logps/") and name.endswith(".safetensors") for name in files)
    perturb(handle.model)  # the policy is not part of the key
    again = reference_logps(handle, reference, pairs, token_budget=BUDGET, progress=lambda *d: done.append(d))
    assert passes.taken() == []
    assert torch.equal(again, first)
    assert done == [(BLOCK, BLOCK + 40), (BLOCK + 40, BLOCK + 40)]
    assert files_in(tmp_path) == files


def test_a_block_does_not_depend_on_later_blocks(tmp_path):
    handle, reference = make_handle(small_llama(torch.float32))
    passes = Passes(handle)
    pairs = make_pairs(BLOCK + 9)
    pairs[-1] = pairs[-1]._replace(chosen=torch.arange(80))  # longer than the budget, which concerns this block only
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
    """The keys of the reference and of the block."""
    folder = tmp_path / "fresh"
    handle, reference = make_handle(model, **options)
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


def test_the_reference_key_covers_everything_about_the_model(tmp_path):
    pairs = make_pairs(3)

    def key(model, **options):
        result, block = keys_of(tmp_path, model, pairs, **options)
        blocks.add(block)
        return result

    blocks = set()
    norm, head, frozen = "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.base_layer.weight"
    lora_a = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    references = {
        "unchanged": key(small_llama()),
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
        "another scaling": key(adapted(alpha=64.0)),
        "one bit of a frozen weight": key(with_one_bit(adapted().get_base_model(), frozen)),
        "one bit of the adapter": key(with_one_bit(adapted().get_base_model(), lora_a)),
    }
    assert len(set(references.values())) == len(references)
    assert len(blocks) == 1
    assert key(small_llama()) == references["unchanged"]
    assert key(adapted()) == references["lora"]
    named = with_config(small_llama(), _name_or_path="elsewhere", use_cache=False, transformers_version="4.0.0")
    assert key(named) == references["unchanged"]
    assert key(with_one_bit(with_one_bit(small_llama(), norm), norm)) == references["unchanged"]
    torch.set_num_threads(2)
    assert key(small_llama()) != references["unchanged"]


def test_the_block_key_covers_the_pairs_and_the_budget(tmp_path):
    pairs = make_pairs(3)
    first, second, third = pairs
    longer = torch.cat([second.chosen, second.rejected])
    cuts = [longer[:2], longer[2:]], [longer[:3], longer[3:]]
    changed = {
        "unchanged": pairs,
        "another token": [first._replace(prompt=(*first.prompt[:-1], (first.prompt[-1] + 1) % VOCABULARY)), *pairs[1:]],
        "completions exchanged": [TokenPair(first.prompt, first.rejected, first.chosen), second, third],
        "one fewer": pairs[:2],
        "another order": [second, first, third],
        "cut here": [first, TokenPair(second.prompt, *cuts[0]), third],
        "cut there": [first, TokenPair(second.prompt, *cuts[1]), third],
    }
    result = {name: keys_of(tmp_path, None, pairs_) for name, pairs_ in changed.items()}
    result["another budget"] = keys_of(tmp_path, None, pairs, budget=BUDGET + 1)
    assert len({reference for reference, _ in result.values()}) == 1
    assert len({block for _, block in result.values()}) == len(result)
    assert keys_of(tmp_path, None, pairs, budget=1) == keys_of(
        tmp_path, None, pairs, budget=2
    )  # the longest completion is longer


def test_damaged_and_foreign_files_are_replaced(tmp_path):
    handle, reference = make_handle(small_llama(torch.float32))
    passes, pairs = Passes(handle), make_pairs(3)
    others = make_pairs(3, seed=1)

    def load(pairs=pairs):
        return reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET)

    wanted = load()
    (name,) = files_in(tmp_path)
    path = tmp_path / name
    intact, tensors = path.read_bytes(), load_file(path)
    load(others)
    foreign = next(tmp_path / other for other in files_in(tmp_path) if other != name).read_bytes()

    def kept(logps, digest=None):
        """A file with these numbers and a digest, by default the right one."""
        save_file({"logps": logps, "digest": module._digest(path.stem, logps) if digest is None else digest}, path)
        return path.read_bytes()

    logps, digest = tensors["logps"], tensors["digest"]
    kept(logps)
    passes.taken()
    assert torch.equal(load(), wanted)
    assert passes.taken() == []
    nan = logps.clone()
    nan[1, 0] = torch.nan
    contents = [b"", b"no tensors", foreign, intact + b"more", intact[:-1]]
    contents += [intact[:length] for length in range(0, len(intact), 40)]
    contents += [kept(nan), kept(logps.float()), kept(logps[:2]), kept(logps.view(2, 3))]
    contents += [kept(logps + 1, digest), kept(logps, digest[:3])]
    save_file({"logps": tensors["logps"]}, path)
    contents.append(path.read_bytes())
    for content in contents:
        path.write_bytes(content)
        passes.taken()
        assert torch.equal(load(), wanted)
        assert len(passes.taken()) == 1
        assert path.read_bytes() == intact
    for place in range(0, len(intact), 11):  # a flipped bit never changes the result
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1 << place % 8]) + intact[place + 1 :])
        assert torch.equal(load(), wanted)


def test_a_folder_that_cannot_be_written_is_reported_once(tmp_path):
    handle, reference = make_handle()
    pairs, said = make_pairs(BLOCK + 3), []
    (tmp_path / "taken").write_text("a file")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        said.clear()
        result = reference_logps(handle, reference, pairs, folder=folder, token_budget=BUDGET, say=said.append)
        assert torch.equal(result, pair_logps(handle, pairs, token_budget=BUDGET))
        assert len(said) == 1
        assert said[0].startswith(f"the reference's log-probs cannot be written to {folder}")
        assert said[0].endswith(
            f"so the next run will compute them again: {tmp_path / 'taken'} is a file, not a folder"
        )
    assert (tmp_path / "taken").read_text() == "a file"


def test_other_files_are_used_if_one_cannot_be_written(tmp_path):
    handle, reference = make_handle()
    passes, pairs, said = Passes(handle), make_pairs(BLOCK + 3), []

    def load():
        passes.taken()
        return reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET, say=said.append)

    wanted = load()
    path = next(tmp_path / name for name in files_in(tmp_path) if len(load_file(tmp_path / name)["logps"]) == BLOCK)
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    assert torch.equal(load(), wanted)
    assert len(passes.taken()) >= 1
    assert len(said) == 1
    assert len(files_in(tmp_path)) == 2


# --- other processes --------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from groupwise.training.preference import reference_cache
from groupwise.training.preference.reference_cache import reference_logps
from tests.training.preference.test_reference_cache import BLOCK, BUDGET, make_handle, make_pairs

torch.set_num_threads(1)
reference_cache.BLOCK = BLOCK
folder, deadly = Path(sys.argv[1]), int(sys.argv[2])
pairs = make_pairs(3 * BLOCK)
handle, reference = make_handle()
print("ready", flush=True)
sys.stdin.readline()
logps = reference_logps(handle, reference, pairs, folder=folder / "shared", token_budget=BUDGET)
torch.save(logps, folder / "logps.pt")

def die(*details):
    global deadly
    deadly -= 1
    if not deadly:
        os.kill(os.getpid(), signal.SIGKILL)

handle.trunk.register_forward_hook(die)
reference_logps(handle, reference, pairs, folder=folder / "cut", token_budget=BUDGET)
"""


@pytest.mark.slow
def test_two_processes_at_once_and_one_that_is_killed(tmp_path):
    """Another process computes the same pairs in the same folder, and in another folder, where it is killed."""
    pairs = make_pairs(3 * BLOCK)
    handle, reference = make_handle()
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
        result = reference_logps(handle, reference, pairs, folder=tmp_path / "shared", token_budget=BUDGET)
        _, errors = other.communicate(timeout=600)
    assert (ready, other.returncode) == (b"ready\n", -signal.SIGKILL), errors.decode()
    assert torch.equal(result, pair_logps(handle, pairs, token_budget=BUDGET))
    assert torch.equal(result, torch.load(tmp_path / "logps.pt"))
    assert len(files_in(tmp_path / "shared")) == 3

    assert len(files_in(tmp_path / "cut")) == 2
    passes.taken()
    resumed = reference_logps(handle, reference, pairs, folder=tmp_path / "cut", token_budget=BUDGET)
    assert torch.equal(resumed, result)
    assert passes.taken() == by_block[2]
    assert files_in(tmp_path / "cut") == files_in(tmp_path / "shared")


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(None, id="gpu"),
        pytest.param(RuntimeError("can't allocate memory: you tried"), id="cpu", marks=pytest.mark.slow),
    ],
)
def test_out_of_memory_halves_the_packs(tmp_path, error):
    pairs, said = make_pairs(BLOCK + 30), []
    small, its_reference = make_handle()
    wanted = reference_logps(small, its_reference, pairs, folder=tmp_path / "small", token_budget=100)
    handle, reference = make_handle()
    passes = Passes(handle, most=120, error=error)

    def load(folder, budget=401):
        return reference_logps(handle, reference, pairs, folder=folder, token_budget=budget, say=said.append)

    assert torch.equal(load(tmp_path / "large"), wanted)
    sentence = "memory ran out: the log-probs of pairs are computed with a token budget of {}"
    assert said == [sentence.format(200), sentence.format(100)]
    seen = passes.taken()
    assert sum(tokens > 120 for tokens in seen) == 2
    assert files_in(tmp_path / "large") == files_in(tmp_path / "small")  # under the budget that fits

    assert torch.equal(load(tmp_path / "large"), wanted)
    assert len(passes.taken()) == 2  # those that fail
    assert torch.equal(pair_logps(handle, pairs, token_budget=401), wanted)
    passes.error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        load(tmp_path / "other")


def test_out_of_memory_with_a_single_completion_is_an_error(tmp_path):
    for length, budget, halves in ((5, 256, [128, SMALLEST_BUDGET]), (90, 256, [128, 64]), (90, 80, [])):
        handle, reference = make_handle()
        pointers = {name: weight.data_ptr() for name, weight in handle.model.named_parameters()}
        pairs, said = [TokenPair((1, 2), torch.arange(length), torch.tensor([3]))] * 100, []
        Passes(handle, most=1)
        with pytest.raises(OutOfMemoryError, match=rf"a single completion of a pair, {length + 2} tokens"):
            reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=budget, say=said.append)
        assert [int(sentence.split()[-1]) for sentence in said] == halves
        assert {name: weight.data_ptr() for name, weight in handle.model.named_parameters()} == pointers
    assert files_in(tmp_path) == []


# --- bad input --------------------------------------------------------------------------------------------------------


def test_nan_names_its_pair_and_is_not_written(tmp_path):
    low = [tuple(torch.as_tensor(ids) % 50 for ids in pair) for pair in make_pairs(BLOCK + 20)]
    pairs = [TokenPair(tuple(prompt.tolist()), chosen, rejected) for prompt, chosen, rejected in low]
    broken = BLOCK + 7
    pairs[broken] = TokenPair((1, 2), torch.tensor([3, 4]), torch.tensor([5, 60, 6]))
    model = small_llama()
    model.model.embed_tokens.weight.data[60] = torch.nan
    handle, reference = make_handle(model)
    sentence = rf"log-probs of pair {broken} \(counted from 0\) are -\d.* for the chosen and nan for the rejected"
    with pytest.raises(InputError, match=sentence):
        reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET)
    assert len(files_in(tmp_path)) == 1
    with pytest.raises(InputError, match=sentence):
        pair_logps(handle, pairs, token_budget=BUDGET)
    del pairs[broken]
    assert reference_logps(handle, reference, pairs, folder=tmp_path, token_budget=BUDGET).isfinite().all()
