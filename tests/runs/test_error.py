"""The errors of the operator's routes, measured anew into a file."""

import pytest

from gka.impl.cpu import build
from runs.bench import error
from trainkit_gka import cli
from trainkit_gka.progress import read_lines


@pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))
@pytest.mark.usefixtures("one_thread")  # as the page's figures are measured
def test_routes_are_measured_anew_and_other_rows_stay(tmp_path, monkeypatch):
    """Every route's error is of the size that the page has; where and when it was measured, dlog_sigma is chance."""
    path = tmp_path / "error.jsonl"
    path.write_bytes(error.FILE.read_bytes())
    monkeypatch.setattr(error, "KINDS", ("unit_norm", "all+100"))
    cli.run(error.main, error.ErrorConfig, ["--results", str(path)])
    before, after = read_lines(error.FILE), read_lines(path)
    other_parts = [row for row in before if row["config"]["part"] != error.PART]
    assert other_parts and [row for row in after if row["config"]["part"] != error.PART] == other_parts
    published = [row for row in error.records() if row["config"]["features"] in error.KINDS]
    measured = error.records(path)
    assert [row["config"] for row in measured] == [row["config"] for row in published]
    for row, known in zip(measured, published, strict=True):
        for name in ("y", "dx", "max_norm2_over_sigma2", "log_sigma_condition"):
            want = known["metrics"][name]
            assert row["metrics"][name] == (want and pytest.approx(want, rel=0.7)), (row["config"], name)
