"""The four runs of the demo that `make explore` shows, tiny and untrained, with weights so wide that σ matters."""

from pathlib import Path

from deit_gka.model.registry import model_name
from figure_runs import vision_run
from nanochat_gka.data.tokenizer import Tokenizer
from nanochat_gka.model.config import GPTConfig
from tiny import documents
from tiny_gpt import awake, write_run

SHAPE = dict(sequence_len=32, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")


def write(folder: Path) -> Path:
    """The folder of a demo."""
    for kind in ("gka", "softmax"):
        vision_run(folder / "runs" / f"digits-{kind}-1-seed0", model_name("tiny", kind), strong=True)
    tokenizer = Tokenizer.train(documents(200, 0), 300)
    tokenizer.save(folder / "tokenizer")
    for name, form in (("gka-offsets", dict(attention="gka", head_offsets="PS")), ("softmax", {})):
        model = awake(GPTConfig(**SHAPE, vocab_size=tokenizer.vocab_size, **form))
        model.lm_head.weight.data *= 10
        write_run(folder / "runs" / f"d2-{name}-1", model, folder / "tokenizer")
    return folder
