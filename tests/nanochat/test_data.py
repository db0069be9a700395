"""Packed rows to batches: what is read is what was written, every row once an epoch; and bits per byte."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import golden
import tiny
from nanochat_gka import pack
from nanochat_gka.data.loader import PackedData, RowStream, micro_batches
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import build
from nanochat_gka.training.bits_per_byte import bits_per_byte, nats_and_bytes, of_both_splits, utf8_note
from tiny_pack import config, write_parquet
from trainkit_gka.distributed import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(packed):
    return PackedData(packed / "packed")


def change(name, changed):
    """Damage that changes the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(changed((folder / name).read_bytes()))


def flip(content: bytes) -> bytes:
    return content[:999] + bytes([content[999] ^ 0x80]) + content[1000:]


REPAIR = "; delete .*manifest.json and pack again"
DAMAGE = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "no packed data in .*manifest.json"),
    "later format": (change("manifest.json", lambda c: c.replace(b'"format": 1', b'"format": 99')), "format 99"),
    "missing": (lambda folder: (folder / "val_000000.bin").unlink(), f"val_000000.bin is missing{REPAIR}"),
    "truncated": (change("train_000000.bin", lambda c: c[:-2]), f"train_000000.bin is truncated.*{REPAIR}"),
    "flipped": (change("val_000000.bin", flip), f"val_000000.bin is corrupt .*{REPAIR}"),
    "another tokenizer": (lambda folder: Tokenizer.train(tiny.documents(50, 9), 300).save(folder), "tokenizer"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_damaged_data_is_one_clear_error(packed, tmp_path, damage, message):
    folder = shutil.copytree(packed / "packed", tmp_path / "packed")
    damage(folder)
    with tiny.one_line_error(message):
        PackedData(folder)


OF_MANIFEST = ["sequence_len", "tokenizer_sha256", "source", "shards"]
OF_SHARD = ["name", "split", "rows", "sha256", "documents", "tokens", "upstream_rows"]


@pytest.mark.parametrize("field", OF_MANIFEST + OF_SHARD)
def test_a_field_that_is_missing_or_ill_typed_leads_to_packing_again(packed, tmp_path, field):
    folder = shutil.copytree(packed / "packed", tmp_path / "packed")
    for wrong in (None, 1e999, -1, {}, "../x"):
        content = json.loads((packed / "packed/manifest.json").read_text())
        part = content if field in OF_MANIFEST else content["shards"][-1]
        part |= {field: wrong}
        (folder / "manifest.json").write_text(json.dumps(content))
        with tiny.one_line_error(REPAIR):
            PackedData(folder)


def test_rows_of_several_shards_follow_each_other_and_targets_are_shifted_by_one(packed, tmp_path):
    """Six training shards, three of each file; a file's last one, a document, is too small to fill a row."""
    tiny.write_corpus(tmp_path / "corpus", files=3, docs=161, row_group=10)
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer", sequence_len=200))
    data = PackedData(tmp_path / "packed")
    shards = [shard for shard in data.manifest["shards"] if shard["split"] == "train"]
    assert [shard["rows"] > 1 for shard in shards] == [True, True, False] * 2
    content = np.concatenate([np.fromfile(data.folder / f"{shard['name']}.bin", "<u2") for shard in shards])
    content, rows = content.reshape(-1, 201), data.split("train")
    ids, targets = rows.batch(range(len(rows)))
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.tolist() == content[:, :-1].tolist() and targets.tolist() == content[:, 1:].tolist()
    numbers = [3, 0, 3, *range(len(rows) - 1, -1, -1)]
    assert torch.equal(rows.batch(numbers)[0], ids[numbers])


def test_ids_that_are_not_in_the_vocabulary_name_file_and_row(packed, tmp_path):
    """Of a damaged file whose checksum nobody verifies."""
    path = shutil.copytree(packed / "packed", tmp_path / "packed") / "train_000000.bin"
    content = np.fromfile(path, "<u2")
    content[tiny.SEQUENCE_LEN + 1] = 300
    content.tofile(path)
    with tiny.one_line_error(f"{path} is damaged: row 1 has id 300, and the vocabulary has 300 tokens"):
        PackedData(path.parent, verify=False).split("train").batch([0, 1])


def test_every_row_once_an_epoch_in_a_new_order(data):
    rows = data.split("train")
    epochs = [[RowStream(rows, seed=3).locate(n) for n in range(e * len(rows), (e + 1) * len(rows))] for e in range(3)]
    epochs.append([RowStream(rows, seed=4).locate(n) for n in range(len(rows))])
    assert all(Counter(order) == Counter(range(len(rows))) for order in epochs)
    assert len({*map(tuple, epochs), tuple(range(len(rows)))}) == 5


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 40))
def test_micro_batches_are_even_complete_and_of_two_sizes_at_most(start, count, size):
    """Each size is a shape that torch.compile compiles."""
    pieces = list(micro_batches(range(start, start + count), size))
    assert [number for piece in pieces for number in piece] == list(range(start, start + count))
    sizes = {len(piece) for piece in pieces}
    assert not pieces or 0 < min(sizes) <= max(sizes) <= min(size, min(sizes) + 1)
    assert len(pieces) == -(-count // size)


# Bits per byte


def test_bits_per_byte_equal_upstreams():
    """Bytes are id % 5, so every fifth id counts as special; the last targets of each row are -1."""
    want, token_bytes = golden.GOLDEN["bpb"], torch.arange(100) % 5
    model = golden.fill(build(golden.CONFIG, "cpu"), "sine")
    ids, targets = golden.batch()
    shifted = (ids + 1) % 100
    first = nats_and_bytes(model, (ids, targets), token_bytes)
    second = nats_and_bytes(model, (shifted, torch.cat([shifted[:, 1:], torch.full((2, 1), -1)], dim=1)), token_bytes)
    assert first[1] + second[1] == want["total_bytes"]
    for key, (nats, size) in {"bpb": first + second, "bpb_first": first, "bpb_second": second}.items():
        assert (nats / size / np.log(2)).item() == pytest.approx(want[key], rel=2e-7)


@dataclass(frozen=True)
class OneOfMany(Runtime):
    """One rank alone, which stores what it would contribute to the sum of all."""

    contributions: list = field(default_factory=list)

    def sum(self, tensor):
        self.contributions.append(tensor.clone())
        return tensor


@pytest.fixture(scope="module")
def model(data):
    shape = dict(sequence_len=tiny.SEQUENCE_LEN, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")
    return golden.fill(build(GPTConfig(vocab_size=data.tokenizer.vocab_size, **shape), "cpu"), "randn")


def test_bits_per_byte_ignore_batches_and_ranks(data, model):
    rows, totals = data.eval_rows("val", 40 * tiny.SEQUENCE_LEN), []
    for world_size, batch_size in ((1, 40), (3, 16), (7, 7), (64, 2)):
        ranks = [OneOfMany(rank, world_size, CPU) for rank in range(world_size)]
        values = [bits_per_byte(model, rows, data.tokenizer.token_bytes(), rank, batch_size) for rank in ranks]
        totals.append(sum(rank.contributions[0] for rank in ranks).tolist())
        if world_size == 1:
            assert values == [totals[0][0] / totals[0][1] / np.log(2)]
    assert all(total == pytest.approx(totals[0], rel=1e-6) for total in totals)


def test_bits_per_byte_of_chinese_and_of_ascii(packed, data, model, tmp_path):
    """A model that knows nothing pays log2(V) bits for each token, here a byte of the Chinese.

    nanochat counts three bytes for each of them, so its figure is a third.
    """
    model = build(model.config, "cpu")
    torch.nn.init.zeros_(model.lm_head.weight)
    texts = ["天地玄黃宇宙洪荒日月盈昃" * 20]
    write_parquet(tmp_path / "corpus", a=texts, b=texts)
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer", split_documents="yes"))
    chinese = of_both_splits(model, PackedData(tmp_path / "packed"), -1, "upstream", Runtime(0, 1, CPU), 4)
    bits = np.log2(data.tokenizer.vocab_size)
    want = {"train_bpb": bits / 3, "train_bpb_utf8": bits, "val_bpb": bits / 3, "val_bpb_utf8": bits}
    assert chinese == pytest.approx(want, rel=1e-6) and f"{bits:.6f}" in utf8_note(chinese, "val_bpb")
    ascii = of_both_splits(model, data, 320, "upstream", Runtime(0, 1, CPU), 4)
    assert ascii["val_bpb"] == ascii["val_bpb_utf8"] and utf8_note(ascii, "val_bpb") == ""
