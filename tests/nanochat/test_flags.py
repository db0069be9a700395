"""Numbers that make no sense are one line that names the flag and what is allowed, before anything is read or made."""

import dataclasses
import re
from typing import Annotated, get_type_hints

import pytest

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
NOT_NUMBERS = ("nan", "inf", "-inf", "1e999")
REFUSED = {
    "train": {
        "weight-decay": (*NOT_NUMBERS, "-0.1", "1e39"),
        "adam-beta1": (*NOT_NUMBERS, "-0.1", "1", "0.99999999", "1.5"),
        "adam-beta2": (*NOT_NUMBERS, "-0.1", "1", "0.99999999"),
        **dict.fromkeys(("embedding-lr", "unembedding-lr", "matrix-lr", "scalar-lr", "sigma-lr"),
                        (*NOT_NUMBERS, "-0.02", "1e39")),
        "final-lr-frac": (*NOT_NUMBERS, "-0.1", "1", "2"),
        "warmup-ratio": (*NOT_NUMBERS, "-0.1", "1.1"),
        "warmdown-ratio": (*NOT_NUMBERS, "-0.1", "1.1"),
        "target-flops": (*NOT_NUMBERS, "0", "-2"),
        "target-param-data-ratio": (*NOT_NUMBERS, "0", "-2"),
        "sigma-squared": (*NOT_NUMBERS, "-1"),
        "seed": ("-1", str(2**63), str(10**30)),
        "depth": ("0", "-3", "1000001"),
        **dict.fromkeys(("aspect-ratio", "head-dim", "keep", "log-every"), ("0", "-1")),
        **dict.fromkeys(("max-seq-len", "num-iterations", "total-batch-size", "eval-every", "eval-tokens",
                         "sample-every", "save-every", "stop-after", "core-metric-every", "core-metric-max-per-task"),
                        ("0", "-2")),
        "device-batch-size": ("0", "-1"),
    },
    "evaluate": {"split-tokens": ("0", "-2"), "device-batch-size": ("0", "-1"), "temperature": (*NOT_NUMBERS, "-1"),
                 "top-p": (*NOT_NUMBERS, "0", "1.1"), "top-k": ("-1",), "num-samples": ("0",), "max-tokens": ("0",),
                 "unconditioned": ("-1",), "seed": ("-1", str(2**63))},
    "eval_core": {"max-per-task": ("0", "-2"), "max-seq-len": ("1", "-2"), "batch-tokens": ("-1",)},
    "generate": {"max-rows": ("0",), "temperature": NOT_NUMBERS, "top-p": NOT_NUMBERS, "seed": (str(2**63),)},
    "tokenizer": {"max-chars": ("0", "-2"), "doc-cap": ("0", "-1"), "vocab-size": ("264", "65537", "-1")},
    "pack": {"sequence-len": ("0", "-1", str(10**12)), "workers": ("-1",)},
    "corpus": {"num-shards": ("1", "1824", "-1")},
    "accounting": {"depth": ("0", "100000"), "max-seq-len": ("0",), "vocab-size": ("0",), "total-batch-size": ("0",),
                   "sigma-squared": NOT_NUMBERS, "target-param-data-ratio": (*NOT_NUMBERS, "0")},
}  # fmt: skip
CASES = [
    (command, flag, value) for command, flags in REFUSED.items() for flag, values in flags.items() for value in values
]


@pytest.mark.parametrize("command,flag,value", CASES)
def test_refused_number_names_the_allowed_range(command, flag, value, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main, config = COMMANDS[command]
    with pytest.raises(SystemExit) as left:
        run(main, config, [f"--{flag}={value}"])
    captured = capsys.readouterr()
    assert left.value.code == 2
    message = rf"error: --{flag} must be (at least|above|between|at most|auto) .*, got \S+\n"
    assert re.fullmatch(message, captured.err), captured.err
    assert not captured.out and not list(tmp_path.iterdir())


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
            assert inherited or field.name.replace("_", "-") in REFUSED[command], field.name


def test_bounds_say_what_is_allowed():
    @dataclasses.dataclass
    class Flags:
        rate: Annotated[float, Bounds(0)] = 1.0
        share: Annotated[float, Bounds(0, 1, open_least=True)] = 1.0
        part: Annotated[float, Bounds(0, 1)] = 1.0
        count: Annotated[int, Bounds(1, other=(-1, "all"))] = 1
        size: Annotated[int | str, Bounds(1)] = "auto"

    check_bounds(Flags(rate=0, share=0.5, part=0, count=-1))
    for change, message in (
        (dict(rate=float("nan")), "--rate must be at least 0 and finite, got nan"),
        (dict(share=0.0), "--share must be above 0 and at most 1, got 0.0"),
        (dict(part=2.0), "--part must be between 0 and 1, got 2.0"),
        (dict(count=0), "--count must be at least 1, or -1 for all, got 0"),
        (dict(size=0), "--size must be at least 1, got 0"),
    ):
        with pytest.raises(UserError) as raised:
            check_bounds(Flags(**change))
        assert str(raised.value) == message
