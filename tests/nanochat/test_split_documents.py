"""People's own text: documents go on where a row ends, so that little is lost; FineWeb-Edu's rows stay nanochat's."""

import itertools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from nanochat_gka import pack
from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.packing import best_fit_rows
from runs import make
from tiny_pack import bins, config

BOS = 50_000


@given(st.lists(st.lists(st.integers(0, 200), max_size=9), max_size=12), st.integers(2, 60), st.integers(1, 30))
def test_every_token_but_the_last_rows_is_in_a_row_once(lengths, capacity, buffer_size):
    """Tokens are numbered through the documents, so the rows show where each of them went."""
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


def test_a_long_document_becomes_whole_rows_and_a_rest():
    documents = [np.array([BOS, *range(22)]), np.array([BOS, *range(90, 94)])]
    rows = [row.tolist() for row in best_fit_rows([documents], 10, split_documents=True)]
    assert rows == [[BOS, *range(9)], [BOS, *range(9, 18)], [BOS, *range(90, 94), BOS, *range(18, 22)]]


LONG = "\n\n".join(" ".join(tiny.documents(3, number)) for number in range(120))


def write(folder: Path, *files: list[str]) -> Path:
    """A corpus of parquet files with these texts."""
    folder.mkdir(parents=True)
    for number, texts in enumerate(files):
        pq.write_table(pa.table({"text": texts}), folder / f"shard_{number:05d}.parquet")
    return folder


@pytest.fixture
def own(packed, tmp_path):
    """A folder with a corpus of two books of 360 sentences and some notes, and the tokenizer."""
    write(tmp_path / "corpus", [LONG, LONG.upper(), *tiny.documents(30, 1)], [LONG.title()])
    shutil.copytree(packed / "tokenizer", tmp_path / "tokenizer")
    return tmp_path


def training_rows(data: PackedData) -> np.ndarray:
    return np.fromfile(data.folder / "train_000000.bin", "<u2").reshape(-1, data.sequence_len + 1)


def automatic(root: Path, out: Path, **changes) -> pack.PackConfig:
    return config(root, out, **{"split_documents": "auto", **changes})


def test_own_text_is_not_cropped(own, capsys):
    """nanochat's rows hold the beginning of a book and throw the rest away, and then packing says what to change."""
    pack.main(config(own, own / "theirs"))
    said = capsys.readouterr().out
    assert "from 33 documents, 9" in said and "pack with --split-documents yes to another --out to keep it" in said
    pack.main(automatic(own, own / "ours"))
    said = capsys.readouterr().out
    data = PackedData(own / "ours")
    assert "in no row" not in said
    documents = [data.tokenizer.encode(text) for text in [LONG, LONG.upper(), *tiny.documents(30, 1)]]
    rows = training_rows(data)
    kept, given_ids = np.sum(rows != data.tokenizer.bos_id), sum(map(len, documents))
    assert given_ids - 33 < kept <= given_ids and (rows[:, 0] == data.tokenizer.bos_id).all()
    pieces = sum(shard["pieces"] for shard in data.manifest["shards"])
    assert f"from 33 documents in {pieces:,} pieces, 0% of" in said
    assert not data.has_upstream_rows and data.name_rows(320) == "spaced"
    pack.main(automatic(own, own / "ours"))
    assert "reusing the tokenised data" in capsys.readouterr().out


def test_runs_of_a_million_blanks_are_packed(packed, tmp_path):
    texts = [f"one{blank * 1_000_100}two" for blank in " \t"]
    write(tmp_path / "corpus", texts, ["some words " * 40])
    pack.main(automatic(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))
    data = PackedData(tmp_path / "packed")
    kept = data.tokenizer.decode(
        token for row in training_rows(data) for token in row if token != data.tokenizer.bos_id
    )
    assert 2_000_100 < len(kept) <= sum(map(len, texts)) and set(kept) <= set("one two\t")


def test_what_is_still_cropped_is_said(packed, tmp_path, capsys):
    """Two files of a row and a half each: half a row in three is not full."""
    words = " ".join(tiny.documents(60, 0))
    half = PackedData(packed / "packed").tokenizer.decode(PackedData(packed / "packed").tokenizer.encode(words)[:48])
    write(tmp_path / "corpus", [half], [half])
    pack.main(automatic(tmp_path, tmp_path / "packed", tokenizer=packed / "tokenizer"))
    said = capsys.readouterr().out
    assert "1 training and 1 validation rows" in said
    assert "warning: 33% of the text is in no row: rows that are not full are dropped; lower --sequence-len" in said


