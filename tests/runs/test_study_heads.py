"""What is measured of a trained model's context and heads, against models that are known to do it or not."""

from types import SimpleNamespace

import pytest
import torch

from nanochat_gka.data.loader import PackedData
from nanochat_gka.data.tokenizer import Tokenizer
from runs.study import heads, probes
from runs.table import NOT_RUN
from runs.tables import study_heads
from shown import shown
from study_forms import awake
from tiny_gpt import write_run
from trainkit_gka.cli import UserError
from trainkit_gka.progress import read_lines

VOCABULARY, BOS = 5000, 4999


class Inductive:
    """A model that knows one thing: what followed the last time. Elsewhere it expects all tokens alike."""

    config, device = SimpleNamespace(vocab_size=VOCABULARY), torch.device("cpu")

    def __call__(self, ids):
        logits = torch.zeros(*ids.shape, VOCABULARY)
        for row, tokens in enumerate(ids.tolist()):
            followed = {}
            for place, token in enumerate(tokens):
                if token in followed:
                    logits[row, place, followed[token]] = 50.0
                if place + 1 < len(tokens):
                    followed[token] = tokens[place + 1]
        return logits


def ignorant(ids):
    return torch.zeros(*ids.shape, VOCABULARY)


ignorant.config, ignorant.device = Inductive.config, Inductive.device


def test_induction_and_copying_are_seen_where_they_are():
    rows = torch.arange(4 * 32).view(4, 32)  # natural text in which nothing repeats
    for model, accuracy, gain in ((Inductive(), 1.0, 8.5), (ignorant, 0.0, 0.0)):
        generator = torch.Generator().manual_seed(0)
        found = probes.induction(model, 4, 15, BOS, generator)
        assert found["accuracy"] == pytest.approx(accuracy, abs=0.02) and found["gain"] == pytest.approx(gain, abs=0.2)
        found = probes.copying(model, rows, generator)
        assert found["accuracy"] == pytest.approx(accuracy, abs=0.02) and found["gain"] == pytest.approx(gain, abs=0.2)


def test_losses_stand_at_their_places():
    class Rows(list):
        sequence_len = 9

        def batch(self, numbers):
            return torch.zeros(len(numbers), 9), torch.zeros(len(numbers), 9)

    def model(ids, targets, reduction):
        return torch.arange(1.0, 10.0).repeat(len(ids))

    model.device = torch.device("cpu")
    found = probes.loss_by_position(model, Rows(range(3)), batch=2)
    assert found == {"1": 1.0, "2-3": 2.5, "4-7": 5.5, "8-9": 8.5}


def test_heads_are_described_by_the_tokens_they_read():
    texts = torch.randint(70, (2, 16), generator=torch.Generator().manual_seed(1))
    form = dict(attention="gka", gka_values="normalised", sigma_squared=1e-4)
    for more in (dict(kernel="previous", sigma_squared=0.0), dict(head_offsets="P")):
        found = probes.heads(awake(**{**form, **more}), texts)
        assert len(found) == 16 and min(head["weight of the token before"] for head in found) > 0.99
        assert max(head["entropy (nats)"] for head in found) < 0.05
    assert all(head["sigma"] == pytest.approx(0.01) for head in found)
    found = probes.heads(awake(**form, head_offsets="P3"), texts)
    assert all(
        head["mean distance (tokens)"] == pytest.approx(sum(min(i, 3) for i in range(1, 16)) / 15, 0.01)
        for head in found
    )
    [head, *_] = probes.heads(awake(attention="gka", kernel="mean"), texts)
    expected = sum(torch.log(torch.tensor(min(i, 8) + 1.0)) for i in range(1, 16)) / 15
    assert head["entropy (nats)"] == pytest.approx(float(expected), rel=1e-4) and head["sigma"] is None
    assert probes.heads(awake(attention="gka", kernel="none"), texts) == []


FORMS = [dict(attention="GA", mixing="canon", offset_layers="all"), dict(attention="gka", mixing="kv-shift")]
FORMS += [dict(attention="gka", kernel="none"), dict(attention="gka", kernel="tied-softmax", head_offsets="PS")]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_run_becomes_a_line_and_a_row_of_the_table(form, packed, tmp_path, capsys):
    data = PackedData(packed / "packed")
    vocabulary = Tokenizer.load(packed / "tokenizer").vocab_size
    model = awake(vocab_size=vocabulary, sequence_len=data.sequence_len, **form)
    folder = write_run(tmp_path / "tiny", model, packed / "tokenizer")
    results = tmp_path / study_heads.HEADS.name
    settings = dict(run=folder, results=results, sequences=4, rows=4, texts=1, device_type="cpu")
    heads.main(heads.HeadsConfig(data=packed / "packed", **settings))
    [record] = read_lines(results)
    metrics = record["metrics"]
    assert len(metrics["heads"]) == (0 if form.get("kernel") == "none" else 16)
    assert list(metrics["loss_by_position"]) == ["1", "2-3", "4-7", "8-15", "16-31", "32"]
    assert "induction: right" in capsys.readouterr().out
    table = shown(study_heads.heads(tmp_path / "study"))  # of no rows: the run's name stands for its trial
    assert "| tiny | " in table and NOT_RUN not in table
    with pytest.raises(UserError, match="is of an earlier version"):
        heads.main(heads.HeadsConfig(**settings))
