"""Packed rows to batches: what is read is what was written, every row once an epoch; and bits per byte."""

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
ALONE = Runtime(0, 1, CPU)


@pytest.fixture(scope="module")
def data(packed):
    return PackedData(packed / "packed")


def stored(data: PackedData, split: str) -> np.ndarray:
    """Rows as the bins hold them."""
    names = [shard["name"] for shard in data.manifest["shards"] if shard["split"] == split]
    content = b"".join((data.folder / f"{name}.bin").read_bytes() for name in names)
    return np.frombuffer(content, dtype="<u2").reshape(-1, data.sequence_len + 1).astype(np.int64)


# Damage


def change(name, changed):
    """Damage that changes the bytes of a file."""
    return lambda folder: (folder / name).write_bytes(changed((folder / name).read_bytes()))


def delete(name):
    return lambda folder: (folder / name).unlink()


def flipped(content: bytes) -> bytes:
    return content[:999] + bytes([content[999] ^ 1]) + content[1000:]


REPAIR = r"delete .*manifest.json and pack again"
DAMAGE = {
    "no manifest": (delete("manifest.json"), r"no packed data in .*manifest.json"),
    "later format": (
        change("manifest.json", lambda c: c.replace(b'"format": 1', b'"format": 99')),
        "has format 99, this version reads 1; delete",
    ),
    "missing": (delete("val_000000.bin"), f"shard .*val_000000.bin is missing; {REPAIR}"),
    "truncated": (change("train_000000.bin", lambda c: c[:-2]), rf"train_000000.bin is truncated: \d+ .*{REPAIR}"),
    "flipped": (change("val_000000.bin", flipped), rf"val_000000.bin is corrupt \(wrong checksum\); {REPAIR}"),
    "another tokenizer": (
        lambda folder: Tokenizer.train(tiny.documents(50, 9), 300).save(folder),
        f"was packed with another tokenizer than the one in it; {REPAIR}",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE)
def test_damaged_data_is_one_clear_error(packed, tmp_path, damage, message):
    shutil.copytree(packed / "packed", tmp_path / "packed")
    damage(tmp_path / "packed")
    with tiny.one_line_error(message):
        PackedData(tmp_path / "packed")


# Batches


def test_rows_of_several_shards_follow_each_other_and_targets_are_shifted_by_one(packed, tmp_path):
    """Six training shards, three of each file; a file's last one, a document, is too small to fill a row."""
    tiny.write_corpus(tmp_path / "corpus", files=3, docs=161, row_group=10)
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer", sequence_len=200))
    sharded = PackedData(tmp_path / "packed")
    shards = [shard["rows"] for shard in sharded.manifest["shards"] if shard["split"] == "train"]
    assert [rows > 1 for rows in shards] == [True, True, False] * 2
    rows, content = sharded.split("train"), stored(sharded, "train")
    ids, targets = rows.batch(range(len(rows)))
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.tolist() == content[:, :-1].tolist() and targets.tolist() == content[:, 1:].tolist()
    asked = [3, 0, 3, *range(len(rows) - 1, -1, -1)]
    assert torch.equal(rows.batch(asked)[0], ids[asked])


def test_every_row_once_an_epoch_in_a_new_order(data):
    rows = data.split("train")
    epochs = [[RowStream(rows, seed=3).locate(n) for n in range(e * len(rows), (e + 1) * len(rows))] for e in range(3)]
    assert all(Counter(order) == Counter(range(len(rows))) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != sorted(epochs[0])
    other = RowStream(rows, seed=4)
    assert [other.locate(n) for n in range(len(rows))] != epochs[0]


def check_dealt(pieces, numbers):
    """All numbers once, in order, as evenly as possible."""
    assert [number for piece in pieces for number in piece] == list(numbers)
    assert not pieces or max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 40))
