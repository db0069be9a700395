"""The tables that programs write: pages agree with result files; the paper's figures beside finished runs of ours."""

import importlib
import json
import re
from pathlib import Path

import pytest

from bench_lines import line as bench_line
from bench_lines import write, write_lines
from deit_gka.training.config import TrainConfig as VisionTraining
from nanochat_gka.core_metric.published import CORE_SIZES, PAPER_CENTERED, PAPER_TASKS
from nanochat_gka.core_metric.report import centered
from nanochat_gka.train import TrainConfig as LanguageTraining
from runs import frames, pages, tables
from runs.bench import error, report
from runs.demo.language import COLUMNS
from runs.paper import measured, published
from runs.paper.measured import IMAGENET_VALIDATION
from runs.study import analyse
from runs.table import NOT_RUN
from runs.tables import BUILDERS, GUESSING
from trainkit_gka.cli import UserError


@pytest.mark.parametrize(
    "main, config",
    [
        (tables.main, tables.TablesConfig),
        (report.main, report.BenchReportConfig),
        (analyse.main, analyse.AnalyseConfig),
        (error.main, error.ErrorConfig),
    ],
)
def test_the_pages_say_what_the_result_files_say(main, config):
    main(config(check=True))


def test_a_page_out_of_date_ends_the_check_with_1_and_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    other = "<!-- table:other -->\nold\n<!-- /table -->\n"
    (tmp_path / "README.md").write_text(f"<!-- table:gpus -->\nold\n<!-- /table -->\n{other}")
    builders = {"gpus": report.gpus}
    with pytest.raises(SystemExit) as stopped:
        pages.write(builders, ["README.md"], "this", check=True)
    assert stopped.value.code == 1 and "README.md is out of date: run this" in capsys.readouterr().err
    for check in (False, True):
        pages.write(builders, ["README.md"], "this", check)
    text = (tmp_path / "README.md").read_text()
    assert "NVIDIA H200" in text and text.endswith(other)


def test_a_damaged_line_is_named_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "RESULTS", tmp_path)
    facts = {"date": "2026-11-21 17:04", "commit": "a14f06e", "hardware": "a CPU, 2 threads", "torch": "2.14"}
    row = {**facts, "config": {"model_tag": "d4-softmax-400"}, "metrics": dict.fromkeys(COLUMNS, 1)}
    (tmp_path / "demo.jsonl").write_text(json.dumps(row) + "\n{\n")
    with pytest.raises(UserError, match=r"demo\.jsonl, line 2: has no date, .*; delete the line and measure again"):
        tables.TABLES["demo"]()


@pytest.mark.parametrize("path", sorted(Path("runs").rglob("[a-z]*.py")), ids=str)
def test_every_module_can_be_imported(path):
    """A name that moved is found before a benchmark of an hour ends with it."""
    importlib.import_module(".".join(path.with_suffix("").parts))


# The paper's tables: its figures, counts, and finished runs of exactly its configuration


def vision_line(label="GKA-Ti", images=IMAGENET_VALIDATION, **changed):
    """The line of a finished vision run; `changed` settings make it another one."""
    config = VisionTraining(model=measured.timm_name(label), data="x", **changed)
    metrics = {"parameters": measured.cost(label).parameters, "images": images, "broken": 0, "ema_top1": 71.25}
    return {"kind": "train_deit", "command": "x", "config": config.record(), "metrics": metrics}


def language_line(model="GKA", **changed):
    config = LanguageTraining(**{"depth": 20, **measured.RECIPES[model], **changed})
    counts = {key: measured.language_counts(model)[key] for key in ("parameters", "flops_per_token", "train_tokens")}
    metrics = {**counts, "train_bpb": 0.8, "val_bpb": 0.81, "gap": 0.01, "eval_rows": "upstream"}
    return {"kind": "pretrain", "config": config.record(), "metrics": metrics}


def cells(number, base, results=measured.RESULTS):
    """(row, column) -> the paper's figure without its italics, ours, the difference."""
    table = BUILDERS[number](base, results)
    return {key: (paper.strip("*"), ours, difference) for key, (paper, ours, difference) in table.cells.items()}


