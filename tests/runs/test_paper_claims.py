"""The ledger of the paper's claims: complete entries, commands that exist, verdicts that the files decide."""

import json
import re
from dataclasses import replace

import pytest

from bench_lines import line as bench_line
from bench_lines import write_lines
from deit_gka.training.config import TrainConfig
from nanochat_gka.core_metric.bundle import CORE_SIZES, PAPER_TASKS
from runs import frames
from runs.comparison import claims, core_scores, measured
from runs.comparison.evidence import FAILS, HOLDS, NOT_SEEN, UNTESTED, accuracy, language, runtime
from runs.paper import published
from sources import ROOT, modules
from trainkit_gka.cli import UserError
from trainkit_gka.progress import read_lines

MODULE = re.compile(r"^python -m ([\w.]+)")
TARGET = re.compile(r"^make ([\w-]+)")
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_page_says_what_code_and_results_say():
    claims.main(claims.ClaimsConfig(check=True))


def test_every_claim_has_a_name_of_its_own_and_a_command_that_exists():
    entries, names = [claim for group in claims.GROUPS for claim in group["claims"]], modules()
    assert len(entries) == len(claims.CLAIMS) == 25
    for claim in entries:
        if module := MODULE.match(claim["command"]):
            command = names.get(f"{module[1]}.__main__") or names[module[1]]  # of a package, or a file
            assert '__name__ == "__main__"' in command.read_text(), claim["command"]
        else:
            target = TARGET.match(claim["command"])[1]
            assert re.search(rf"^(?:[\w -]+ )?{target}[ :]", MAKEFILE, re.MULTILINE) or target.startswith("train-deit-")


def test_one_claim_can_be_decided_again(capsys):
    claims.main(claims.ClaimsConfig(only=["row-stochastic"]))
    assert f"**{HOLDS}**" in capsys.readouterr().out
    with pytest.raises(UserError, match="x is not a claim; they are one-scalar, "):
        claims.main(claims.ClaimsConfig(only=["x"]))


def test_how_many_examples_fit_the_printed_scores():
    """The page, which another test compares, has what follows from it."""
    assert core_scores.fitting_caps(core_scores.GKA) == [200]
    base = core_scores.fitting_caps(core_scores.BASE)
    assert max(core_scores.CAPS) in base and 200 not in base
    whole = [task for task in PAPER_TASKS if CORE_SIZES[task] <= min(base)]
    note = published.notes("core_subset")[1]
    assert f"fit {len(base):,} caps, the smallest {min(base):,}" in note and all(task in note for task in whole)
    assert language.same_examples().verdict == FAILS and runtime.batch_of_256_fits().verdict == UNTESTED


def test_guessing_is_what_the_bundle_says():
    paths = (measured.RESULTS / "core").glob("*.jsonl")
    lines = [line for path in paths for line in read_lines(path) if line["kind"] == "core"]
    baselines = {line["config"]["task"]: line["metrics"]["baseline"] for line in lines}
    assert baselines == core_scores.GUESSING


def test_finished_runs_decide_what_is_untested(tmp_path, monkeypatch):
    def line(label, top1):
        config = TrainConfig(model=measured.timm_name(label), data="x")
        metrics = {"parameters": measured.cost(label).parameters, "ema_top1": top1, "images": 50_000, "broken": 0}
        return {"kind": "train_deit", "command": "x", "config": config.record(), "metrics": metrics}

    assert accuracy.base_size().verdict == UNTESTED
    original = measured.finished_runs
    monkeypatch.setattr(measured, "finished_runs", lambda base: original(base, tmp_path))
    for top1, verdict in ((80.1, HOLDS), (78.0, FAILS)):
        write_lines(tmp_path / "imagenet.jsonl", line("DeiT-B", 81.8), line("GKA-B", top1))
        assert accuracy.base_size().verdict == verdict
    write_lines(tmp_path / "imagenet.jsonl", line("GKA-B", 80.3))
    assert accuracy.base_size().verdict == UNTESTED


def test_core_scores_of_depth_20_decide_the_gains(monkeypatch):
    assert language.improves_two_tasks().verdict == UNTESTED
    base = {task: core_scores.printed(task, core_scores.BASE) for task in core_scores.GUESSING}
    for gain, verdict in ((0.2, HOLDS), (0.0, FAILS)):
        gka = {task: replace(score, accuracy=score.accuracy + gain) for task, score in base.items()}
        monkeypatch.setattr(language, "_scored", lambda gka=gka: [base, gka])
        assert language.improves_two_tasks().verdict == verdict


def test_the_demos_results_decide_the_demos_claims(tmp_path, monkeypatch):
    assert language.higher_bpb().verdict == HOLDS
    lines = read_lines(measured.RESULTS / "demo.jsonl")
    for record in lines:
        if record["config"]["attention"] == "gka":
            record["metrics"]["val_bpb"] = 1.0
    write_lines(tmp_path / "demo.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    assert language.higher_bpb().verdict == NOT_SEEN
    with pytest.raises(UserError, match=r"demo\.jsonl, line 2: is not JSON"):
        (tmp_path / "demo.jsonl").write_text(json.dumps(lines[0]) + "\n{\n")
        claims.decide(claims.CLAIMS["bpb"])


@pytest.mark.parametrize("unfused, verdict", [(1.3, HOLDS), (0.95, NOT_SEEN), (None, UNTESTED)])
def test_the_benchmark_of_whole_models_decides_whether_fusion_is_the_reason(unfused, verdict, tmp_path, monkeypatch):
    times = {"baseline": 1.0, "ours": 0.9, "unfused": unfused}
    lines = [
        bench_line(role, role, time, case="deit-ti-b64", phase="training")
        for role, time in times.items()
        if time is not None
    ]
    write_lines(tmp_path / "bench_deit_nvidia-h200.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    finding = runtime.fusion_is_the_reason()
    assert finding.verdict == verdict and "fused: deit-ti-b64 training 1.11x" in finding.measured
    assert finding.scale == "NVIDIA H200"


@pytest.mark.parametrize("sdpa, verdict", [(1.0, FAILS), (3.0, HOLDS)])
def test_the_route_through_sdpa_decides_whether_sdpa_can_be_used(sdpa, verdict, tmp_path, monkeypatch):
    """Not the fastest of our routes, which on a GPU is another one."""
    timed = (("gka triton", "ours", 0.5), ("gka sdpa", "variant", sdpa), ("gka eager", "eager", 2.0))
    lines = [bench_line(*each, phase="forward+backward") for each in timed]
    write_lines(tmp_path / "bench_attention_nvidia-h200.jsonl", *lines)
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    assert runtime.cannot_use_sdpa().verdict == verdict and runtime.amenable_to_fused().verdict == HOLDS


def test_a_finished_pair_at_depth_20_decides_bits_per_byte_and_the_gap(monkeypatch):
    def run(val_bpb, gap):
        return measured.FinishedRun("x", {}, {"val_bpb": val_bpb, "gap": gap})

    assert language.gap_is_much_smaller().verdict == UNTESTED
    for gka, expected in ((run(0.82, 0.001), HOLDS), (run(0.78, 0.009), FAILS)):
        monkeypatch.setattr(language, "_finished", lambda gka=gka: {"nanochat_base": run(0.79, 0.01), "GKA": gka})
        findings = language.higher_bpb(), language.gap_is_much_smaller()
        assert {(finding.verdict, finding.scale) for finding in findings} == {(expected, "depth 20")}
