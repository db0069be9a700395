"""The tokenizer: text comes back, ids are rustbpe's own, special strings are text, and the file identifies it."""

import shutil

import numpy as np
import pytest
import rustbpe
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import tiny
from nanochat_gka.data import huggingface_tokenizer
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer
from nanochat_gka.tokenizer import TokenizerConfig, main, training_documents
from tiny_pack import rewrite_json

NAMES = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"
TEXT = [
    *tiny.documents(300, 5),
    "in 1234567 and 1234567, 2024 is 2024: 2024 " * 40,
    "naïve café, 東京 🦜🦜 don't we'll\r\n\tx = [1]\n\n" * 40,
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXT, 400)


@given(text=st.text())
def test_any_text_comes_back(tokenizer, text):
    ids, document = tokenizer.encode(text), tokenizer.encode_document(text)
    assert tokenizer.decode(ids) == text
    assert document.dtype == np.uint16 and document.tolist() == [tokenizer.bos_id, *ids]
    assert int(tokenizer.utf8_bytes()[ids].sum()) == len(text.encode())


# Every white space of the pattern, line ends, what \s of Python's re has beside, and letters, digits, marks, quotes.
CHARACTERS = " \t\v\f\x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\r\n\x1c\u200b\ufeffxé東1٣!'\u0301🦜"


@given(st.lists(st.tuples(st.sampled_from(CHARACTERS), st.sampled_from([1, 1, 2, 63, 64, 65, 130])), max_size=12))
def test_text_in_parts_has_the_ids_of_the_whole(tokenizer, runs):
    """The rule for long runs of blanks, on runs that the pattern's engine still takes whole."""
    text = "".join(character * count for character, count in runs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nanochat_gka.data.tokenizer.LONG_TEXT", 0)
        assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)
        assert tokenizer.encode_document(text).tolist()[1:] == tokenizer.encoding.encode_ordinary(text)


def test_a_run_of_a_million_blanks_is_encoded(tokenizer, tmp_path):
    """The ids are those of Hugging Face's tokenizer, whose engine has no such stack. Such text trains, too."""
    huggingface_tokenizer.save(tokenizer, tmp_path, 2048)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (f"one{' ' * 1_000_001}two", f"one \n{chr(9) * 1_000_001}"):
        assert [tokenizer.bos_id, *tokenizer.encode(text)] == theirs(text)["input_ids"]
        assert tokenizer.encode_document(text).tolist() == theirs(text)["input_ids"]
    assert Tokenizer.train([*TEXT, text], 400).vocab_size == 400


def test_special_tokens_have_nanochats_order_and_their_strings_are_ordinary_text(tokenizer):
    assert tokenizer.vocab_size == 400 and tokenizer.bos_id == 391
    assert [tokenizer.decode([i]) for i in range(391, 400)] == [f"<|{name}|>" for name in NAMES.split()]
    text = "".join(SPECIAL_TOKENS)
    assert max(tokenizer.encode(text)) < tokenizer.bos_id
    assert max(tokenizer.encode_document(text)[1:]) < tokenizer.bos_id


def test_ids_are_those_of_the_trainer(tokenizer):
    """rustbpe encodes with its own merges: tiktoken must read the same table out of them."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(TEXT), 391, pattern=SPLIT_PATTERN)
    for text in [*TEXT, *tiny.ODD_TEXTS]:
        assert tokenizer.encode(text) == trainer.encode(text) and tokenizer.decode(tokenizer.encode(text)) == text


def test_token_bytes(tokenizer):
    lengths = tokenizer.token_bytes()
    assert lengths.dtype == torch.int64 and len(lengths) == tokenizer.vocab_size
    assert lengths[:128].tolist() == [1] * 128
    assert lengths[128:256].tolist() == [3] * 128
    assert lengths[tokenizer.bos_id :].tolist() == [0] * 9
    merged = {tokenizer.decode([i]): int(lengths[i]) for i in range(256, tokenizer.bos_id)}
    assert merged[" kernel"] == 7 and merged[" 東京"] == 7
    whole = "the kernel mixes 東京"
    assert sum(lengths[tokenizer.encode(whole)]) == len(whole.encode())


@pytest.mark.parametrize("changes", [{"tokens": None}, {"special_tokens": ["<|eos|>"]}], ids=str)
def test_a_file_of_something_else_is_one_line(tokenizer, tmp_path, changes):
    tokenizer.save(tmp_path)
    rewrite_json(tmp_path / "tokenizer.json", **changes)
    with tiny.one_line_error("tokenizer.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_limits_of_the_training_text(packed):
    corpus = ParquetCorpus(packed / "corpus")
    for no_limit in (10**9, -1):
        assert list(training_documents(corpus, 10_000, no_limit)) == tiny.documents(400, 0)
    cut = list(training_documents(corpus, 50, 1000))
    assert cut == [text[:50] for text in tiny.documents(400, 0)[: len(cut)]]
    assert sum(map(len, cut[:-1])) <= 1000 < sum(map(len, cut))


def test_a_tokenizer_is_kept_and_one_trained_otherwise_is_refused(packed, tmp_path, capsys):
    shutil.copytree(packed / "tokenizer", tmp_path / "tokenizer")
    before = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    same = {"corpus": packed / "corpus", "out": tmp_path / "tokenizer", "vocab_size": 300}
    main(TokenizerConfig(**same))
    assert "already there, vocabulary 300" in capsys.readouterr().out
    with tiny.one_line_error(r"trained with --vocab-size 300; choose another --out"):
        main(TokenizerConfig(**{**same, "vocab_size": 301}))
    (tmp_path / "tokenizer" / "train.json").unlink()
    with tiny.one_line_error("a tokenizer and nothing that says what it was trained on; choose another"):
        main(TokenizerConfig(**same))
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_bytes() == before