def test_every_number_of_the_published_file_is_in_its_table(tmp_path):
    for about in published.TABLES.values():
        rows = BUILDERS[about["number"]](tmp_path).table().rows
        written = {re.sub(r" ±.*", "", cell.replace(",", "").strip("*")) for row in rows for cell in row}
        figures = {figure.replace(",", "") for row in about["rows"].values() for figure in row.values()}
        if about["number"] == 7:  # differences have a sign and all digits
            differences = {row["difference"] for row in about["rows"].values()}
            figures = (figures - differences) | {f"{float(figure):+.4f}" for figure in differences}
        assert figures <= written, figures - written


def test_only_200_examples_a_task_print_the_six_scores_of_gka():
    """Whole numbers of right answers that print a column's four digits, for every cap on the examples of a task."""

    def fits(task, column, cap):
        examples, wanted, guess = min(cap, CORE_SIZES[task]), PAPER_CENTERED[task][column], GUESSING[task]
        right = round((wanted * (1 - guess / 100) + guess / 100) * examples)
        return any(round(centered(n / examples, guess), 4) == wanted for n in (right - 1, right, right + 1))

    base, gka = (
        [cap for cap in range(20, 10_043) if all(fits(task, column, cap) for task in PAPER_TASKS)] for column in (0, 1)
    )
    assert gka == [200] and (len(base), base[0], base[-1]) == (3122, 1326, 10_042)


@pytest.mark.parametrize("number", [2, 3, 5, 8])
def test_counts_agree_with_the_printed_figures_to_their_last_digit(number, tmp_path):
    for (model, measure), (printed, ours, difference) in cells(number, tmp_path).items():
        if ours == NOT_RUN or measure == "Projections" or "%" in measure:
            continue
        known = {("DeiT-S", "FLOPs (G)"): 0.03, ("nanochat_base", "Params (in M)"): 1, ("GKA", "Params (in M)"): 1}
        last_digit = 10.0 ** -len(printed.partition(".")[2]) if "e" not in printed else 0.01
        assert abs(float(difference.rstrip(" %"))) <= known.get((model, measure), last_digit), (model, measure, ours)


def test_a_finished_run_of_exactly_the_papers_configuration_fills_its_cell(tmp_path):
    """Others name the command that fills them."""
    commands = {2: "train-deit-b-base", 4: "runs.bench.deit", 5: "train-deit-ti-vlt", 6: "pretrain-d20", 7: "eval-core"}
    for number, command in commands.items():
        table = BUILDERS[number](tmp_path, tmp_path).table()
        assert any(NOT_RUN in row for row in table.rows) and command in table.notes[-1]
    hybrid = {"parameters": 5_000_000, "flops": 2_000_000_000, "ema_top1": 71}  # which the ablation has below
    lines = [{**vision_line(), "config": {"model_tag": tables.HYBRID}, "metrics": hybrid}, language_line()]
    write_lines(tmp_path / "results.jsonl", vision_line(), *lines)
    for number in (2, 5):
        assert cells(number, tmp_path)["GKA-Ti", "Top-1 (%)"] == ("71.54", "71.250", "-0.290")
        assert cells(number, tmp_path)["DeiT-Ti", "Top-1 (%)"][1] == NOT_RUN
    assert cells(6, tmp_path)["GKA", "Val BPB"] == ("0.819080", "0.8100000", "-0.0090800")
    assert cells(6, tmp_path)["nanochat_base", "Val BPB"][1] == NOT_RUN
    hybrid = {measure: cell for (model, measure), cell in cells(5, tmp_path).items() if model == "GGGA-Ti (ours)"}
    assert sorted(ours for _, ours, _ in hybrid.values()) == ["2.000", "5.000", "71.000"]


OTHER_IMAGES = [dict(epochs=299), dict(model_kwargs=("depth=4",)), dict(batch_size=32), dict(input_size=16)]
OTHER_IMAGES += [dict(label="VLT-Ti"), dict(images=599)]
OTHER_TEXT = [dict(target_param_data_ratio=10.5), dict(head_offsets="PS")]


