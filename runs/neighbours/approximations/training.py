"""Models that learn with an approximation in place of the exact operator: digits of 257 tokens, texts of 2,048.

Everything else is the GKA model's own: its layers, initial bandwidths, recipe and optimiser. What is approximated is
one call of a layer.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm.models.vision_transformer as vit
import torch
import torch.nn.functional as F
from torch import nn

from deit_gka.model.attention import GKA
from nanochat_gka.model.gpt import GPT
from runs.demo import language
from runs.launch import command, run
from runs.neighbours import trainings
from runs.neighbours.approximations.case import Case
from runs.neighbours.approximations.forms import BEST, FORMS, WINDOW, attend, nystrom

Task = Literal["digits", "language", "language, offsets"]
EXACT, APPROXIMATE = "exact", (BEST, WINDOW)  # what is trained
SEQUENCE_LEN = 2048
DEPTH = 2  # of all models


class Size(NamedTuple):
    """How far a model's approximation sees exactly, and how many landmarks it has."""

    block: int
    landmarks: int


SIZES: dict[Task, Size] = {"digits": Size(32, 32), "language": Size(128, 64), "language, offsets": Size(128, 64)}
Numbers = dict[str, Any]


class Approximation(nn.Module):
    """y of one layer: exact on a block of tokens and those beside it, elsewhere through landmarks that are learned.

    form: a name of APPROXIMATE; `window` has nothing elsewhere, and no landmarks. Landmarks are (H, m,
    D), start at normalised normal vectors, and belong to the layer: those of a sequence would tell of its future.
    """

    def __init__(self, form: str, size: Size, heads: int, head_dim: int):
        super().__init__()
        self.form, self.block = form, size.block
        drawn = F.rms_norm(torch.randn(heads, size.landmarks, head_dim), (head_dim,))
        self.landmarks = nn.Parameter(drawn) if form == BEST else None

    def forward(self, queries, keys, values, log_sigma: torch.Tensor, causal: bool) -> torch.Tensor:
        """y, (B, N, H, D), of tensors of that shape; log_sigma (H,)."""
        batch = len(queries)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (queries, keys, values))  # (B H, N, D)
        case = Case(q, k, v, log_sigma.exp().repeat(batch), causal, bank=k[:, :0])
        if self.landmarks is None:
            features = FORMS[WINDOW].features(case, size=0, seed=0)
        else:
            features = nystrom(case, self.landmarks.repeat(batch, 1, 1))
        y = attend(case, features, near=True, block=self.block).output
        return y.unflatten(0, (batch, -1)).transpose(1, 2)


def timm_name(form: str) -> str:
    """The name under which timm builds GKA's layers, with an approximation for their operator."""
    if form == EXACT:
        return "gka"

    class ApproximatedGKA(GKA):
        def __init__(self, dim: int, num_heads: int = 8, **settings):
            super().__init__(dim, num_heads, **settings)
            self.approximation = Approximation(form, SIZES["digits"], num_heads, dim // num_heads)

        def mix(self, x, heads, attn_mask, is_causal):
            assert attn_mask is None, "approximations take no masks"
            return self.approximation(heads, heads, heads, self._log_sigma(), is_causal)

    name = "gka-" + form.replace(" ", "")
    vit.ATTN_LAYERS[name] = ApproximatedGKA
    return name


def train_digits(form: str, seed: int, epochs: int, out: Path) -> Numbers | None:
    """The demo's vision recipe at depth 2, 32 pixels, patches of 2: 257 tokens. None if a signal ended the run."""
    own = dict(input_size=32, warmup_epochs=1)  # the demo's 5 are for 50 epochs
    tag, model = form.replace(" ", ""), ["patch_size=2", f"depth={DEPTH}"]
    trained = trainings.train_digits(tag, timm_name(form), seed, epochs, out / "approximations", model, **own)
    return trained and {**trained[1], "settings": trained[0] | SIZES["digits"]._asdict()}


def plug(model: GPT, form: str, size: Size) -> None:
    """Let every layer of a GKA model mix with an approximation."""
    for attention in model.attentions:
        attention.mixing = Approximation(form, size, model.config.n_head, model.config.head_dim)

        def attend_approximately(rotary, queries, stored, layer=attention):
            keys, values = layer.keys_and_values(rotary, queries.shape[1], stored)
            return layer.mixing(queries, keys, values, layer.log_sigma, causal=True)

        attention.attend = attend_approximately


def prepare_text(out: Path) -> Path:
    """Rows of 2,048 tokens of the demo's text, which are made if they are missing."""
    text, packed = out / "text", out / f"text/packed-{SEQUENCE_LEN}"
    if not (text / "packed").exists():
        language.prepare(text)
    if not packed.exists():
        made_of = ["--corpus", text / "corpus", "--tokenizer", text / "tokenizer"]
        rows = ["--sequence-len", SEQUENCE_LEN, "--split-documents", "no", "--out", packed]
        run(command("nanochat_gka.pack", [*made_of, *rows]))
    return packed


def train_language(task: Task, form: str, seed: int, steps: int, out: Path) -> Numbers:
    """The comparison's language model, two layers deep, on rows of 2,048 tokens; with offsets as the demo has them."""
    flags = language.VARIANTS["gka-offsets" if "offsets" in task else "gka-paper"].flags
    config = trainings.language_config(flags, seed, steps, prepare_text(out), out, DEPTH)
    change = () if form == EXACT else (partial(plug, form=form, size=SIZES[task]),)
    settings, numbers = trainings.train_language(form, config, *change)
    return {**numbers, "settings": settings | SIZES[task]._asdict()}


TRAIN: dict[Task, Callable[[str, int, int, Path], Numbers | None]] = {
    "digits": train_digits,
    "language": partial(train_language, "language"),
    "language, offsets": partial(train_language, "language, offsets"),
}
