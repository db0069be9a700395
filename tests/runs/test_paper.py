"""The paper's experiments: the ablation's table, and what the printed tables imply."""

import json
import re

import pytest

from nanochat_gka.core_metric.published import PAPER_CENTERED, PAPER_MEAN
from runs.paper import ablation, published
from trainkit_gka.cli import UserError


def number(text):
    return float(text.rstrip("M"))


# The ablation's table


def test_the_ablation_table_puts_runs_beside_the_paper(tmp_path, capfd):
    with pytest.raises(UserError, match=r"deit_tiny_patch16_224 holds no finished run; make ablate-projections DATA="):
        ablation.main(ablation.AblationConfig(runs=tmp_path))
    runs = [*ablation.models().values(), "deit_tiny_gka_patch16_224-GGGA"]
    for accuracy, model in zip((70.5, 71.25, 69.75, 70.0), runs):
        (tmp_path / model).mkdir()
        flops = None if accuracy > 71 else 2_000_000_000
        record = {"event": "finish", "step": 9, "parameters": 5_000_000, "flops": flops}
        record |= {"top1": accuracy, "ema_top1": accuracy + 1}
        (tmp_path / model / "log.jsonl").write_text(json.dumps(record) + "\n")
    ablation.main(ablation.AblationConfig(runs=tmp_path))
    softmax, vlt, gka, hybrid = [
        line for line in capfd.readouterr().out.splitlines() if re.search("softmax|VLT|GKA|GGGA", line)
    ]
    assert "Q K V O" in softmax and "70.50" in softmax and "71.50 (72.2)" in softmax
    assert "72.25 (73.5)" in vlt and "5.00 (5.28)" in vlt and "- (2.33)" in vlt
    assert "70.75 (71.54)" in gka and "2.00 (1.98)" in gka
    assert "GGGA (ours)" in hybrid and "71.00" in hybrid and "(7" not in hybrid
    (tmp_path / runs[3] / "log.jsonl").unlink()
    ablation.main(ablation.AblationConfig(runs=tmp_path))
    assert "GGGA" not in capfd.readouterr().out


# The printed tables


def test_the_data_file_has_every_table_and_cell():
    """As many as the paper prints: 11 x 4, 3 x (6 + 8), 3 x (5 + 9), 6 x 7, 3 x 4, 2 x 3, 7 x 3, 2 x 4 and 18."""
    tables = published.TABLES.values()
    assert [table["number"] for table in tables] == list(range(1, 9))
    for table in tables:
        assert table["label"].startswith("tab:") and table["section"] and table["caption"]
        assert all(row.keys() <= table["columns"].keys() and all(row.values()) for row in table["rows"].values())
    assert [sum(map(len, table["rows"].values())) for table in tables] == [44, 42, 42, 42, 12, 6, 21, 8]
    assert sum(map(len, published.TABLES["runtime"]["differences"].values())) == 18
    assert published.LANGUAGE["GKA"]["parameters"] == "378M" and published.LANGUAGE["GKA"]["val_bpb"] == "0.819080"


def test_core_differences_and_means_follow_from_the_scores():
    rows = {
        task: [number(row[key]) for key in ("base", "gka", "difference")]
        for task, row in published.rows("core_subset").items()
    }
    assert all(gka - base == pytest.approx(difference, abs=1e-9) for base, gka, difference in rows.values())
    means = rows.pop("mean")
    assert means[:2] == pytest.approx([sum(row[column] for row in rows.values()) / 6 for column in (0, 1)], abs=6e-5)
    assert {task: (base, gka) for task, (base, gka, _) in rows.items()} == PAPER_CENTERED
    assert tuple(means[:2]) == PAPER_MEAN
