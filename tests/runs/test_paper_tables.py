"""The paper's tables beside ours: counts, and finished runs of the very configuration."""

import re

import pytest

from bench_lines import write_lines
from deit_gka.training.config import TrainConfig as VisionTraining
from nanochat_gka.core_metric.bundle import CORE_SIZES, PAPER_TASKS
from nanochat_gka.train import TrainConfig as LanguageTraining
from runs.comparison import core_scores, measured, tables
from runs.comparison.measured import GPUS, IMAGENET_VALIDATION
from runs.comparison.tables import BUILDERS, Sources
from runs.paper import published
from runs.table import NOT_RUN
from trainkit_gka.cli import UserError

DEMO_IMAGES = 599


def vision_records(label="GKA-Ti", images=IMAGENET_VALIDATION, **changed):
    """Settings and numbers of a finished vision run; `changed` settings make it another one."""
    config = VisionTraining(model=measured.timm_name(label), data="x", **changed)
    counts = {"parameters": measured.cost(label).parameters, "images": images, "broken": 0}
    return config, {**counts, "top1": 71.0, "ema_top1": 71.25}


def vision_folder(base, label="GKA-Ti", images=IMAGENET_VALIDATION, steps=300 * 715, **changed):
    config, finish = vision_records(label, images, **changed)
    start = {"event": "start", "step": 0, "config": config.identity(), "world_size": 7, "initial_weights": None}
    write_lines(base / "runs" / config.tag / "log.jsonl", start, {"event": "finish", "step": steps, **finish})


def language_folder(base, model="GKA", **changed):
    recipe = {name.replace("-", "_"): value for name, value in measured.RECIPES[model].items()}
    config = LanguageTraining(**{"depth": 20, **recipe, **changed})
    counts = {key: measured.language_counts(model)[key] for key in ("parameters", "flops_per_token", "train_tokens")}
    finish = {"event": "finish", "step": 2650, **counts, "train_bpb": 0.8, "val_bpb": 0.81, "gap": 0.01}
    finish["eval_rows"] = "upstream"
    write_lines(
        base / "runs" / config.tag / "log.jsonl", {"event": "start", "step": 0, "config": config.identity()}, finish
    )
    return config.tag


def cells(number, base, results=measured.RESULTS):
    """(first cell, second cell) -> the rest of the row, of which the paper's figure is in italics."""
    rows = BUILDERS[number](Sources(base, results)).rows
    return {(name, measure): [paper.strip("*"), *rest] for name, measure, paper, *rest in rows}


def notes(number, base, results=measured.RESULTS):
    return " ".join(BUILDERS[number](Sources(base, results)).notes)


def test_every_number_of_the_published_file_is_in_its_table(tmp_path):
    for about in published.TABLES.values():
        shown = {
            cell.replace(",", "").strip("*")
            for row in BUILDERS[about["number"]](Sources(tmp_path)).rows
            for cell in row
        }
        figures = {figure.replace(",", "") for row in about["rows"].values() for figure in row.values()}
        if about["number"] == 7:  # with standard errors, differences with a sign
            shown = {re.sub(r" ±.*", "", cell) for cell in shown}
            differences = {row["difference"] for row in about["rows"].values()}
            figures = (figures - differences) | {f"{float(figure):+.4f}" for figure in differences}
        if about["number"] == 1:
            assert shown >= set(about["rows"])
        assert figures <= shown, figures - shown


@pytest.mark.parametrize("number", [2, 3, 5, 8])
def test_counts_agree_with_the_printed_figures_to_their_last_digit(number, tmp_path):
    for (model, measure), (paper, ours, difference) in cells(number, tmp_path).items():
        if ours == NOT_RUN or measure == "Projections" or "%" in measure:
            continue
        known = {("DeiT-S", "FLOPs (G)"): 0.03, ("nanochat_base", "Params (in M)"): 1, ("GKA", "Params (in M)"): 1}
        last_digit = 10.0 ** -len(paper.partition(".")[2]) if "e" not in paper else 0.01
        assert abs(float(difference.rstrip(" %"))) <= known.get((model, measure), last_digit), (model, measure, ours)


def test_unmeasured_cells_say_not_run_with_the_command_that_fills_them(tmp_path):
    commands = {2: "make train-deit-b-base DATA=", 4: "runs.bench.deit", 5: "make train-deit-ti-vlt "}
    commands |= {6: "make pretrain-d20 NGPU=7", 7: "make eval-core NGPU=7"}
    for number, command in commands.items():
        table = BUILDERS[number](Sources(tmp_path, tmp_path))
        assert any(NOT_RUN in row for row in table.rows) and command in table.notes[-1]
    assert cells(6, tmp_path)["GKA", "Val BPB"] == ["0.819080", NOT_RUN, ""] and NOT_RUN not in notes(3, tmp_path)


