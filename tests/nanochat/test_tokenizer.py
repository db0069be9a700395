"""The tokenizer, and Hugging Face's form of it: the same ids for any text, the same text for any ids."""

import base64
import itertools
import json
import shutil

import numpy as np
import pytest
import rustbpe
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

import tiny
from nanochat_gka.data import huggingface_tokenizer
from nanochat_gka.data.corpora import ParquetCorpus
from nanochat_gka.data.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer
from nanochat_gka.tokenizer import TokenizerConfig, main, training_documents

NAMES = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"
TEXTS = [
    *tiny.documents(300, 5),
    "aabab abaaba " * 50,
    "   \n\n\n\t\t" * 99,
    "in 1234567 and 1234567, 2024 is 2024: 2024 " * 40,
    "naïve café, 東京 🦜🦜 don't we'll\r\n\tx = [1]\n\n" * 40,
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 400)


@pytest.fixture(scope="module")
def converted(tokenizer, tmp_path_factory):
    """As transformers loads it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    huggingface_tokenizer.save(tokenizer, folder, 100)
    return transformers.AutoTokenizer.from_pretrained(folder)


@given(
    text=st.one_of(st.text(), st.text("ab \n"), st.text("ab'slL1 é東🦜\r\n")),
    numbers=st.lists(st.integers(0, 399), max_size=30),
)
def test_any_text_comes_back_and_any_ids_are_the_same_text(tokenizer, converted, text, numbers):
    ids, document = tokenizer.encode(text), tokenizer.encode_document(text)
    assert tokenizer.decode(ids) == text and int(tokenizer.utf8_bytes()[ids].sum()) == len(text.encode())
    assert document.dtype == np.uint16 and document.tolist() == [tokenizer.bos_id, *ids]
    assert converted(text).input_ids == [tokenizer.bos_id, *ids]
    assert converted.decode(numbers) == tokenizer.decode(numbers)


def test_ids_are_those_of_the_trainer(tokenizer, converted):
    """rustbpe encodes with its merges: tiktoken and transformers must read the same table out of them."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(TEXTS), 391, pattern=SPLIT_PATTERN)
    for text in [*TEXTS, *tiny.ODD_TEXTS]:
        ids = trainer.encode(text)
        assert tokenizer.encode(text) == ids == converted(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text == converted.decode(ids)


# Every white space of the pattern, line ends, those that \s of Python's re has beside, and letters, digits, marks.
CHARACTERS = " \t\v\f\x85\xa0\u1680\u2000\u200a\u2028\u2029\u202f\u205f\u3000\r\n\x1c\u200b\ufeffxé東1٣!'\u0301🦜"
RUNS = st.tuples(st.sampled_from(" x") | st.sampled_from(CHARACTERS), st.sampled_from([1, 1, 2, 63, 64, 65, 130]))


@given(st.lists(RUNS, max_size=12))
def test_text_in_parts_has_the_ids_of_the_text(tokenizer, runs):
    """The rule for long runs of blanks, on runs that the pattern's engine still manages."""
    text = "".join(character * count for character, count in runs)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nanochat_gka.data.tokenizer.LONG_TEXT", 0)
        assert tokenizer.encode(text) == tokenizer.encoding.encode_ordinary(text)
        assert tokenizer.encode_document(text).tolist()[1:] == tokenizer.encoding.encode_ordinary(text)


def test_a_run_of_a_million_blanks_is_encoded_and_trains(tokenizer, converted):
    """Hugging Face's engine has no such limit."""
    for text in (f"one{' ' * 1_000_001}two", f"one \n{chr(9) * 1_000_001}"):
        assert tokenizer.encode_document(text).tolist() == converted(text).input_ids
        assert Tokenizer.train([*TEXTS, text], 400).vocab_size == 400


def test_special_tokens_have_nanochats_order_and_their_strings_are_ordinary_text(tokenizer, converted):
    assert tokenizer.vocab_size == len(converted) == 400 and tokenizer.bos_id == 391
    assert [tokenizer.decode([i]) for i in range(391, 400)] == [f"<|{name}|>" for name in NAMES.split()]
    assert max(tokenizer.encode_document("".join(SPECIAL_TOKENS))[1:]) < tokenizer.bos_id
    assert converted.bos_token == converted.eos_token == "<|bos|>" and converted.pad_token == "<|output_end|>"
    assert set(converted.all_special_tokens) == set(SPECIAL_TOKENS)
    assert converted("a<|user_start|>", split_special_tokens=False).input_ids[-1] == 392
    assert converted.padding_side == "left" and converted.model_max_length == 100


@given(words=st.lists(st.sampled_from(["abc", "xabcabd", "aaaaaaa", "dcb", "abcd", "bcbd"]) | st.text("abcd")))
def test_every_way_to_a_token_is_a_merge(words):
    """bc is older than ab, and ab than bd: abc comes from a and bc, abd from ab and d. dcb comes from nothing, and is
    met as a word alone.
    """
    longer = (b"bc", b"ab", b"abc", b"bd", b"abd", b"aa", b"aaa", b"aaaa", b"dcb")
    crossing = Tokenizer({token: rank for rank, token in enumerate([*(bytes([i]) for i in range(256)), *longer])})
    theirs = tokenizers.Tokenizer.from_str(json.dumps(huggingface_tokenizer.backend(crossing)))
    text = "\n".join(words)
    assert theirs.encode(text, add_special_tokens=False).ids == crossing.encode(text)


def test_nanochats_count_of_bytes(tokenizer):
    """A part of a character counts as U+FFFD, three bytes."""
    lengths = tokenizer.token_bytes().tolist()
    assert lengths[:256] == [1] * 128 + [3] * 128 and lengths[tokenizer.bos_id :] == [0] * 9
    assert sum(lengths[i] for i in tokenizer.encode("天the kernel")) == 9 + len("the kernel")


PAIRS = [base64.b64encode(bytes([*pair, 0])).decode() for pair in itertools.product(range(256), repeat=2)]
UNUSABLE = [  # a field of the file, its new value from the old one, and what the error says
    ("tokens", lambda tokens: ["*", *tokens], "base64"),
    ("tokens", lambda tokens: [*tokens, tokens[300]], "twice"),
    ("tokens", lambda tokens: tokens[1:], "a byte has none"),
    ("tokens", lambda tokens: tokens[:256] + PAIRS, "65,801 tokens, .* at most 65,536"),
    ("special_tokens", lambda tokens: ["<|eos|>"], "bos"),
    ("pattern", lambda pattern: "(", "pattern"),
]


@pytest.mark.parametrize("field, change, message", UNUSABLE)
def test_a_file_of_something_else_is_one_line(tokenizer, tmp_path, field, change, message):
    content = tokenizer.to_json()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {field: change(content[field])}))
    with tiny.one_line_error(f"tokenizer.json is not a tokenizer.*{message}"):
        Tokenizer.load(tmp_path)


