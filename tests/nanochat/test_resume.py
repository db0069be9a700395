"""Language runs of other forms and rows resume, or are refused."""

import json

import gpt_runs
from nanochat_gka import pack
from nanochat_gka.model.checkpoints import load
from tiny_pack import config, rewrite_json
from trainkit_gka import checkpoint
from trainkit_gka.files import sha256


def as_saved_before(folder, **said):
    """Make a run's checkpoint look as when normalised values were the default: it states `said` of the values."""
    at = checkpoint.load_newest(folder / "checkpoints").path
    state = json.loads((at / "state.json").read_text())
    for name in ("model_config", "train_config"):
        state[name].pop("gka_values", None)
        state[name].update(said)
    (at / "state.json").write_text(json.dumps(state))
    rewrite_json(at / "manifest.json", **{"state.json": sha256(at / "state.json")})


def test_older_run_keeps_its_form_or_names_the_flag(packed, tmp_path, capsys):
    """A run of normalised values, which it does not state, has the name that is the paper's form's today."""

    def train(until, *more):
        return gpt_runs.train(packed, tmp_path, "--attention", "gka", "--model-tag", "", "--stop-after", until, *more)

    own = ["--gka-values", "normalised", "--model-tag", "d2-gka"]
    assert train(2, *own) == 0
    as_saved_before(tmp_path / "d2-gka")
    assert load(tmp_path / "d2-gka").model.config.gka_values == "normalised"
    assert train(4) == 2
    error = capsys.readouterr().err
    assert f"--gka-values is rotated but the run in {tmp_path / 'd2-gka'} has normalised" in error
    assert "--model-tag d2-gka" in error
    assert train(4, *own) == 0
    assert load(tmp_path / "d2-gka").step == 4 and load(tmp_path / "d2-gka").model.config.gka_values == "normalised"
    assert train(2, *own[:2]) == 0 and (tmp_path / "d2-gka-normalised").is_dir()


def test_an_older_softmax_run_goes_on(packed, tmp_path, capsys):
    assert gpt_runs.train(packed, tmp_path, "--attention", "softmax", "--stop-after", 2) == 0
    as_saved_before(tmp_path / "run", gka_values="normalised")
    assert gpt_runs.train(packed, tmp_path, "--attention", "softmax", "--stop-after", 4) == 0
    assert "resuming at step 2" in capsys.readouterr().out and load(tmp_path / "run").step == 4


def test_rows_of_another_length_are_refused(packed, tmp_path, capsys):
    pack.main(config(packed, tmp_path / "longer", sequence_len=64))
    assert gpt_runs.train(packed, tmp_path, "--stop-after", 2) == 0
    assert gpt_runs.train(packed, tmp_path, "--data", tmp_path / "longer") == 2
    assert "was packed with another context length than the run in" in capsys.readouterr().err
