"""Language runs that the tests of several files share. None of them may change one."""

import dataclasses

import pytest

import tiny_core
from nanochat_gka.data.tokenizer import Tokenizer
from tiny_gpt import SHAPE, awake, write_run


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """CORE's, with few questions."""
    return tiny_core.write_bundle(tmp_path_factory.mktemp("core") / "bundle")


@pytest.fixture(scope="module")
def tokenizer(tokenized):
    return Tokenizer.load(tokenized / "tokenizer")


@pytest.fixture(scope="module")
def trained(packed, tokenizer, tmp_path_factory):
    """The folder of a run that never trained, and its model."""
    form = dict(attention="GGA", head_offsets="PS", gka_values="unrotated", n_layer=3)
    model = awake(dataclasses.replace(SHAPE, vocab_size=tokenizer.vocab_size, **form))
    return write_run(tmp_path_factory.mktemp("trained") / "tiny-run", model, packed / "tokenizer"), model


@pytest.fixture(scope="session")
def long_context(tokenized, tmp_path_factory):
    """As `trained`, with a context of 64 tokens."""
    shape = dict(sequence_len=64, vocab_size=Tokenizer.load(tokenized / "tokenizer").vocab_size, attention="gka")
    model = awake(dataclasses.replace(SHAPE, head_offsets="PS", **shape))
    return write_run(tmp_path_factory.mktemp("long") / "tiny-gka", model, tokenized / "tokenizer"), model
