"""The benchmark of listing images: what it writes is listed, kept lists are used, and a line says so."""

import os
import tarfile

from deit_gka.data.sources import kept
from runs.bench import listing
from trainkit_gka import cli
from trainkit_gka.progress import read_lines


def test_first_and_later_starts_are_measured_for_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "WORTH_KEEPING", 0.0)
    monkeypatch.setattr(listing, "CLASSES", 3)
    monkeypatch.setenv("GKA_CACHE_DIR", "restored after the test")
    lists, timed = [], listing.timed

    def counted(data, images):
        folder = kept.cache_folder() / "lists"
        lists.append(len(os.listdir(folder)) if folder.exists() else 0)
        return timed(data, images)

    monkeypatch.setattr(listing, "timed", counted)
    flags = ["--images", "20", "--rounds", "2", "--folder", str(tmp_path / "data"), "--results", str(tmp_path / "rows")]
    cli.run(listing.main, listing.ListingConfig, flags)
    assert lists == [0, 1, 0, 1] * 2 + [0] * 4  # no list at a first start, one at a later one; `datasets` keeps its own
    rows = read_lines(tmp_path / "rows")
    starts = [(form, start) for form in listing.FORMS for start in ("first", "later")]
    assert [(row["config"]["form"], row["config"]["start"]) for row in rows] == starts
    assert all(row["metrics"]["seconds"] > 0 and row["metrics"]["rounds"] == 2 for row in rows)
    folders = sorted((tmp_path / "data/class-folders-20/train").iterdir())
    assert [len(list(folder.iterdir())) for folder in folders] == [7, 7, 6]
    with tarfile.open(tmp_path / "data/tars-20/train/train-0002.tar") as tar:
        assert len(tar.getnames()) == 12
