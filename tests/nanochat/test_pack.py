"""Packing: nanochat's rows are upstream's, own text is not cropped, and a kill, damage or parts change no row."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import golden
import tiny
from nanochat_gka import corpus, pack, tokenizer
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.packing import best_fit_rows
from nanochat_gka.data.tokenizer import Tokenizer
from processes import descendants, environment, still_there
from tiny_pack import bins, config, rewrite_json, write_parquet

BOS = 50_000


# The rules


def cut(documents: list, size: int) -> list[list]:
    """Batches of `size`, the last one shorter."""
    return [documents[first : first + size] for first in range(0, len(documents), size)]


def test_rows_are_upstreams():
    want = golden.GOLDEN["packing"]
    lengths = [3 + (k * k * 31 + 17 * k) % 61 for k in range(400)]
    documents = [np.array([BOS] + [k] * length, dtype=np.uint16) for k, length in enumerate(lengths)]
    rows = best_fit_rows(cut(documents, want["tokenizer_batch_size"]), want["T"] + 1, buffer_size=want["buffer_size"])
    expected = [[token for token, count in runs for _ in range(count)] for runs in want["rows"]]
    assert [next(rows).tolist() for _ in expected] == expected


@given(st.lists(st.lists(st.integers(0, 200), max_size=9), max_size=12), st.integers(2, 60), st.integers(1, 30))
def test_every_token_of_split_documents_is_in_a_row_once(lengths, capacity, buffer_size):
    """But those of the last row. Tokens are numbered through the documents, so the rows show where each went."""
    numbers = iter(range(BOS))
    batches = [[[BOS, *(next(numbers) for _ in range(length))] for length in batch] for batch in lengths]
    firsts = [document[1] for batch in batches for document in batch if len(document) > 1]
    arrays = [[np.array(document, dtype=np.uint16) for document in batch] for batch in batches]
    rows = [row.tolist() for row in best_fit_rows(iter(arrays), capacity, buffer_size, split_documents=True)]
    assert all(len(row) == capacity and row[0] == BOS for row in rows)
    tokens = [token for row in rows for token in row if token != BOS]
    assert len(set(tokens)) == len(tokens)
    assert next(numbers) - len(tokens) < capacity
    for row in rows:  # within a row, what follows a token without a BOS between them follows it in its document
        for before, after in itertools.pairwise(row):
            assert BOS in (before, after) or (after == before + 1 and after not in firsts)


# nanochat's rows


def upstream_rows(paths: list[Path], vocabulary: Tokenizer, capacity: int, count: int) -> list[list[int]]:
    """The first rows of nanochat's loader with one process, which begins again when the files have been read."""
    files = (pq.ParquetFile(path) for path in itertools.cycle(paths))
    groups = (file.read_row_group(group).column("text") for file in files for group in range(file.num_row_groups))
    documents = ([vocabulary.encode_document(text) for text in texts.to_pylist()] for texts in groups)
    rows = best_fit_rows((batch for group in documents for batch in cut(group, 128)), capacity, buffer_size=1000)
    return [next(rows).tolist() for _ in range(count)]