def test_limits_of_the_training_text(packed):
    corpus, texts = ParquetCorpus(packed / "corpus"), tiny.documents(400, 0)
    assert all(list(training_documents(corpus, 10_000, no_limit)) == texts for no_limit in (10**9, -1))
    cut = list(training_documents(corpus, 50, 1000))
    assert cut == [text[:50] for text in texts[: len(cut)]]
    assert sum(map(len, cut[:-1])) <= 1000 < sum(map(len, cut))


def test_a_tokenizer_stays_and_one_trained_otherwise_is_refused(packed, tmp_path, capsys):
    """A copy of the files is no other text; the same size with other texts is."""
    out = shutil.copytree(packed / "tokenizer", tmp_path / "tokenizer")
    corpus = shutil.copytree(packed / "corpus", tmp_path / "corpus", copy_function=shutil.copyfile)
    content = (out / "tokenizer.json").read_bytes()
    config = TokenizerConfig(corpus, out, vocab_size=300)
    main(config)
    assert "already there" in capsys.readouterr().out
    with tiny.one_line_error("--vocab-size 300"):
        main(TokenizerConfig(corpus, out, vocab_size=301))
    path = corpus / "shard_00000.parquet"
    path.write_bytes(path.read_bytes().replace(b"bandwidth kernel", b"kernel bandwidth", 1))
    with tiny.one_line_error(r"1 changed \(shard_00000.parquet\); choose"):
        main(config)
    (out / "train.json").unlink()
    with tiny.one_line_error("trained on"):
        main(config)
    assert (out / "tokenizer.json").read_bytes() == content
