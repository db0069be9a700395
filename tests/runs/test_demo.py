"""What the demo and the tables stand on: which models, commands side by side, tables of today's models alone, the ablation's table."""

import json

import pytest
import torch
import tyro

import tiny
from nanochat_gka.model.config import ModelFlags
from runs import tables
from runs.bench import gpt as bench_gpt
from runs.demo import __main__ as demo
from runs.demo import outlook
from runs.demo import report as demo_report
from runs.demo.__main__ import VARIANTS, run_tag
from runs.demo.commands import Job, run_side_by_side
from runs.demo.outlook import Outlook
from runs.paper import ablation
from trainkit.cli import UserError
from trainkit.results import append_result


def job(folder, name, code):
    return Job(name, "timeit", ["-n", 1, "-r", 1, code], folder, steps=1)


def test_commands_run_side_by_side_and_keep_their_output(tmp_path):
    """Each command waits until all three have started."""
    meet = f"import pathlib, time, os; here = pathlib.Path({str(tmp_path)!r}); (here / str(os.getpid())).touch()\n"
    meet += "while len([path for path in here.iterdir() if path.is_file()]) < 3: time.sleep(0.01)"
    jobs = [job(tmp_path / f"job-{number}", f"job {number}", meet) for number in range(3)]
    run_side_by_side(jobs, 3, Outlook({"training": 3.0}))
    assert all("1 loop" in (job.folder / "output.txt").read_text() for job in jobs)


def test_a_failing_command_ends_all_with_its_last_line_and_code(tmp_path, capfd):
    jobs = [
        Job(
            "fails",
            "deit_gka.export",
            ["--run", tmp_path / "nothing", "--out", tmp_path / "out"],
            tmp_path / "fails",
            steps=1,
        ),
        job(tmp_path / "sleeps", "sleeps", "import time; time.sleep(600)"),
    ]
    with pytest.raises(SystemExit) as left:
        run_side_by_side(jobs, 2, Outlook({"training": 2.0}))
    assert left.value.code == 2
    assert capfd.readouterr().err.startswith(f"error: no checkpoint in {tmp_path / 'nothing'}; train one first")
    assert jobs[1].process.poll() is not None


def test_a_command_that_is_killed_in_silence_is_named_and_not_by_what_an_earlier_one_printed(tmp_path, capfd):
    (tmp_path / "output.txt").write_text("of an earlier start\n")
    with pytest.raises(SystemExit) as left:
        run_side_by_side([job(tmp_path, "dies", "import os; os.kill(os.getpid(), 9)")], 1, Outlook({"training": 1.0}))
    assert left.value.code == 128 + 9
    assert (
        capfd.readouterr().err
        == f"error: dies ended with exit code -9; what it printed is in {tmp_path / 'output.txt'}\n"
    )


def test_the_outlook_corrects_what_is_left_by_the_pace(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(outlook.time, "monotonic", lambda: now[0])
    plan = Outlook({"preparing": 20.0, "training": 200.0})
    assert plan.left() == 220
    with plan.during("preparing"):
        now[0] += 60  # three times as long as expected
    with plan.during("training"):
        assert plan.left() == pytest.approx(200 * (60 + outlook.TRUST) / (20 + outlook.TRUST))
        now[0] += 300
        plan.advance(0.5)
        assert plan.left() == pytest.approx(100 * (360 + outlook.TRUST) / (120 + outlook.TRUST))
        plan.say("step 5 of 10")
        now[0] += 1
        plan.say("step 6 of 10")  # too soon after the line before
    assert plan.left() == 0
    printed = capsys.readouterr().out
    assert (
        "[2/2] training; about 6 min 40 s left in all" in printed and "step 5 of 10; about 4 min 31 s left" in printed
    )
    assert "step 6" not in printed


def test_reports_pass_over_lines_that_say_nothing(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in (
        {"event": "train", "step": 3, "smooth_loss": 2.0, "loss": 3.5}, {"event": "eval", "step": 3, "val_bpb": 1.0},
        {"event": "train", "step": 4, "smooth_loss": 1.5}, {"event": "eval", "step": 4, "val_bpb": 0.5})))  # fmt: skip
    tiny.damage_log(log, train="smooth_loss", eval="val_bpb")
    job = Job("job", "timeit", [], tmp_path, steps=4, finish_keys=("top1",))
    assert job.progress() == (4, "loss 3.500") and job.finish() is None
    row = {"train_tokens": 400, "step": 4, "log": log, "sigma": {}}
    assert [path.exists() for path in demo_report.plot({"softmax": row}, tmp_path)] == [True]
    with pytest.raises(UserError, match="holds no finished run"):
        ablation.finished(tmp_path)


