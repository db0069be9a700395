"""Models from disk: our checkpoints, and upstream nanochat's."""

import re
from dataclasses import fields
from pathlib import Path

import torch

from gka.runtime import checkpoint
from gka.runtime.checkpoint import Checkpoint
from gka.runtime.cli import UserError
from gka.runtime.files import read_json
from nanochat_gka.config import GPTConfig
from nanochat_gka.gpt import GPT, build
from nanochat_gka.tokenizer import Tokenizer


def find_checkpoint(path: Path, step: int = -1) -> Checkpoint:
    """A checkpoint folder itself, or the newest intact one (or `step`) of a run folder. Raises UserError if there is none."""
    path = Path(path)
    if (path / "manifest.json").exists():
        return checkpoint.load(path)
    folder = path / "checkpoints"
    found = checkpoint.load_newest(folder) if step < 0 else None
    if step >= 0 and (folder / f"step_{step:08d}").is_dir():
        found = checkpoint.load(folder / f"step_{step:08d}")
    if found is None:
        raise UserError(f"no checkpoint in {path}" + (f" at step {step}" if step >= 0 else "") + "; train one first (make demo, make pretrain-d20)")
    return found


def load_model(found: Checkpoint, device: torch.device | str) -> tuple[GPT, Tokenizer]:
    """The model of one of our checkpoints, ready to evaluate (float32 on CPU, bfloat16 activations on CUDA), and its tokenizer."""
    model = build(GPTConfig(**found.state["model_config"]), device)
    model.load_state_dict(found.tensors("model", device))
    return model.eval(), Tokenizer.load(found.path)


def load_upstream(folder: Path, step: int = -1, device: torch.device | str = "cpu") -> GPT:
    """The model of an upstream nanochat checkpoint folder (model_<step>.pt, meta_<step>.json); step -1 = the highest.

    Weights are read with weights_only=True. Raises UserError if the files are absent or another shape of model.
    """
    found = {int(m[1]): path for path in Path(folder).glob("model_*.pt") if (m := re.fullmatch(r"model_(\d+)\.pt", path.name))}
    if not found or (step >= 0 and step not in found):
        raise UserError(f"no upstream checkpoint model_<step>.pt{f' of step {step}' if step >= 0 else ''} in {folder}")
    path = found[max(found) if step < 0 else step]
    meta = read_json(path.with_name(path.name.replace("model_", "meta_").replace(".pt", ".json")), "upstream meta data")
    known = {field.name for field in fields(GPTConfig)}
    shape = {"window_pattern": "L", **{key: value for key, value in meta["model_config"].items() if key in known}}
    weights = torch.load(path, map_location=device, weights_only=True)
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
    model = build(GPTConfig(**shape), device)
    weights.setdefault("resid_lambdas", torch.ones(model.config.n_layer))
    weights.setdefault("x0_lambdas", torch.zeros(model.config.n_layer))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path} is not a nanochat model of this shape: {str(error).splitlines()[-1].strip()}") from None
    return model.eval()
