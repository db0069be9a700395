"""Models from disk: our runs and checkpoints, exported models, and upstream nanochat's checkpoints."""

import pickle
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from nanochat_gka.data import huggingface_tokenizer
from nanochat_gka.data.tokenizer import EXPORTED_NAME, FILE_NAME, Tokenizer
from nanochat_gka.model.accounting import parameter_counts
from nanochat_gka.model.config import GPTConfig
from nanochat_gka.model.gpt import GPT, build
from trainkit_gka import checkpoint
from trainkit_gka.checkpoint import Checkpoint, run_folder
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.exports import CONFIG, WEIGHTS, check_files, export_folder
from trainkit_gka.files import read_json, sha256, write_json
from trainkit_gka.results import git_commit

MODEL_TYPE, ARCHITECTURE = "gka-gpt", "GKAForCausalLM"  # transformers' names for it, see `nanochat_gka.hf`
# Keys of config.json about the files beside it; they do not hold for a model that is trained further.
FACTS_OF_THE_FILES = ("attention", "sigma", "parameters", "exported_at_commit", "checkpoint_sha256", "sha256")
# Prefixes of weights that nanochat has had since 2026-03-09 (6ed7d1d). Its settings are the same.
LATER_NANOCHAT = ("smear_", "backout_")


@dataclass
class Loaded:
    """A model ready to evaluate (float32 on a CPU, bfloat16 activations on CUDA), and its origin."""

    model: GPT
    tokenizer: Tokenizer
    name: str  # of the run
    step: int | None  # None for a model of another library
    sha256: str  # of the checkpoint's weights, for an exported model too
    training: dict[str, Any]  # tokens, steps, commit, source and settings of the run
    data: dict[str, Any] = field(default_factory=dict)  # the checkpoint's `PackedData.provenance`


def load(path: Path | str, step: int = -1, device: torch.device | str = "cpu") -> Loaded:
    """The model in a run folder (its newest intact checkpoint, or `step`), a checkpoint folder, or an exported folder.

    Nothing is unpickled and checksums are verified. Raises UserError if there is no model, or a damaged or foreign one.
    """
    path = Path(path)
    if step < -1:
        raise UserError(f"--step must be the step of a checkpoint, or -1 for the newest, got {step}")
    if (path / CONFIG).exists():
        return _load_exported(path, step, device)
    saved = find_checkpoint(path, step)
    try:
        return _load_saved(saved, device)
    except (OSError, UserError):
        if saved.path.exists():
            raise
        return load(path, step, device)  # a training has deleted it meanwhile, and saved another


def _load_saved(saved: Checkpoint, device: torch.device | str) -> Loaded:
    """The model in one of our checkpoints."""
    state, manifest = saved.state, read_json(saved.path / "manifest.json", "manifest")
    if WEIGHTS not in manifest or not {"model_config", "train_config", "data", "tokens", "steps"} <= state.keys():
        raise UserError(f"{saved.path} is not a checkpoint of a language model")
    model = _build(state["model_config"], saved.tensors("model"), device, saved.path)
    data = state["data"]
    training = {name: state.get(name, "unknown") for name in ("tokens", "steps", "commit")}
    training |= {"source": data["source"], "settings": state["train_config"]}
    name = run_folder(saved.path).name
    tokenizer = _tokenizer(saved.path, model)
    return Loaded(model, tokenizer, name, saved.step, manifest[WEIGHTS], training, data)


def find_checkpoint(path: Path, step: int = -1) -> Checkpoint:
    """The checkpoint in a checkpoint folder, or the newest intact one (or `step`) of a run folder.

    Raises UserError if there is none.
    """
    if (path / "manifest.json").exists():
        saved = checkpoint.load(path)
        if step not in (-1, saved.step):
            raise UserError(f"{path} holds step {saved.step}, not {step}")
        return saved
    folder = path / "checkpoints"
    if step >= 0 and checkpoint.checkpoint_path(folder, step).is_dir():
        return checkpoint.load(checkpoint.checkpoint_path(folder, step))
    if step < 0 and (saved := checkpoint.load_newest(folder, warn=lambda message: print(message, file=sys.stderr))):
        return saved
    steps = sorted(int(entry.name[5:]) for entry in folder.glob("step_*") if entry.name[5:].isdigit())
    at = f" at step {step}; it has {', '.join(map(str, steps))}" if step >= 0 and steps else "; train one first"
    raise UserError(f"no checkpoint in {path}{at}")