def fetched(folder: Path, base: Path, note: bool = True) -> Path:
    """`folder` of FineWeb-Edu's files as they are fetched, and the folder of links to two of them that make reads."""
    if note:
        (folder / "source.json").write_text(json.dumps({"source": "fineweb"}))
    make.finish_corpus(base / "corpus" / "fineweb", base / "corpus" / "fineweb-2", 2)
    return base / "corpus" / "fineweb-2"


def test_rows_of_fineweb_stay_nanochats(own, capsys):
    """In the folder it was fetched to, in make's folder of links, and in one that an earlier make wrote."""
    pack.main(config(own, own / "theirs"))
    home = own / "base" / "corpus" / "fineweb"
    home.parent.mkdir(parents=True)
    shutil.copytree(own / "corpus", home)
    linked = fetched(home, own / "base")
    earlier = linked.with_name("fineweb-old")
    shutil.copytree(linked, earlier, copy_function=os.link)
    (earlier / "source.json").unlink()
    capsys.readouterr()
    for corpus in (home, linked, earlier):
        out = own / f"packed-{corpus.name}"
        pack.main(automatic(own, out, corpus=corpus))
        assert bins(out) == bins(own / "theirs") and PackedData(out).has_upstream_rows
        assert "in no row" not in capsys.readouterr().out
    other = own / "base" / "corpus" / "other"
    shutil.copytree(own / "corpus", other)
    pack.main(automatic(own, own / "packed-other", corpus=other))
    assert bins(own / "packed-other") != bins(own / "theirs")


def test_folders_of_earlier_versions_go_on_as_they_are(own, capsys):
    """Their plan and manifest do not say whether documents are split, for none were."""
    out = own / "packed"
    pack.main(config(own, out))
    for name in ("plan.json", "manifest.json"):
        about = json.loads((out / name).read_text())
        assert about.pop("split_documents") is False
        (out / name).write_text(json.dumps(about))
    want = bins(out)
    pack.main(automatic(own, out))
    assert "reusing the tokenised data that is there" in capsys.readouterr().out
    (out / "manifest.json").unlink()
    (out / "train_000000.bin").unlink()
    pack.main(automatic(own, out))
    assert bins(out) == want
    for choice, before in (("yes", "no"), ("no", "yes")):
        with tiny.one_line_error(
            f"was packed with --split-documents {before}; choose another --out \(with make, BASE\), or delete it"
        ):
            pack.main(config(own, out, split_documents=choice))
        shutil.rmtree(out)
        pack.main(config(own, out, split_documents="yes"))


def test_a_run_is_not_continued_on_rows_of_the_other_kind(own, tmp_path):
    """Checkpoints of earlier versions do not say which it was."""
    for choice in ("yes", "no"):
        pack.main(config(own, own / choice, split_documents=choice))
    split, whole, run = PackedData(own / "yes"), PackedData(own / "no"), tmp_path / "run"
    split.check_same(split.identity(run), run)
    whole.check_same(whole.identity(run), run)
    assert "split_documents" not in whole.identity(run)
    for data, saved in ((split, whole), (whole, split)):
        with tiny.one_line_error("was packed with another --split-documents than the run in"):
            data.check_same(saved.identity(run), run)
    assert split.rows_hash() != whole.rows_hash()


def test_a_run_is_not_continued_on_other_rows_of_the_same_text(own, tmp_path):
    """Such as another version cut the text into. Checkpoints of earlier versions do not say."""
    pack.main(config(own, own / "some"))
    pack.main(config(own, own / "others"))
    manifest = json.loads((own / "others/manifest.json").read_text())
    next(shard for shard in manifest["shards"] if shard["split"] == "train")["sha256"] = "0" * 64
    (own / "others/manifest.json").write_text(json.dumps(manifest))
    run, some, others = tmp_path / "run", PackedData(own / "some"), PackedData(own / "others", verify=False)
    saved = some.identity(run)
    with tiny.one_line_error("has other rows than the run in .*, though they are of the same text"):
        others.check_same(saved, run)
    del saved["train_rows"]
    others.check_same(saved, run)