def test_a_run_of_another_configuration_fills_no_cell(tmp_path):
    lines = [vision_line(**changed) for changed in OTHER_IMAGES]
    lines += [language_line(**changed) for changed in OTHER_TEXT]
    write_lines(tmp_path / "results.jsonl", *lines, {**vision_line(), "command": "x --initial-weights y"})
    runs = measured.finished_runs(tmp_path)  # the demo's results too
    assert len(runs) > 14
    assert [label for label in published.VISION if measured.vision_run(label, runs)] == ["VLT-Ti"]
    assert not any(measured.language_run(model, runs) for model in measured.RECIPES)


def test_a_run_from_before_a_flag_had_its_default(tmp_path):
    line = vision_line("DeiT-S")
    del line["config"]["three_augment"]
    write_lines(tmp_path / "results.jsonl", line)
    assert cells(2, tmp_path)["DeiT-S", "Top-1 (%)"][1] == "71.25"


def test_core_has_differences_with_standard_errors_of_each_columns_examples(tmp_path):
    lines = {model: language_line(model) for model in measured.RECIPES}
    write_lines(tmp_path / "results.jsonl", *lines.values())
    for (model, line), accuracy in zip(lines.items(), (0.5, 0.6)):
        about = {"model": line["config"]["model_tag"], "step": measured.language_counts(model)["steps"]}
        scores = {"accuracy": accuracy, "examples": 100}
        rows = [{"config": {**about, "task": t}, "metrics": {**scores, "baseline": GUESSING[t]}} for t in PAPER_TASKS]
        write_lines(tmp_path / "core" / f"{model}.jsonl", *rows)
    copa = {column: cell for (task, column), cell in cells(7, tmp_path).items() if task == "copa"}
    assert copa["Baseline (centered)"] == ("0.3000 ± 0.095 (n = 100)", "0.0000 ± 0.100 (n = 100)", "-0.3000 ± 0.138")
    assert copa["GKA (centered)"] == ("0.3000 ± 0.095 (n = 100)", "0.2000 ± 0.098 (n = 100)", "-0.1000 ± 0.137")
    assert copa["Δ (GKA - Base)"][:2] == ("+0.0000 ± 0.135", "+0.2000 ± 0.140")


def test_the_runtime_table_has_gpus_shares(tmp_path):
    def line(phase, batch, kind, role, rate, hardware="NVIDIA H100"):
        about = dict(case=f"deit-ti-b{batch}", phase=phase, benchmark="deit", hardware=hardware)
        return bench_line(kind, role, 1e3 / rate, **about, items_per_second=rate)

    write(tmp_path, line("inference", 64, "gka", "ours", 9, "a CPU, 2 threads"))
    place = "GKA-Ti", "inference: img/s, 1 GPU"
    assert cells(4, tmp_path, tmp_path)[place][1] == NOT_RUN
    lines = [line("inference", 64, "gka", "ours", 40_000), line("inference", 128, "gka", "ours", 50_000)]
    lines += [line("training", 64, "gka", "ours", 1_500), line("training", 64, "softmax", "baseline", 1_600)]
    write(tmp_path, *lines, line("inference", 64, "gka eager", "unfused", 20_000))
    table = cells(4, tmp_path, tmp_path)
    assert table[place] == ("37,806", "50,000", "+32.25 %")
    assert table["GKA-Ti", "inference: batch"] == ("128", "128", "0")
    assert table["GKA-Ti", "training bs 64: img/s, 1 GPU"][:2] == (f"{7567 / 7:,.0f}", "1,500")
    assert table["DeiT-Ti", "training bs 64: MB, 1 GPU"][:2] == ("1,245", "10.0")
    assert table["GKA-Ti, unfused", place[1]] == ("37,806", "20,000", "-47.10 %")
    assert table["GKA-Ti, unfused", "training bs 64: img/s, 1 GPU"][1] == NOT_RUN


def test_every_table_is_printed_for_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the default folder need not be there
    tables.main(tables.TablesConfig())
    printed = capsys.readouterr().out
    assert {int(number) for number in re.findall(r"^Table (\d) of the paper", printed, re.MULTILINE)} == set(BUILDERS)
