"""What a language run says of itself: speeds only when they were measured."""

import json
import re

import pytest

import tiny
from gpt_runs import flags
from nanochat_gka.train import TrainConfig, main
from processes import signals_kept
from trainkit.cli import run
from trainkit.progress import rate, read_events


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


def test_packing_a_few_words_gives_a_figure(tmp_path, capsys):
    from nanochat_gka import pack, tokenizer

    tiny.write_corpus(tmp_path / "corpus", docs=12)
    tokenizer.main(tokenizer.TokenizerConfig(corpus=tmp_path / "corpus", out=tmp_path / "tokenizer", vocab_size=270))
    config = {"corpus": tmp_path / "corpus", "tokenizer": tmp_path / "tokenizer", "out": tmp_path / "packed"}
    pack.main(pack.PackConfig(**config, sequence_len=8, workers=1))
    [speed] = re.findall(r"([\d.,e-]+) MB/s of text per worker", capsys.readouterr().out)
    assert float(speed) > 0