def test_the_demo_samples_again_when_its_samples_were_cut_short(tmp_path):
    trained = {"GKA": Job("GKA", "nanochat_gka.train", [], tmp_path, steps=1)}
    (tmp_path / "log.jsonl").write_text('{"event": "train", "step": 400, "loss": 3.5}\n')
    (tmp_path / demo.SAMPLES).write_text('{"kind": "evaluate", "metr')
    [job] = demo.sample_jobs(trained)
    assert job.module == "nanochat_gka.evaluate" and job.flags[:2] == ["--run", tmp_path]
    assert job.progress() == (0, "")  # not the training's 400 steps of the 1 that it takes
    append_result(tmp_path / demo.SAMPLES, "evaluate", {}, {"samples": {"The ": ["end"]}}, torch.device("cpu"))
    assert demo.sample_jobs(trained) == []


def test_a_result_that_is_not_whole_is_named_by_its_table(tmp_path, monkeypatch):
    (tmp_path / "demo.jsonl").write_text('{"label": "softmax"}\n')
    monkeypatch.setattr(tables, "DEMO_RESULTS", tmp_path / "demo.jsonl")
    with pytest.raises(SystemExit, match=r"error: the results behind the table demo of README.md are not whole"):
        tables.render("README.md", (tables.ROOT / "README.md").read_text())


def test_the_ablation_table_puts_runs_beside_the_paper(tmp_path, capfd):
    with pytest.raises(
        UserError,
        match=r"deit_tiny_patch16_224 holds no finished run; make ablate-projections DATA=... trains the three",
    ):
        ablation.main(ablation.AblationConfig(runs=tmp_path))
    for accuracy, (_, model) in zip((70.5, 71.25, 69.75), ablation.MODELS.values()):
        (tmp_path / model).mkdir()
        record = {
            "event": "finish",
            "step": 9,
            "parameters": 5_000_000,
            "flops": None if accuracy > 71 else 2_000_000_000,
            "top1": accuracy,
            "ema_top1": accuracy + 1,
        }
        (tmp_path / model / "log.jsonl").write_text(json.dumps(record) + "\n")
    ablation.main(ablation.AblationConfig(runs=tmp_path))
    lines = [
        line
        for line in capfd.readouterr().out.splitlines()
        if any(label in line for label in ("softmax", "VLT", "GKA"))
    ]
    assert [
        ("70.50" in lines[0], "71.50 (72.2)" in lines[0]),
        ("72.25 (73.5)" in lines[1], "5.00 (5.28)" in lines[1]),
    ] == [(True, True)] * 2
    assert "70.75 (71.54)" in lines[2] and "2.00 (1.98)" in lines[2]


def test_the_demo_trains_the_papers_form_and_names_what_is_ours():
    """Folders of demos before rotated values were the default hold d4-gka-400, another form, which must not be taken for the paper's."""
    forms = {name: tyro.cli(ModelFlags, args=flags) for name, (_, flags) in VARIANTS.items()}
    assert (forms["gka-paper"].gka_values, forms["gka-paper"].head_offsets) == ("rotated", "")
    assert (forms["gka-offsets"].gka_values, forms["gka-offsets"].head_offsets) == ("normalised", "PS")
    assert [label for label, _ in VARIANTS.values()] == ["softmax", "GKA", "GKA + offsets (ours)"]
    assert run_tag("gka-paper") == "d4-gka-paper-400" and "gka" not in VARIANTS


def test_tables_leave_out_what_was_measured_of_other_models(tmp_path, monkeypatch):
    """Results of before the paper's form was the default: its name was another form's in the demo, and another kind's in the benchmark."""
    record = {"date": "2026-11-21 17:04", "commit": "a14f06e", "hardware": "a CPU, 2 threads", "torch": "2.14"}
    metrics = dict.fromkeys(tables.COLUMNS, 1)
    runs = {"d4-softmax-400": 7001, "d4-gka-400": 7002, "d4-gka-paper-400": 7003}
    lines = [
        {**record, "config": {"model_tag": tag}, "metrics": {**metrics, "parameters": count}, "label": "GKA"}
        for tag, count in runs.items()
    ]
    (tmp_path / "demo.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tables, "DEMO_RESULTS", tmp_path / "demo.jsonl")
    shown = tables.demo_table()
    assert "| **softmax** | 7,001 |" in shown and "| **GKA** | 7,003 |" in shown and "7,002" not in shown

    def compared(kinds, speed):
        for phase in bench_gpt.DECODE:
            for kind in kinds:
                config = {
                    "case": "d4",
                    "phase": phase,
                    "candidate": kind,
                    "role": "ours",
                    "group": f"{phase}-{speed}",
                    "quick": False,
                }
                yield {**record, "config": config, "metrics": {"items_per_second": speed, "cache_mib": 16.0}}

    monkeypatch.setattr(tables.bench_results, "RESULTS", tmp_path)
    path, older = (
        tmp_path / "bench_gpt_a-cpu-2-threads.jsonl",
        list(compared(["softmax", "gka", "gka-keys", "gka-rotated"], 111)),
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    assert "111" not in tables.decode_table()
    path.write_text("".join(json.dumps(line) + "\n" for line in [*older, *compared(tables.DECODERS, 222)]))
    assert tables.decode_table().count("| 222 | 222 |") == 4 and set(tables.DECODERS) == {
        "softmax",
        "gka",
        *bench_gpt.DECODE_ONLY,
    }
