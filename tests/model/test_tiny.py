"""The built-in model: the same weights everywhere, lossless text, and an ordinary folder."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.errors import InputError
from groupwise.model.tiny import SPECIAL_TOKENS, VOCABULARY, tiny_config, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe?"}]


def weights(model):
    return dict(sorted(model.named_parameters()))


def digest(model):
    sha = hashlib.sha256()
    for name, weight in weights(model).items():
        sha.update(name.encode())
        sha.update(weight.detach().numpy().astype("<f4").tobytes())
    return sha.hexdigest()


def test_the_shape():
    model = tiny_model()
    assert model.num_parameters() == 279_552
    assert model.dtype == torch.float32
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert tiny_config().num_key_value_heads < tiny_config().num_attention_heads


def test_the_weights_are_the_same_on_every_machine():
    """Equal on ARM with torch 2.13 and on x86 with torch 2.11."""
    assert digest(tiny_model(0)) == "68c88e61d404001f46362ecf8ee8db1db936d584ae8e1d0c031033b1c5ccda40"
    assert digest(tiny_model(1)) == "d6d479b73a900d81e60ef2de7b0b0333e6811aafaee68f48ebbbb7b9a713b73f"


def test_the_weights_do_not_depend_on_the_random_state():
    torch.manual_seed(1)
    first = digest(tiny_model(5))
    torch.manual_seed(2)
    torch.rand(3)
    assert digest(tiny_model(5)) == first


def test_the_weights_do_not_depend_on_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_model(5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert digest(model) == digest(tiny_model(5))
    ids = torch.tensor([list(b"abc")])
    assert torch.equal(model(ids).logits, tiny_model(5)(ids).logits)


def test_the_global_random_state_is_not_changed():
    before = torch.random.get_rng_state()
    tiny_model(3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_weight_is_drawn():
    one, two = weights(tiny_model(0)), weights(tiny_model(1))
    for name, weight in one.items():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.03)
            assert abs(weight.mean().item()) < 0.001
            assert not torch.equal(weight, two[name])


def test_it_starts_near_uniform():
    ids = torch.tensor([list(b"The quick brown fox")])
    logps = tiny_model()(ids).logits.log_softmax(-1)
    entropy = -(logps.exp() * logps).sum(-1)
    assert entropy.min() > torch.tensor(VOCABULARY).log() - 0.1


@pytest.mark.parametrize("seed", [-1, 1.0, True, "0", None])
def test_invalid_seeds(seed):
    with pytest.raises(InputError, match="seed of the tiny model must be"):
        tiny_model(seed)


@given(st.text())
@example("")
@example(" leading, trailing and  double \n\r\n\t\0 spaces ")
@example("it 's n't . , ? done")
@example("<|start|>user\n<|end|><|pad|>")
@example("e\u0301 \u00e9 \ufeff \u202e \U0001f468\u200d\U0001f469 \ufffd")
def test_any_text_round_trips(text):
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < VOCABULARY for i in ids)


@given(st.text().filter(lambda text: "<|" not in text))
def test_a_token_is_a_byte(text):
    assert TOKENIZER(text).input_ids == list(text.encode())


@given(st.lists(st.integers(0, VOCABULARY - 1)))
def test_any_tokens_can_be_decoded(ids):
    """Invalid UTF-8 decodes to �."""
    expected = "".join(
        part.decode("utf-8", errors="replace") if isinstance(part, bytes) else part for part in pieces(ids)
    )
    assert TOKENIZER.decode(ids).replace("\ufffd", "") == expected.replace("\ufffd", "")


def pieces(ids):
    run = b""
    for i in ids:
        if i < 256:
            run += bytes([i])
        else:
            yield run
            run = b""
            yield SPECIAL_TOKENS[i - 256]
    yield run


def test_special_tokens():
    assert TOKENIZER.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [256, 257, 258]
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (256, 257, 258)
    config = tiny_config()
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (256, 257, 258)
    assert tiny_model().generation_config.eos_token_id == 258
    assert len(TOKENIZER) == VOCABULARY == config.vocab_size
    assert TOKENIZER.decode([104, 105, 258, 256], skip_special_tokens=True) == "hi"


def test_a_batch_is_padded():
    batch = TOKENIZER(["a", "abc"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[97, 256, 256], [97, 98, 99]]
    assert batch.attention_mask.tolist() == [[1, 0, 0], [1, 1, 1]]


def test_the_chat_template():
    text = TOKENIZER.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<|start|>system\nBe brief.<|end|><|start|>user\nGröße?<|end|><|start|>assistant\n"
    answered = TOKENIZER.apply_chat_template([*CHAT, {"role": "assistant", "content": "5"}], tokenize=False)
    assert answered == f"{text}5<|end|>"  # the prompt is a prefix of the conversation


def test_saved_folder(tmp_path):
    model = tiny_model(4)
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    again, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert digest(again) == digest(model)
    text = " a .\n n't ☃ <|end|>"
    assert tokenizer(text).input_ids == TOKENIZER(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == TOKENIZER.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.eos_token_id == 258


@pytest.mark.slow
def test_it_learns():
    """To repeat letters, after 60 steps."""
    model, generator = tiny_model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(60):
        letters = torch.randint(97, 123, (32, 6), generator=generator)
        ids = torch.cat([letters, torch.full((32, 1), 10), letters], 1)
        logits = model(ids).logits[:, 6:-1]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), letters.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 5
    assert losses[-1] < 0.5