def _tokenizer(folder: Path, model: GPT, name: str = FILE_NAME) -> Tokenizer:
    tokenizer, expected = Tokenizer.load(folder, name), model.config.vocab_size
    if tokenizer.vocab_size != expected:
        problem = f"{folder / name} has {tokenizer.vocab_size} tokens and the model beside it {expected}"
        raise UserError(f"{problem}: it belongs to another model; put back the run's tokenizer")
    return tokenizer


def _build(shape: dict[str, Any], weights: dict[str, torch.Tensor], device: torch.device | str, path: Path) -> GPT:
    """The model of a saved shape with these weights. Raises UserError if they do not fit each other."""
    try:
        model = build(GPTConfig.from_saved(shape), device)
        model.load_state_dict(weights)
    except (TypeError, ValueError, RuntimeError) as error:  # torch's last line names the tensors, and wrong shapes
        reason = shorten(str(error).splitlines()[-1], 200, placeholder=" ...")
        raise UserError(f"{path} does not hold a model of the shape it states: {reason}") from None
    return model.eval()


def export(loaded: Loaded, folder: Path) -> dict[str, Any]:
    """Write model.safetensors, config.json and the tokenizer to `folder`, which `load` and transformers read.

    The tokenizer is written in our form, and in Hugging Face's for `nanochat_gka.hf`. The folder appears when it is
    complete. Returns the content of config.json. Raises UserError if the folder holds another model, or other files.
    """
    model = loaded.model
    special = huggingface_tokenizer.special_ids(loaded.tokenizer)
    about = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "dtype": str(model.transformer.wte.weight.dtype).removeprefix("torch."),
        **special,
        "name": loaded.name,
        "step": loaded.step,
        "attention": [model.config.layer_attention(layer) for layer in range(model.config.n_layer)],
        "sigma": {str(layer): sigma.tolist() for layer, sigma in model.bandwidths().items()},
        "parameters": parameter_counts(model)["total"],
        "training": loaded.training,
        "exported_at_commit": git_commit(),
        "model": asdict(model.config),
        "checkpoint_sha256": loaded.sha256,
    }
    files = (WEIGHTS, CONFIG, EXPORTED_NAME)
    with export_folder(folder, lambda: _exported(folder)["checkpoint_sha256"] == loaded.sha256, files) as incoming:
        checkpoint.write_tensors(model.state_dict(), incoming / WEIGHTS, metadata={"format": "pt"})
        loaded.tokenizer.save(incoming, EXPORTED_NAME)
        huggingface_tokenizer.save(loaded.tokenizer, incoming, model.config.sequence_len)
        # Every special token but the padding ends a text, as for `generation.Engine`.
        ends = [number for number in loaded.tokenizer.special.values() if number != special["pad_token_id"]]
        write_json(incoming / "generation_config.json", {**special, "eos_token_id": ends})
        about["sha256"] = {name: sha256(incoming / name) for name in (WEIGHTS, EXPORTED_NAME)}
        write_json(incoming / CONFIG, about)
    return about


def saved_by_transformers(folder: Path) -> bool:
    """Whether a folder holds a model of ours as transformers' save_pretrained writes it."""
    about = read_json(folder / CONFIG, "configuration") if (folder / CONFIG).exists() else {}
    return about.get("model_type") == MODEL_TYPE and "transformers_version" in about


