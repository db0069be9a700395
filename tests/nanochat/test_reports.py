"""What a language run says of itself: speeds that were measured, bandwidths out of range, damaged rows."""

import json
import math
import re
import shutil

import numpy as np
import pytest

import tiny
from gka import bandwidth_warnings
from gpt_runs import flags
from nanochat_gka.train import TrainConfig, main
from processes import signals_kept
from trainkit_gka.cli import run
from trainkit_gka.progress import rate, read_events
from trainkit_gka.results import read_results


def train(packed, out, *more) -> int:
    try:
        with signals_kept():
            run(main, TrainConfig, list(map(str, flags(packed, out, *more))))
    except SystemExit as left:
        return left.code
    return 0


@pytest.mark.parametrize("value, words", [(None, ""), (12345.6, "12,346 B/s"), (0.0312, "0.031 B/s"), (9.96, "10 B/s")])
def test_a_speed_is_never_a_false_zero(value, words):
    assert rate(value, "B/s") == words


def test_a_run_too_short_to_time_says_nothing_of_its_speed(packed, tmp_path, capsys):
    assert train(packed, tmp_path, "--num-iterations", 3) == 0
    printed = capsys.readouterr().out
    assert "finished, validation bpb" in printed and "tok/s" not in printed
    [finish] = read_events(tmp_path / "run/log.jsonl", "finish")
    assert finish["tokens_per_second"] is None and finish["mfu"] is None
    assert {line["tokens_per_second"] for line in read_events(tmp_path / "run/log.jsonl", "train")} == {None}
    assert json.loads((tmp_path / "results.jsonl").read_text())["metrics"]["tokens_per_second"] is None
    assert train(packed, tmp_path / "longer", "--num-iterations", 5) == 0
    assert re.search(r"finished, .*, [1-9][\d,]* tok/s\n", capsys.readouterr().out)


def test_every_figure_says_of_which_rows_it_is(packed, tmp_path, capsys):
    """Those that its evaluation took, whatever a run that goes on after it asks for; nothing where no record says."""
    log = tmp_path / "run/log.jsonl"
    assert train(packed, tmp_path, "--num-iterations", 2, "--eval-rows", "spaced") == 0
    printed = capsys.readouterr().out
    assert re.search(r"step 00002 \| train bpb [\d.]+ \| validation bpb [\d.]+ \| spaced rows", printed)
    assert re.search(r"finished, validation bpb [\d.]+, train bpb [\d.]+, spaced rows\n", printed)
    assert {line["eval_rows"] for line in read_events(log, "eval")} == {"spaced"}
    lines = [line for line in read_events(log) if line["event"] != "finish"]
    for recorded, words in (("spaced", ", spaced rows\n"), (None, r"\n")):
        known = [{key: line[key] for key in line if recorded or key != "eval_rows"} for line in lines]
        log.write_text("".join(json.dumps(line) + "\n" for line in known))
        assert train(packed, tmp_path, "--num-iterations", 2, "--eval-rows", "upstream") == 0
        assert re.search(rf"finished, validation bpb [\d.]+, train bpb [\d.]+{words}", capsys.readouterr().out)
        [finish] = read_events(log, "finish")
        assert finish["eval_rows"] == recorded


def test_packing_a_few_words_gives_a_figure(tmp_path, capsys):
    from nanochat_gka import pack, tokenizer

    tiny.write_corpus(tmp_path / "corpus", docs=12)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=tmp_path / "corpus", out=tmp_path / "tokenizer", vocab_size=270))
    config = {"corpus": tmp_path / "corpus", "tokenizer": tmp_path / "tokenizer", "out": tmp_path / "packed"}
    pack.main(pack.PackConfig(**config, sequence_len=8, workers=1))
    [speed] = re.findall(r"([\d.,e-]+) MB/s of text per worker", capsys.readouterr().out)
    assert float(speed) > 0


def test_bandwidths_out_of_range_are_said_at_once_and_with_the_result(packed, tmp_path, capsys):
    """A run that goes on as the identity, or as a mean, has finite losses."""
    assert train(packed, tmp_path, "--num-iterations", 4, "--sigma-lr", "1e6", "--eval-every", 2) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("warning: ")]
    pattern = (
        r"warning: step (\d): sigma of layer_0, heads? [0-9, ]+: [0-9.einf, -]+, so (small|large) that every token "
    )
    step = re.match(pattern, lines[0])[1]
    assert all(line.endswith("; start again with a lower --sigma-lr") for line in lines)
    assert len(lines) == 2 * len(set(lines)) and int(step) < 4  # at once, and after the result
    assert printed.index(f"step 0000{step}/") < printed.index(lines[0]) < printed.index(f"step 0000{int(step) + 1}/")
    assert printed.index("finished, ") < printed.rindex(lines[0])
    [finish] = read_events(tmp_path / "run/log.jsonl", "finish")
    [result] = read_results(tmp_path / "results.jsonl")
    assert (
        lines[0].removeprefix("warning: ") in finish["warnings"] and finish["warnings"] == result["metrics"]["warnings"]
    )


@pytest.mark.parametrize(
    "sigma, fault",
    [(0.0, "small"), (5.6e-3, "small"), (5.7e-3, ""), (64**0.25, ""), (1130, ""), (1132, "large"), (math.inf, "large")],
)
def test_a_bandwidth_is_judged_by_what_it_does_to_features_of_its_length(sigma, fault):
    """Tokens that differ by 1 % of the norm have no weight at all; or opposite ones have the same to 1e-4."""
    found = bandwidth_warnings(3, [1.0, sigma, sigma], 64, "--lr")
    assert [*found] == (["sigma of layer_3, heads 1, 2"] if fault else [])
    assert all(f": {sigma:.3g}, {sigma:.3g}, so {fault} that" in line for line in found.values())
    norm = 64**0.5
    near, far = (math.exp(-(distance**2) / (2 * sigma**2)) if sigma else 0.0 for distance in (norm / 100, 2 * norm))
    assert (near < math.exp(-100)) == (fault == "small") and (far > 1 - 1e-4) == (fault == "large")


def test_ordinary_bandwidths_are_not_warned_of(uninterrupted):
    assert read_events(uninterrupted / "run/log.jsonl", "finish")[0]["warnings"] == []


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_that_are_not_in_the_vocabulary_name_file_and_row(packed, tmp_path, capsys, split):
    """Of a damaged file whose checksum nobody verifies; training reads the rows in another order."""
    shutil.copytree(packed / "packed", tmp_path / "packed")
    path = tmp_path / f"packed/{split}_000000.bin"
    rows = np.fromfile(path, dtype="<u2").reshape(-1, tiny.SEQUENCE_LEN + 1)
    rows[1, 5] = rows[1, 6] = 60000
    rows.tofile(path)
    assert train(tmp_path, tmp_path / "out", "--num-iterations", 60, "--no-verify-data") == 2
    error = f"error: {path} is damaged: row 1 has id 60000, and the vocabulary has 300 tokens; delete "
    errors = capsys.readouterr().err
    assert errors.startswith(error) and errors.count("\n") == 1 and "pack again" in errors