def test_micro_batches_are_even_complete_and_of_two_sizes_at_most(start, count, size):
    """Each size is a shape that torch.compile compiles."""
    pieces = list(micro_batches(range(start, start + count), size))
    check_dealt(pieces, range(start, start + count))
    assert len(pieces) == -(-count // size) and all(0 < len(piece) <= size for piece in pieces)


# Bits per byte


def test_bits_per_byte_equal_upstreams():
    """Bytes are id % 5, so every fifth id counts as special; the last targets of each row are -1."""
    want, token_bytes = golden.GOLDEN["bpb"], torch.arange(100) % 5
    model = golden.fill(build(golden.CONFIG, "cpu"), "sine")
    ids, targets = golden.batch()
    ids2 = (ids + 1) % 100
    targets2 = torch.cat([ids2[:, 1:], torch.full((2, 1), -1)], dim=1)
    first = nats_and_bytes(model, (ids, targets), token_bytes)
    second = nats_and_bytes(model, (ids2, targets2), token_bytes)
    assert first[1] + second[1] == want["total_bytes"]
    for key, sums in {"bpb": first + second, "bpb_first": first, "bpb_second": second}.items():
        assert (sums[0] / sums[1] / np.log(2)).item() == pytest.approx(want[key], rel=2e-7)


@dataclass(frozen=True)
class OneOfMany(Runtime):
    """One rank alone, which keeps what it would contribute to the sum of all."""

    contributions: list = field(default_factory=list)

    def sum(self, tensor):
        self.contributions.append(tensor.clone())
        return tensor


SMALL = dict(sequence_len=tiny.SEQUENCE_LEN, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")


@pytest.fixture(scope="module")
def model(data):
    torch.manual_seed(0)
    return golden.fill(build(GPTConfig(vocab_size=data.tokenizer.vocab_size, **SMALL), "cpu"), "randn")


@pytest.fixture
def uniform(data):
    """A model that knows nothing pays log2(V) bits for each token."""
    model = build(GPTConfig(vocab_size=data.tokenizer.vocab_size, **SMALL), "cpu")
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


@pytest.mark.parametrize(
    "max_tokens,splits",
    [(-1, [(3, 16), (7, 32)]), (40 * tiny.SEQUENCE_LEN, [(1, 7), (2, 16), (64, 2)])],
    ids=["all", "some"],
)
def test_bits_per_byte_ignore_batches_and_ranks(data, model, max_tokens, splits):
    token_bytes, alone = data.tokenizer.token_bytes(), OneOfMany(0, 1, CPU)
    rows = data.eval_rows("val", max_tokens)
    value = bits_per_byte(model, rows, token_bytes, alone, batch_size=len(rows))
    total = alone.contributions[0]
    for world_size, batch_size in splits:
        ranks = [OneOfMany(rank, world_size, CPU) for rank in range(world_size)]
        for rank in ranks:
            bits_per_byte(model, rows, token_bytes, rank, batch_size)
        nats, size = sum(rank.contributions[0] for rank in ranks).tolist()
        assert size == total[1]
        assert nats / size / np.log(2) == pytest.approx(value, rel=1e-6)


def test_bits_per_byte_of_chinese_and_of_ascii(packed, data, uniform, tmp_path):
    """Every byte of the Chinese is a token. nanochat counts three bytes for each, so its figure is a third."""
    texts = ["天地玄黃宇宙洪荒日月盈昃" * 20]
    write_parquet(tmp_path / "corpus", a=texts, b=texts)
    pack.main(config(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer", split_documents="yes"))
    values = of_both_splits(uniform, PackedData(tmp_path / "packed"), -1, "upstream", ALONE, 4)
    own = np.log2(data.tokenizer.vocab_size)
    want = {"train_bpb": own / 3, "train_bpb_utf8": own, "val_bpb": own / 3, "val_bpb_utf8": own}
    assert values == pytest.approx(want, rel=1e-6) and f"{own:.6f} of the text's" in utf8_note(values, "val_bpb")
    values = of_both_splits(uniform, data, 320, "upstream", ALONE, 4)
    assert values["val_bpb"] == values["val_bpb_utf8"] and utf8_note(values, "val_bpb") == ""


def test_training_rows_for_evaluation_come_first(data):
    """If more than are kept are asked for, or all, they are the training split's own."""
    first, rows, width = data.split("train_first"), data.split("train"), data.sequence_len
    for tokens, want in ((10 * width, first.some(range(10))), (-1, rows), (10**9, rows), (1, first.some(range(1)))):
        chosen = data.eval_rows("train", tokens)
        assert len(chosen) == len(want)
        assert torch.equal(chosen.batch(range(len(want)))[1], want.batch(range(len(want)))[1])