def test_finished_run_of_the_very_configuration_fills_its_cell(tmp_path):
    vision_folder(tmp_path)
    for number in (2, 5):
        assert cells(number, tmp_path)["GKA-Ti", "Top-1 (%)"] == ["71.54", "71.250", "-0.290"]
        assert cells(number, tmp_path)["DeiT-Ti", "Top-1 (%)"][1] == NOT_RUN
        assert "make train-deit-ti DATA" not in notes(number, tmp_path)


OTHERS = {"epochs": 299, "model_kwargs": ("depth=4",), "batch_size": 32, "input_size": 16, "label": "VLT-Ti"}
OTHERS |= {"images": DEMO_IMAGES, "steps": 300 * 70}


@pytest.mark.parametrize("changed", [{name: value} for name, value in OTHERS.items()], ids=OTHERS)
def test_vision_run_of_another_configuration_fills_no_cell(tmp_path, changed):
    vision_folder(tmp_path, **changed)
    assert cells(2, tmp_path)["GKA-Ti", "Top-1 (%)"][1] == NOT_RUN


def test_the_demos_results_fill_no_cell(tmp_path):
    """runs/results holds the demo's records alone."""
    runs = measured.finished_runs(tmp_path)
    assert len(runs) > 5
    assert not any(measured.vision_run(label, runs) for label in published.VISION)
    assert not any(measured.language_run(model, runs) for model in measured.RECIPES)


def test_result_lines_count_as_run_folders_do(tmp_path):
    config, finish = vision_records("DeiT-S")
    settings = config.record()
    del settings["three_augment"]  # a flag that was not there yet had its default
    line = {"kind": "train_deit", "command": "x", "config": settings, "metrics": {**finish, "ema_top1": 79.9}}
    write_lines(tmp_path / "results.jsonl", {**line, "command": "x --initial-weights y"})
    assert cells(2, tmp_path)["DeiT-S", "Top-1 (%)"][1] == NOT_RUN
    write_lines(tmp_path / "results.jsonl", {**line, "config": {**settings, "lr": 2e-3}}, line)
    assert cells(2, tmp_path)["DeiT-S", "Top-1 (%)"][1] == "79.90"


def test_language_run_fills_its_cells_and_other_ratios_do_not(tmp_path):
    language_folder(tmp_path, target_param_data_ratio=10.5)
    assert cells(6, tmp_path)["GKA", "Val BPB"][1] == NOT_RUN
    language_folder(tmp_path, head_offsets="PS")
    assert cells(6, tmp_path)["GKA", "Val BPB"][1] == NOT_RUN
    language_folder(tmp_path)
    assert cells(6, tmp_path)["GKA", "Val BPB"] == ["0.819080", "0.8100000", "-0.0090800"]
    assert cells(6, tmp_path)["nanochat_base", "Val BPB"][1] == NOT_RUN
    assert re.search(r"\bGKA, .*: upstream rows", notes(6, tmp_path))  # and the other run's


def test_core_has_differences_with_standard_errors_of_each_columns_examples(tmp_path):
    for model, accuracy in (("nanochat_base", 0.5), ("GKA", 0.6)):
        about = {"model": language_folder(tmp_path, model), "step": measured.language_counts(model)["steps"]}
        lines = []
        for task in PAPER_TASKS:
            metrics = {"accuracy": accuracy, "baseline": core_scores.GUESSING[task], "examples": 100}
            lines.append({"config": {**about, "task": task}, "metrics": metrics})
        write_lines(tmp_path / "core" / f"{model}.jsonl", *lines)
    table = BUILDERS[7](Sources(tmp_path))
    base, gka, difference = [[cell.strip("*") for cell in row[2:]] for row in table.rows if row[0] == "copa"]
    assert base == ["0.3000 ± 0.095 (n = 100)", "0.0000 ± 0.100 (n = 100)", "-0.3000 ± 0.138"]
    assert gka == ["0.3000 ± 0.095 (n = 100)", "0.2000 ± 0.098 (n = 100)", "-0.1000 ± 0.137"]
    assert difference == ["+0.0000 ± 0.135", "+0.2000 ± 0.140", "+0.2000"]
    assert "(n = 200)" in table.rows[1][2] and f"(n = {CORE_SIZES['hellaswag_zeroshot']:,})" in table.rows[0][2]