def test_rows_for_evaluation_are_upstreams_and_are_called_so(tmp_path):
    """As far as nanochat's loader reads a file before its buffer runs empty, and as far as they are stored.

    Row groups have sizes that 128 does not divide, empty documents, and documents longer than a row.
    """
    schema, sizes = pa.schema([("text", pa.string())]), [1, 77, 130, 300, 129, 513] * 3
    paths = [write_parquet(tmp_path / "corpus") / f"{number}.parquet" for number in range(3)]
    for number, path in enumerate(paths):
        documents = enumerate(tiny.documents(2500, number))
        texts = ["" if k % 11 == 3 else text * (9 if k % 13 == 5 else 1) for k, text in documents]
        with pq.ParquetWriter(path, schema) as writer:
            for first, size in zip(np.cumsum([0, *sizes]), sizes):
                writer.write_table(pa.table({"text": texts[first : first + size]}, schema))
    tokenizer.main(tokenizer.TokenizerConfig(tmp_path / "corpus", tmp_path / "tokenizer", vocab_size=300))
    pack.main(config(tmp_path, tmp_path / "packed"))
    data = PackedData(tmp_path / "packed")
    shards = {shard["name"]: shard for shard in data.manifest["shards"]}
    counts = {}
    for split, name, files in (("val", "val", paths[-1:]), ("train", "train_first", paths[:-1])):
        counts[split] = count = shards[f"{name}_000000"]["upstream_rows"]
        assert len(data.split(name)) > count > 500
        ids, targets = data.eval_rows(split, count * 32).batch(range(count))
        rows = torch.cat([ids, targets[:, -1:]], dim=1).tolist()
        assert rows == upstream_rows(files, data.tokenizer, 33, count)
    covered, stored = min(counts.values()), len(data.split("train_first"))
    assert covered < stored < len(data.split("train"))
    for tokens, name, count in (
        (1, "train_first", 1),
        (320, "train_first", 10),
        (-1, "train", len(data.split("train"))),
    ):
        rows = data.eval_rows("train", tokens)
        assert len(rows) == count and torch.equal(rows.batch(range(count))[1], data.split(name).batch(range(count))[1])
    names = [data.name_rows(count * 32) for count in (covered, covered + 1, stored + 1)]
    assert names == ["upstream", "first", "first"] and data.name_rows(covered * 32, "spaced") == "spaced"


# People's own text


LONG = "\n\n".join(" ".join(tiny.documents(3, number)) for number in range(120))
TEXTS = [LONG, LONG.upper(), *tiny.documents(30, 1)]


@pytest.fixture(scope="module")
def books(packed, tmp_path_factory):
    """A corpus of two books of 360 sentences and some notes, the tokenizer, and rows of both kinds."""
    root = tmp_path_factory.mktemp("books")
    write_parquet(root / "corpus", shard_00000=TEXTS, shard_00001=[LONG.title()])
    shutil.copytree(packed / "tokenizer", root / "tokenizer")
    for name, choice in (("unsplit", "no"), ("split", "auto")):
        pack.main(config(root, root / name, split_documents=choice))
    return root


def test_own_text_is_not_cropped(books, capsys):
    """nanochat's rows hold the beginning of a book and drop its rest, and then packing prints what to change."""
    for name, choice in (("unsplit", "no"), ("split", "auto")):
        pack.main(config(books, books / name, split_documents=choice))
        output = capsys.readouterr().out
        assert ("--split-documents yes" in output) == ("in no row" in output) == (name == "unsplit")
    data = PackedData(books / "split")
    rows = np.fromfile(data.folder / "train_000000.bin", "<u2").reshape(-1, data.sequence_len + 1)
    in_rows = np.sum(rows != data.tokenizer.bos_id)
    tokens = sum(len(data.tokenizer.encode(text)) for text in TEXTS)
    assert tokens - 33 < in_rows <= tokens and (rows[:, 0] == data.tokenizer.bos_id).all()
    assert sum(shard["pieces"] for shard in data.manifest["shards"]) > 33
    assert data.name_rows(320) == "spaced"


def test_rows_of_fineweb_stay_nanochats(books, tmp_path):
    """By the note of the command that fetches FineWeb-Edu: in the folder it was fetched to and in one of links."""
    for source in ("fineweb", "other"):
        folder = shutil.copytree(books / "corpus", tmp_path / source)
        (folder / "source.json").write_text(json.dumps({"source": source}))
    corpus.main(corpus.CorpusConfig("fineweb", tmp_path / "linked", 2, downloads=tmp_path / "fineweb"))
    for name in ("fineweb", "linked", "other"):
        out = tmp_path / f"packed-{name}"
        pack.main(config(books, out, corpus=tmp_path / name, split_documents="auto"))
        assert (bins(out) == bins(books / "unsplit")) == (name != "other")


def test_a_run_is_not_continued_on_other_rows_of_the_same_text(books, tmp_path):
    """Split where the run's were not, or packed in another way."""
    shutil.copytree(books / "unsplit", tmp_path / "other")
    shards = json.loads((tmp_path / "other/manifest.json").read_text())["shards"]
    next(shard for shard in shards if shard["split"] == "train")["sha256"] = "0" * 64
    rewrite_json(tmp_path / "other/manifest.json", shards=shards)
    folders = {"split": books / "split", "unsplit": books / "unsplit", "other": tmp_path / "other"}
    data = {name: PackedData(folder, verify=False) for name, folder in folders.items()}
    for now, before in itertools.permutations(data, 2):
        saved = data[before].provenance(tmp_path)
        data[before].check_same(saved, tmp_path)
        with tiny.one_line_error("another --split-documents" if "split" in (now, before) else "another version"):
            data[now].check_same(saved, tmp_path)


