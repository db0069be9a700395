"""Hugging Face's form of our tokenizer: the same ids for any text, the same text for any ids."""

import json

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

import tiny
from nanochat_gka.data import huggingface_tokenizer
from nanochat_gka.data.tokenizer import SPECIAL_TOKENS, Tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tokenizer of periodic, mixed and blank text, ours and as transformers loads it."""
    texts = [
        "aabab abaaba " * 50,
        "   \n\n\n\t\t" * 99,
        "naïve café, 東京 🦜🦜 don't we'll\r\n\tx = [1]" * 40,
        *tiny.documents(100, 5),
    ]
    ours, folder = Tokenizer.train(texts, 420), tmp_path_factory.mktemp("tokenizer")
    huggingface_tokenizer.save(ours, folder, 100)
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", tiny.ODD_TEXTS)
def test_odd_text_has_our_ids_and_comes_back(pair, text):
    ours, theirs = pair
    ids = theirs(text).input_ids
    assert ids == [ours.bos_id, *ours.encode(text)] and theirs.decode(ids, skip_special_tokens=True) == text


@given(
    text=st.one_of(st.text(), st.text("ab \n"), st.text("ab'slL1 é東🦜\r\n")),
    ids=st.lists(st.integers(0, 419), max_size=30),
)
def test_any_text_has_our_ids_and_any_ids_our_text(pair, text, ids):
    ours, theirs = pair
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    ids = [number for number in ids if number < ours.vocab_size]
    assert theirs.decode(ids) == ours.decode(ids)


@pytest.fixture(scope="module")
def crossing():
    """Ours and the library's, of tokens with several ways to them.

    bc is older than ab, and ab than bd: abc comes from a and bc, abd from ab and d. dcb comes from nothing, and is met
    as a whole word alone.
    """
    longer = (b"bc", b"ab", b"abc", b"bd", b"abd", b"aa", b"aaa", b"aaaa", b"dcb")
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + place for place, token in enumerate(longer)}
    ours = Tokenizer(ranks)
    return ours, tokenizers.Tokenizer.from_str(json.dumps(huggingface_tokenizer.backend(ours)))


@given(words=st.lists(st.sampled_from(["abc", "xabcabd", "aaaaaaa", "dcb", "abcd", "bcbd"]) | st.text("abcd")))
def test_every_way_to_a_token_is_a_merge(crossing, words):
    ours, theirs = crossing
    text = "\n".join(words)
    assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)


def test_special_tokens_are_there_for_who_asks(pair):
    ours, theirs = pair
    assert theirs.bos_token == theirs.eos_token == SPECIAL_TOKENS[0] and theirs.pad_token == "<|output_end|>"
    assert set(theirs.all_special_tokens) == set(SPECIAL_TOKENS)
    assert theirs.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(ours.special.values())
    text = "a<|user_start|>"
    assert theirs(text, split_special_tokens=False).input_ids == [ours.bos_id, *ours.encode("a"), ours.bos_id + 1]
    assert max(theirs(text).input_ids[1:]) < ours.bos_id and len(theirs) == ours.vocab_size
    assert theirs.padding_side == "left" and theirs.model_max_length == 100