def test_the_runtime_table_has_totals_and_gpus_shares(tmp_path):
    roles = {"gka": "ours", "softmax": "baseline", "gka-unfused": "unfused"}

    def line(phase, batch, kind, rate):
        config = {"case": f"deit-ti-b{batch}", "phase": phase, "candidate": kind, "role": roles[kind], "quick": False}
        metrics = {"status": "ok", "median_ms": 1e3 / rate, "items_per_second": rate, "peak_mib": 300.5}
        return {"hardware": "NVIDIA H100", "config": config | {"group": f"{phase}{batch}"}, "metrics": metrics}

    inference, training = "inference: img/s, 1 GPU", "training bs 64: img/s, 1 GPU"
    write_lines(tmp_path / "bench_deit_a-cpu-2-threads.jsonl", line("inference", 64, "gka", 9))
    assert cells(4, tmp_path, tmp_path)["GKA-Ti", inference][1] == NOT_RUN
    lines = [line("inference", 64, "gka", 40_000), line("inference", 128, "gka", 50_000)]
    lines += [line("training", 64, "gka", 1_500), line("training", 64, "softmax", 1_600)]
    lines += [line("inference", 64, "gka-unfused", 20_000), line("training", 64, "gka-unfused", 700)]
    write_lines(tmp_path / "bench_deit_nvidia-h100.jsonl", *lines)
    shown = cells(4, tmp_path, tmp_path)
    assert shown["GKA-Ti", inference] == ["37,806", "50,000", "+32.25 %"]
    assert shown["GKA-Ti", "inference: batch"] == ["128", "128", "0"]
    assert shown["GKA-Ti", training][:2] == [f"{7567 / 7:,.0f}", "1,500"]
    assert shown["DeiT-Ti", "training bs 64: MB, 1 GPU"][:2] == ["1,245", "300.5"]
    assert shown["GKA-Ti, unfused", inference] == ["37,806", "20,000", "-47.10 %"]
    assert shown["GKA-Ti, unfused", training][:2] == ["1,081", "700"]
    assert shown["GKA-Ti, unfused", "training bs 128: MB, 1 GPU"][:2] == ["4,876", NOT_RUN]
    assert shown["GKA-Ti", "training bs 64: img/s, 7 GPUs"][1] == NOT_RUN
    config, finish = vision_records(batch_size=64 * GPUS, epochs=1, warmup_epochs=0, model_tag="ti-64")
    metrics = {**finish, "images_per_second": 9_999.0, "memory_mib": 2.0}
    record = {"kind": "train_deit", "processes": GPUS, "config": config.record(), "metrics": metrics}
    on_cpus = {**record, "metrics": {**metrics, "memory_mib": 0.0}}
    write_lines(tmp_path / "results.jsonl", on_cpus)
    assert cells(4, tmp_path, tmp_path)["GKA-Ti", "training bs 64: img/s, 7 GPUs"][1] == NOT_RUN
    write_lines(tmp_path / "results.jsonl", on_cpus, record)
    assert cells(4, tmp_path, tmp_path)["GKA-Ti", "training bs 64: img/s, 7 GPUs"][1] == "9,999"


def test_the_terminal_has_the_papers_layout_in_80_letters_and_what_was_run(tmp_path, capsys, monkeypatch):
    """Nothing was run here: counts are shown with the paper's figures, other rows of ours with --all alone."""
    monkeypatch.chdir(tmp_path)  # the default folder need not be there
    tables.main(tables.PaperTablesConfig())
    short = capsys.readouterr().out
    assert {int(number) for number in re.findall(r"^Table (\d) of the paper", short, re.MULTILINE)} == set(BUILDERS)
    assert max(map(len, short.splitlines())) <= 80
    vision = short.split("Table 3 of")[0]
    assert re.search(r"^ *GKA-Ti +Paper +4\.38 +0\.44.*\n(?:.*\n)*? +Ours +4\.383 +0\.445", vision, re.MULTILINE)
    tables.main(tables.PaperTablesConfig(all=True, only=[6, 2]))
    everything = capsys.readouterr().out
    assert "Ours - paper" not in short and "Ours - paper" in everything and "Table 1 of" not in everything
    assert re.search(r"Ours +not run +not run", everything)
    with pytest.raises(UserError, match="--only takes numbers from 1 to 8, got 9"):
        tables.main(tables.PaperTablesConfig(tmp_path, only=[9]))


def test_runs_with_other_settings_have_rows_of_their_own(tmp_path):
    """Of BASE alone; the one of the paper's configuration fills the paper's row and has no other."""
    vision_folder(tmp_path, epochs=7)
    vision_folder(tmp_path, "DeiT-Ti")
    name = language_folder(tmp_path, head_offsets="PS", model_tag="with-offsets")
    scored, metrics = {"model": name, "step": 2650}, {"accuracy": 0.5, "baseline": 25, "examples": 9}
    lines = [{"config": {**scored, "task": task}, "metrics": metrics} for task in PAPER_TASKS]
    write_lines(tmp_path / "core" / "a.jsonl", *lines)
    other = next(path.name for path in (tmp_path / "runs").iterdir() if "gka" in path.name)
    named = {model for model, _ in cells(2, tmp_path)} - published.rows("main_results").keys()
    assert named == {other} and "Runs with other settings" in notes(2, tmp_path)
    assert cells(2, tmp_path)[other, "Top-1 (%)"] == ["", "71.25", ""]
    assert cells(6, tmp_path)[name, "Val BPB"] == ["", "0.81", ""]
    assert cells(8, tmp_path)[name, "Train tokens"] == ["", "2.77873e9", ""]
    assert cells(7, tmp_path)["copa", name] == ["", "0.3333 ± 0.222 (n = 9)", ""]
    assert ("mean", name) in cells(7, tmp_path)
    assert "Runs with other settings" not in notes(6, tmp_path / "nothing")