def test_rows_of_something_else_are_refused(packed, tmp_path):
    out = shutil.copytree(packed / "packed", tmp_path / "packed")
    tokenizer.main(tokenizer.TokenizerConfig(corpus=packed / "corpus", out=tmp_path / "tokenizer", vocab_size=290))
    tiny.write_corpus(tmp_path / "corpus", docs=401)
    for changes, message in (
        ({"sequence_len": 33}, "sequence length 32; choose another --out"),
        ({"tokenizer": tmp_path / "tokenizer"}, "another tokenizer"),
        ({"corpus": tmp_path / "corpus"}, r"2 changed \(shard_00000.parquet, shard_00001.parquet"),
        ({"split_documents": "yes"}, "--split-documents no"),
    ):
        with tiny.one_line_error(message):
            pack.main(config(packed, out, **changes))
    assert bins(out) == bins(packed / "packed")
    pack.main(config(packed, out))


def test_a_small_corpus_packs_at_a_lower_length(packed, tmp_path):
    with tiny.one_line_error("too small for rows of 100000 tokens.*lower --sequence-len"):
        pack.main(config(packed, tmp_path / "packed", sequence_len=100_000))
    pack.main(config(packed, tmp_path / "packed"))
    assert bins(tmp_path / "packed") == bins(packed / "packed")


# Killed, interrupted, damaged, or by several machines

UNITS = 52


def make_corpus(root: Path, **size) -> Path:
    """A corpus, its tokenizer, and `packed` by two workers in one go."""
    tiny.write_corpus(root / "corpus", row_group=10, **size)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(config(root, root / "packed", workers=2))
    return root


@pytest.fixture(scope="module")
def fat(tmp_path_factory):
    """52 units, enough work to be killed in the middle of."""
    return make_corpus(tmp_path_factory.mktemp("fat"), docs=4000)


@pytest.fixture(scope="module")
def thin(tmp_path_factory):
    """12 units."""
    return make_corpus(tmp_path_factory.mktemp("thin"), files=3, docs=400)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same; the units' records also say how long packing took."""
    files = [path for path in folder.iterdir() if path.suffix == ".bin" or path.name in ("manifest.json", "plan.json")]
    return {path.name: path.read_bytes() for path in files}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.bin")}


# One machine


def start(root: Path, out: Path, units: int = 1) -> subprocess.Popen:
    """Start packing by one worker, in a session of its own, and wait until it has packed some units."""
    flags = ["--corpus", root / "corpus", "--tokenizer", root / "tokenizer", "--out", out, "--workers", 1]
    command = tiny.command("nanochat_gka.pack", *flags, "--sequence-len", 32, "--split-documents", "no")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    while len(list(out.glob("train_*.json"))) < units:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    return process


