"""Numbers that make no sense are one line that names the flag and what is allowed, before anything is read or made."""

import dataclasses
from typing import Annotated, get_type_hints

import pytest

import tiny
from nanochat_gka import accounting, corpus, eval_core, evaluate, generate, pack, tokenizer, train
from trainkit_gka.cli import Bounds, UserError, check_bounds, run

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
RATES, COUNTS, NAN = (-0.02, 1e39), (0, -2), float("nan")
REFUSED = {  # the first values beyond the bounds
    "train": {
        **dict.fromkeys(("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "sigma_lr"), RATES),
        **dict.fromkeys(("adam_beta1", "adam_beta2"), (-0.1, 0.99999999)),
        **dict.fromkeys(("warmup_ratio", "warmdown_ratio"), (-0.1, 1.1)),
        **dict.fromkeys(("target_flops", "target_param_data_ratio"), COUNTS),
        **dict.fromkeys(("max_seq_len", "num_iterations", "total_batch_size", "eval_every", "eval_tokens"), COUNTS),
        **dict.fromkeys(("sample_every", "save_every", "stop_after"), COUNTS),
        **dict.fromkeys(("core_metric_every", "core_metric_max_per_task"), COUNTS),
        **dict.fromkeys(("aspect_ratio", "head_dim", "keep", "log_every", "device_batch_size"), (0, -1)),
        "weight_decay": RATES,
        "final_lr_frac": (-0.1, 1.0),
        "sigma_squared": (-1.0, NAN),
        "seed": (-1, 2**63),
        "depth": (0, 1000001),
    },
    "evaluate": {"split_tokens": COUNTS, "device_batch_size": (0, -1), "temperature": (-1.0, NAN), "top_p": (0.0, 1.1),
                 "top_k": (-1,), "num_samples": (0,), "max_tokens": (0,), "unconditioned": (-1,), "seed": (-1, 2**63)},
    "eval_core": {"max_per_task": COUNTS, "max_seq_len": (1, -2), "batch_tokens": (-1,)},
    "generate": {"max_rows": (0,), "temperature": (-1.0,), "top_p": (0.0,), "seed": (2**63,)},
    "tokenizer": {"max_chars": COUNTS, "doc_cap": (0, -1), "vocab_size": (264, 65537)},
    "pack": {"sequence_len": (0, 10**12), "workers": (-1,)},
    "corpus": {"num_shards": (1, 1824)},
    "accounting": {"depth": (0, 100000), "max_seq_len": (0,), "vocab_size": (0,), "total_batch_size": (0,),
                   "sigma_squared": (-1.0,), "target_param_data_ratio": (0.0,)},
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_refused_numbers_name_the_allowed_range(command, capsys, tmp_path, monkeypatch):
    main, config = COMMANDS[command]
    for name, values in REFUSED[command].items():
        flag = "--" + name.replace("_", "-")
        for value in values:
            with tiny.one_line_error(rf"^{flag} must be (at least|above|between|at most|auto) .*, got \S+$"):
                check_bounds(dataclasses.replace(config(), **{name: value}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        run(main, config, [f"{flag}={value}"])
    assert left.value.code == 2 and capsys.readouterr().err.startswith(f"error: {flag} must be")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_number_of_a_command_has_bounds(command):
    """And they were tried above, if they are not inherited from flags that were."""
    config = COMMANDS[command][1]
    hints = get_type_hints(config, include_extras=True)
    # --step is checked where the checkpoints are known.
    free = {"step"} if command in ("evaluate", "eval_core", "generate") else set()
    for field in dataclasses.fields(config):
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool) and field.name not in free:
            bounds = [one for one in getattr(hints[field.name], "__metadata__", ()) if isinstance(one, Bounds)]
            assert len(bounds) == 1, field.name
            bounds[0].check(field.name, field.default)
            inherited = field.name not in config.__annotations__
            assert inherited or field.name in REFUSED[command], field.name


@dataclasses.dataclass
class Flags:
    rate: Annotated[float, Bounds(0)] = 0.0
    share: Annotated[float, Bounds(0, 1, open_least=True)] = 0.5
    part: Annotated[float, Bounds(0, 1)] = 0.0
    count: Annotated[int, Bounds(1, other=(-1, "all"))] = -1
    size: Annotated[int | str, Bounds(1)] = "auto"


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rate=float("nan")), "--rate must be at least 0 and finite, got nan"),
        (dict(rate=float("inf")), "--rate must be at least 0 and finite, got inf"),
        (dict(share=0.0), "--share must be above 0 and at most 1, got 0.0"),
        (dict(part=2.0), "--part must be between 0 and 1, got 2.0"),
        (dict(count=0), "--count must be at least 1, or -1 for all, got 0"),
        (dict(size=0), "--size must be at least 1, got 0"),
    ],
)
def test_bounds_say_what_is_allowed(change, message):
    check_bounds(Flags())
    with pytest.raises(UserError) as raised:
        check_bounds(Flags(**change))
    assert str(raised.value) == message
