"""Numbers that make no sense are one line that names the flag."""

import dataclasses
import math

import pytest

import tiny
from nanochat_gka import accounting, corpus, eval_core, evaluate, generate, pack, tokenizer, train
from trainkit_gka.cli import check_bounds, flag_of

COMMANDS = {
    "train": train.TrainConfig,
    "evaluate": evaluate.EvaluateConfig,
    "eval_core": eval_core.CoreConfig,
    "generate": generate.GenerateConfig,
    "tokenizer": tokenizer.TokenizerConfig,
    "pack": pack.PackConfig,
    "corpus": corpus.CorpusConfig,
    "accounting": accounting.AccountingConfig,
}
MORE = {  # beside what is far too small
    "train": dict(adam_beta1=1.0, adam_beta2=1.0, device_batch_size=0, warmup_ratio=1.1,
                  warmdown_ratio=1.1, final_lr_frac=1.0, seed=2**63),
    "evaluate": dict(device_batch_size=0, top_p=1.1, seed=2**63),
    "tokenizer": dict(vocab_size=65537),
    "corpus": dict(num_shards=1824),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_has_bounds(command):
    """Also one that a flag added tomorrow has. --step is checked where the checkpoints are known."""
    config = COMMANDS[command]()
    check_bounds(config)
    refused = list(MORE.get(command, {}).items())
    for field in dataclasses.fields(config):
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool) and field.name != "step":
            refused += [(field.name, wrong) for wrong in (-(10**9), math.nan)[: 1 + isinstance(field.default, float)]]
    for name, wrong in refused:
        with tiny.one_line_error(rf"^{flag_of(name)} must be .*, got \S+$"):
            check_bounds(dataclasses.replace(config, **{name: wrong}))