def test_the_same_command_continues_after_kill_9(fat, tmp_path, capsys):
    """One process, killed and continued, makes the same folder as two that were not interrupted."""
    out = tmp_path / "packed"
    process = start(fat, out, units=3)
    with tiny.one_line_error("another process is packing"):
        pack.main(config(fat, out))
    started = descendants(process.pid)
    process.kill()
    assert tiny.finish(process).returncode == -signal.SIGKILL and not still_there(started)
    before = times(out)
    assert 3 <= len(before) < UNITS and not (out / "manifest.json").exists()
    with tiny.one_line_error("no packed data in .*nanochat_gka.pack"):
        PackedData(out)
    torn = out / sorted(before)[1]  # what a crash of the machine may leave
    torn.write_bytes(torn.read_bytes()[:-66])
    pack.main(config(fat, out))
    continued = int(re.search(r"(\d+) of 52 units were packed before", capsys.readouterr().out)[1])
    assert continued in (len(before) - 1, len(before) - 2)  # a kill may fall between a unit's rows and its record
    assert sum(times(out)[name] == then for name, then in before.items()) == continued
    assert len(bins(out)) == UNITS and contents(out) == contents(fat / "packed") and not list(out.glob(".tmp-*"))
    pack.main(config(fat, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out


def test_ctrl_c_and_a_killed_worker_are_one_line_and_end_every_process(fat, tmp_path):
    """A terminal sends Ctrl-C to the workers too; a full memory kills one of them."""
    process = start(fat, tmp_path / "interrupted")
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    done = tiny.finish(process)
    assert done.returncode == 130 and done.stderr == "interrupted\n", done.stdout + done.stderr
    process = start(fat, tmp_path / "killed")
    started += descendants(process.pid)
    os.kill(started[-1], signal.SIGKILL)  # the forkserver's child
    tiny.assert_one_line_error(tiny.finish(process), "a worker process was killed .*run the same command again")
    assert not still_there(started)


def test_packing_again_restores_damaged_units(fat, tmp_path):
    """And no others. The manifest must be deleted only where damage does not show without reading rows."""
    out = shutil.copytree(fat / "packed", tmp_path / "packed")
    (out / "val_000000.bin").unlink()
    os.truncate(out / "train_000003.bin", 66)
    (out / "train_000005.json").write_text("{")
    rewrite_json(out / "train_000007.json", documents=None)
    rewrite_json(out / "manifest.json", shards=None)
    before = times(out)
    pack.main(config(fat, out))
    assert contents(out) == contents(fat / "packed")
    again = {name for name in before if times(out)[name] != before[name]}
    assert again == {f"train_00000{number}.bin" for number in (3, 5, 7)}
    flipped = bytearray((out / "val_000000.bin").read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (out / "val_000000.bin").write_bytes(flipped)
    Tokenizer.train(tiny.documents(50, 9), 300).save(out)
    (out / "manifest.json").unlink()
    pack.main(config(fat, out))
    assert contents(out) == contents(fat / "packed") and PackedData(out)


# Several machines


def test_parts_joined_are_what_one_machine_makes(thin, tmp_path, capsys, monkeypatch):
    """Three machines without a common folder: one did not finish, one packed twice, and the first join is killed."""
    out, machines = tmp_path / "packed", [tmp_path / f"machine{number}" for number in (1, 2, 3)]
    for number, machine in enumerate([*machines, machines[2]], start=1):
        pack.main(config(thin, machine, part=f"{min(number, 3)}/3"))
    assert "4 of 4 units were packed before" in capsys.readouterr().out
    (machines[1] / "part-2-of-3/train_000004.bin").unlink()
    for machine in machines:
        assert not (machine / "manifest.json").exists() and len(list(machine.glob("part-*/*.json"))) == 6
        shutil.copytree(machine, out, dirs_exist_ok=True)
    before, moved = times(out), []

    def replace(source, target, move=os.replace):
        if len(moved) == 5:
            raise KeyboardInterrupt
        moved.append(target)
        move(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(pack, "os", SimpleNamespace(replace=replace))
        pack.main(config(thin, out))
    assert len(bins(out)) == 3 and not (out / "manifest.json").exists()
    pack.main(config(thin, out))
    assert "11 of 12 units were packed before" in capsys.readouterr().out
    assert contents(out) == contents(thin / "packed") and before.items() <= times(out).items()
    pack.main(config(thin, out, part="1/3"))  # does nothing
    assert not list(out.glob("part-*")) and PackedData(out)


def test_wrong_parts_are_one_line(thin, tmp_path):
    out, part = tmp_path / "packed", tmp_path / "packed/part-1-of-2"

    def refused(message, place=out, **changes):
        with tiny.one_line_error(message):
            pack.main(config(thin, place, **changes))

    refused("--part must be NUMBER/COUNT .* such as 2/8, got", part="4/3")
    refused("was packed with sequence length 32", thin / "packed", part="1/2", sequence_len=33)
    pack.main(config(thin, out, part="1/2"))
    refused("part-1-of-2 was packed with sequence length 32", sequence_len=33)
    (out / "plan.json").unlink()
    (part / "plan.json").unlink()
    refused("part-1-of-2 has no plan.json; copy the whole folder")
    assert (part / "train_000003.bin").exists() and not (out / "manifest.json").exists()
