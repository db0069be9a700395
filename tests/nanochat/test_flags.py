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
RATES, COUNTS = ("-0.02", "1e39"), ("0", "-2")
REFUSED = {  # the first values beyond the bounds
    "train": {
        **dict.fromkeys(("embedding-lr", "unembedding-lr", "matrix-lr", "scalar-lr", "sigma-lr"), RATES),
        "weight-decay": RATES,
        **dict.fromkeys(("adam-beta1", "adam-beta2"), ("-0.1", "0.99999999")),
        **dict.fromkeys(("warmup-ratio", "warmdown-ratio"), ("-0.1", "1.1")),
        **dict.fromkeys(("target-flops", "target-param-data-ratio"), COUNTS),
        **dict.fromkeys(("max-seq-len", "num-iterations", "total-batch-size", "eval-every", "eval-tokens"), COUNTS),
        **dict.fromkeys(("sample-every", "save-every", "stop-after"), COUNTS),
        **dict.fromkeys(("core-metric-every", "core-metric-max-per-task"), COUNTS),
        **dict.fromkeys(("aspect-ratio", "head-dim", "keep", "log-every", "device-batch-size"), ("0", "-1")),
        "final-lr-frac": ("-0.1", "1"),
        "sigma-squared": ("-1", "nan"),
        "seed": ("-1", str(2**63)),
        "depth": ("0", "1000001"),
    },
    "evaluate": {"split-tokens": COUNTS, "device-batch-size": ("0", "-1"), "temperature": ("-1", "inf"),
                 "top-p": ("0", "1.1"), "top-k": ("-1",), "num-samples": ("0",), "max-tokens": ("0",),
                 "unconditioned": ("-1",), "seed": ("-1", str(2**63))},
    "eval_core": {"max-per-task": COUNTS, "max-seq-len": ("1", "-2"), "batch-tokens": ("-1",)},
    "generate": {"max-rows": ("0",), "temperature": ("-1",), "top-p": ("0",), "seed": (str(2**63),)},
    "tokenizer": {"max-chars": COUNTS, "doc-cap": ("0", "-1"), "vocab-size": ("264", "65537")},
    "pack": {"sequence-len": ("0", str(10**12)), "workers": ("-1",)},
    "corpus": {"num-shards": ("1", "1824")},
    "accounting": {"depth": ("0", "100000"), "max-seq-len": ("0",), "vocab-size": ("0",), "total-batch-size": ("0",),
                   "sigma-squared": ("-1",), "target-param-data-ratio": ("0",)},
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_refused_numbers_name_the_allowed_range(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main, config = COMMANDS[command]
    for flag, values in REFUSED[command].items():
        for value in values:
            with pytest.raises(SystemExit) as left:
                run(main, config, [f"--{flag}={value}"])
            captured = capsys.readouterr()
            message = rf"error: --{flag} must be (at least|above|between|at most|auto) .*, got \S+\n"
            assert left.value.code == 2 and re.fullmatch(message, captured.err), (flag, value, captured.err)
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
