"""In float32 the CPU kernel is as accurate as plain PyTorch, over seeds and without the budget's floors; the file that
the command writes.
"""

import pytest

from gka.impl.cpu import build
from runs.bench import error
from runs.bench.error import CASES, CAUSAL, FULL, Case, over_seeds
from trainkit_gka import cli

pytestmark = [
    pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle())),
    pytest.mark.usefixtures("one_thread"),  # as the page's figures are measured
]
LONGER = (  # than the page's, so that each chunk that a sum is cut into shows
    Case(8, keys=20000, with_gradients=False, log_sigma=1.0, label="decoding 8 queries, 20,000 keys"),
    Case(16, keys=30000, own_values=False, log_sigma=4.0, label="16 queries, 30,000 keys and values"),
)
WIDE = [Case(197, mask, own_values=own, log_sigma=4.0, label="") for mask in (CASES[2].mask, FULL) for own in (0, 1)]


def ratios(case: Case, seeds: int) -> dict[str, float]:
    errors = over_seeds(case, seeds)
    return {name: ours / errors["plain"][name] for name, ours in errors["cpu"].items()}


@pytest.mark.parametrize("case", CASES + LONGER, ids=lambda case: case.label)
def test_errors_are_about_those_of_plain_pytorch(case):
    found = ratios(case, 1)
    found.pop("dlog_sigma", None)  # two numbers, where chance decides
    assert max(found.values()) < 1.5


@pytest.mark.parametrize("case", [case for case in CASES if case.with_gradients], ids=lambda case: case.label)
def test_errors_are_those_of_the_page(case):
    """Each of the kernel's ways to keep rounding small gives more than the margin of four seeds and of AVX2."""
    settings = {"case": case.label, "route": "cpu"}
    (shown,) = [row["metrics"] for row in error.records("cases") if settings.items() <= row["config"].items()]
    found = over_seeds(case, 4)["cpu"]
    assert {name: found[name] / shown[name] for name in shown if name != "dlog_sigma"} == pytest.approx(
        dict.fromkeys(set(shown) - {"dlog_sigma"}, 1.0), abs=0.25
    )


@pytest.mark.parametrize("case", WIDE, ids=lambda case: f"{case.mask}, own values {bool(case.own_values)}")
def test_dlog_sigma_of_wide_kernels_is_better_than_plain_pytorchs(case):
    """All exponents are nearly the same there, and the sum of M, which is 0, comes with what rounding leaves of it."""
    assert ratios(case, 8)["dlog_sigma"] < 1


@pytest.mark.parametrize("tokens,mask", [(60, FULL), (300, FULL), (300, CAUSAL)], ids=str)
def test_dlog_sigma_of_tokens_in_clusters_is_as_accurate_as_plain_pytorchs(tokens, mask):
    """K is near 1 or near 0 there, and the mean of exponents is not the logarithm of a mean of K: taken for it, the
    error is 1.8 to 4.7 times plain PyTorch's.
    """
    assert ratios(Case(tokens, mask, features="clusters", label=""), 16)["dlog_sigma"] < 1.5


@pytest.mark.parametrize("case", list(error.small_cases())[::97], ids=lambda case: case.label)
def test_cases_of_the_sweep_are_as_accurate_as_plain_pytorch(case):
    """What few seeds find above 1 is measured over many."""
    assert max(error.ratios(case, 3).values(), default=0.0) < 1.1


@pytest.mark.parametrize("tokens", [20, 40])
def test_rows_of_some_tokens_are_added_up_in_short_chunks(tokens):
    """Terms of one size, added one after another, would be at 1.1 to 1.3 times plain PyTorch's error."""
    assert ratios(Case(tokens, CASES[2].mask, keys=tokens, log_sigma=4.0, label=""), 8)["dkeys"] < 0.95


def test_a_part_is_measured_anew_and_the_other_lines_stay(tmp_path, monkeypatch):
    """Every route's error is of the size that the page shows; where and when it was measured, dlog_sigma is chance."""
    path = tmp_path / "error.jsonl"
    path.write_bytes(error.FILE.read_bytes())
    monkeypatch.setattr(error, "KINDS", ("unit_norm", "all+100"))
    cli.run(error.main, error.ErrorConfig, ["--only", "routes", "--results", str(path)])
    for part in ("cases", "sweep"):
        assert error.records(part, path) == error.records(part)
    shown = [row for row in error.records("routes") if row["config"]["features"] in error.KINDS]
    measured = error.records("routes", path)
    assert [row["config"] for row in measured] == [row["config"] for row in shown]
    for row, known in zip(measured, shown, strict=True):
        for name in ("y", "dx", "max_norm2_over_sigma2", "log_sigma_condition"):
            want = known["metrics"][name]
            assert row["metrics"][name] == (want and pytest.approx(want, rel=0.7)), (row["config"], name)


def test_the_sweep_says_what_it_saw(tmp_path, monkeypatch):
    seen = {"3 tokens": {"y": 0.5, "dx": 0.25}, "9 tokens": {"y": 1.5}, "20 tokens": {"y": 0.75, "dx": 0.5}}
    monkeypatch.setattr(error, "small_cases", lambda: [Case(3, label=label) for label in seen])
    monkeypatch.setattr(error, "ratios", lambda case: seen[case.label])
    cli.run(error.main, error.ErrorConfig, ["--only", "sweep", "--results", str(tmp_path / "error.jsonl")])
    assert [(row["config"], row["metrics"]) for row in error.records("sweep", tmp_path / "error.jsonl")] == [
        (
            {"part": "sweep", "output": "y", "cases": 3, "seeds": 8},
            {"median": 0.75, "most": 1.5, "above_1": 1, "worst": "9 tokens"},
        ),
        (
            {"part": "sweep", "output": "dx", "cases": 2, "seeds": 8},
            {"median": 0.375, "most": 0.5, "above_1": 0, "worst": "20 tokens"},
        ),
    ]
