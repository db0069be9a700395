"""Language runs that are killed, stopped or older go on where they were, to the bit."""

import json
import shutil

import gpt_runs
import tiny
from gpt_runs import final
from nanochat_gka import pack
from nanochat_gka.model.checkpoints import load
from tiny_pack import config, rewrite_json
from trainkit_gka import checkpoint
from trainkit_gka.files import sha256

RESEARCH = {"mixing": "none", "rotary": "full", "kernel": "gaussian", "gka_window": 0}


def add_settings(folder, **settings):
    """Add settings to those of the model and the run in the newest checkpoint, as runs of the study have them."""
    at = checkpoint.load_newest(folder / "checkpoints").path
    state = json.loads((at / "state.json").read_text())
    for name in ("model_config", "train_config"):
        state[name] |= settings
    rewrite_json(at / "state.json", **state)
    rewrite_json(at / "manifest.json", **{"state.json": sha256(at / "state.json")})


def test_a_run_of_the_study_goes_on_and_research_forms_name_their_commit(packed, tmp_path, capsys):
    words = ["--num-iterations", 4]
    gpt_runs.train(packed, tmp_path / "whole", *words)
    gpt_runs.train(packed, tmp_path, *words, "--stop-after", 2)
    add_settings(tmp_path / "run", **RESEARCH)
    assert load(tmp_path / "run").step == 2
    shutil.copytree(tmp_path / "run", tmp_path / "research/run")
    assert gpt_runs.train(packed, tmp_path, *words) == 0
    assert final(tmp_path, 4) == final(tmp_path / "whole", 4)
    add_settings(tmp_path / "research/run", **{**RESEARCH, "kernel": "mean"})
    capsys.readouterr()
    assert gpt_runs.train(packed, tmp_path / "research", *words) == 2
    error = capsys.readouterr().err
    assert "kernel=mean" in error and "0438d460" in error and error.count("\n") == 1
    with tiny.one_line_error("kernel=mean .*0438d460"):
        load(tmp_path / "research/run")


def test_rows_of_another_length_are_refused(packed, tmp_path, capsys):
    pack.main(config(packed, tmp_path / "longer", sequence_len=64))
    assert gpt_runs.train(packed, tmp_path, "--stop-after", 2) == 0
    assert gpt_runs.train(packed, tmp_path, "--data", tmp_path / "longer") == 2
    assert "was packed with another context length than the run in" in capsys.readouterr().err