def _exported(folder: Path) -> dict[str, Any]:
    """The content of an exported model's config.json. Raises UserError if it is not one."""
    about = read_json(folder / CONFIG, "configuration")
    if saved_by_transformers(folder):
        advice = "nanochat_gka.hf reads it; nanochat_gka.harness and --hf-path of nanochat_gka.eval_core score it"
        raise UserError(f"{folder} was saved by transformers, without our tokenizer and checksums; {advice}")
    if "architecture" in about:
        raise UserError(f"{folder} is an exported vision model; timm and deit_gka.evaluate take it")
    types = {"name": str, "step": int, "model": dict, "training": dict, "sha256": dict, "checkpoint_sha256": str}
    is_typed = all(isinstance(about.get(key), expected) for key, expected in types.items())
    if about.get("model_type") != MODEL_TYPE or not is_typed or set(about["sha256"]) != {WEIGHTS, EXPORTED_NAME}:
        raise UserError(f"{folder / CONFIG} is not of a model that this project exported, or it is damaged")
    return about


def _load_exported(folder: Path, step: int, device: torch.device | str) -> Loaded:
    about = _exported(folder)
    if step not in (-1, about["step"]):
        raise UserError(f"{folder} holds step {about['step']}, not {step}")
    check_files(folder)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise UserError(f"{folder / WEIGHTS} is not a safetensors file ({error})") from None
    model = _build(about["model"], weights, device, folder)
    tokenizer = _tokenizer(folder, model, EXPORTED_NAME)
    return Loaded(model, tokenizer, about["name"], about["step"], about["checkpoint_sha256"], about["training"])


def load_upstream(folder: Path, step: int = -1, device: torch.device | str = "cpu") -> GPT:
    """The model of an upstream nanochat checkpoint folder (model_<step>.pt, meta_<step>.json); step -1 = the highest.

    Weights are read with weights_only=True. Raises UserError if there are no such files, if the weights do not fit, or
    if anything in them is not of nanochat at b07604e or of our patches for it.
    """
    paths = {int(path.stem[6:]): path for path in Path(folder).glob("model_*.pt") if path.stem[6:].isdecimal()}
    if not paths or (step >= 0 and step not in paths):
        raise UserError(f"no upstream checkpoint model_<step>.pt{f' of step {step}' if step >= 0 else ''} in {folder}")
    path = paths[max(paths) if step < 0 else step]
    meta_path = path.with_name(f"meta_{path.stem[6:]}.json")
    shape = read_json(meta_path, "upstream meta data").get("model_config")
    if not isinstance(shape, dict):
        raise UserError(f"{meta_path} has no model_config, the shape of the model")
    weights = from_upstream(_read_upstream(path, device))
    if later := sorted(name for name in weights if name.startswith(LATER_NANOCHAT)):
        known = "this project reads nanochat's checkpoints up to b07604e of 2026-03-03"
        raise UserError(f"{path} is of a nanochat from after 2026-03-09, by its {', '.join(later)}; {known}")
    layers = sum(bool(re.fullmatch(r"transformer\.h\.\d+\.attn\.c_proj\.weight", name)) for name in weights)
    weights = {"resid_lambdas": torch.ones(layers), "x0_lambdas": torch.zeros(layers), **weights}
    # Settings that nanochat at the pin, and the first of our patches, did not save.
    return _build({"window_pattern": "L", "gka_values": "unrotated", **shape}, weights, device, path)


def from_upstream(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights of upstream nanochat, patched or not, in the names and shapes of ours.

    A head gate is (C, H) there and ours (H, C): its optimiser deals tensors out by their first dimension.
    """
    named = {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
    gates = [name for name in named if name.endswith(".attn.head_gate")]
    return named | {f"{name}.weight": named.pop(name).mT for name in gates}


def _read_upstream(path: Path, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Tensors by name. Raises UserError for a file of something else, and OSError for one that cannot be read."""
    try:
        weights = torch.load(path, map_location=device, weights_only=True)
    except OSError:
        raise
    except pickle.UnpicklingError:  # its text advises to read the file without weights_only
        raise UserError(f"{path} is refused: it holds more than weights, and nothing of it was executed") from None
    except Exception as error:  # torch raises many kinds for files that are not its own
        reason = f"{type(error).__name__}: {reason_of(error)}"[:200]
        raise UserError(f"{path} is damaged, cut short or not a file of torch.save ({reason})") from None
    named = isinstance(weights, dict) and all(isinstance(name, str) for name in weights)
    if not named or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(f"{path} does not hold weights by name, as nanochat saves them")
    return weights
