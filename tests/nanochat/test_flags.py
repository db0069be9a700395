"""Numbers that make no sense are one line that names the flag, before anything is read or made."""

import dataclasses
import math

import pytest

import tiny
from nanochat_gka import accounting, corpus, eval_core, evaluate, generate, pack, tokenizer, train
from trainkit_gka.cli import check_bounds, run

COMMANDS = {
    "train": (train.main, train.TrainConfig),
    "evaluate": (evaluate.main, evaluate.EvaluateConfig),
    "eval_core": (eval_core.main, eval_core.CoreConfig),
    "generate": (generate.main, generate.GenerateConfig),
    "tokenizer": (tokenizer.main, tokenizer.TokenizerConfig),
    "pack": (pack.main, pack.PackConfig),
    "corpus": (corpus.main, corpus.CorpusConfig),
    "accounting": (accounting.main, accounting.AccountingConfig),
}
MORE = {  # beside what is far too small
    "train": dict(adam_beta1=1.0, adam_beta2=1.0, device_batch_size=0, warmup_ratio=1.1,
                  warmdown_ratio=1.1, final_lr_frac=1.0, seed=2**63),
    "evaluate": dict(device_batch_size=0, top_p=1.1, seed=2**63),
    "tokenizer": dict(vocab_size=65537),
    "corpus": dict(num_shards=1824),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_has_bounds(command, tmp_path, monkeypatch, capsys):
    """Also one that a flag added tomorrow has: out of them it ends the command before anything is made."""
    main, config = COMMANDS[command]
    check_bounds(config())
    # --step is checked where the checkpoints are known.
    free = {"step"} if command in ("evaluate", "eval_core", "generate") else set()
    refused = list(MORE.get(command, {}).items())
    for field in dataclasses.fields(config):
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool) and field.name not in free:
            refused += [(field.name, wrong) for wrong in (-(10**9), math.nan)[: 1 + isinstance(field.default, float)]]
    for name, wrong in refused:
        flag = "--" + name.replace("_", "-")
        with tiny.one_line_error(rf"^{flag} must be (at least|above|between|at most|auto) .*, got \S+$"):
            check_bounds(dataclasses.replace(config(), **{name: wrong}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        run(main, config, [f"{flag}={wrong}"])
    assert left.value.code == 2 and capsys.readouterr().err.startswith(f"error: {flag} must be")
    assert not list(tmp_path.iterdir())
