"""The flags of `train`, with nanochat's names and defaults where it has them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from nanochat_gka.core_metric.fetch import BundleFlags
from nanochat_gka.data.loader import EvalRows
from nanochat_gka.model.accounting import Horizon, plan
from nanochat_gka.model.config import (
    BEFORE_ROTATED,
    OF_THE_STUDY,
    STUDY,
    GPTConfig,
    ModelFlags,
    has_gka,
    of_the_study,
)
from nanochat_gka.model.gpt import GPT
from nanochat_gka.training.memory import RowsAtOnce
from nanochat_gka.training.optim import OptimConfig
from trainkit_gka.cli import Bounds, CountOrAll, CountOrAutomatic, CountOrOff, MayChange, UserError
from trainkit_gka.run_config import RunConfig

PositiveOrOff = Annotated[float, Bounds(0, open_least=True, other=(-1, "off"))]


@dataclass(frozen=True)
class TrainConfig(OptimConfig, ModelFlags, BundleFlags, RunConfig):
    """Pretrain a GPT with softmax, VLT or Gaussian kernel attention.

    The same command continues a run that was stopped.
    """

    # Of --help; the rest is of the run itself.
    GROUPS: ClassVar[dict[str, str]] = {
        "model": " ".join([*(field.name for field in fields(ModelFlags)), "max_seq_len"]),
        "data": "data verify_data",
        "schedule": "num_iterations target_flops target_param_data_ratio total_batch_size warmup_ratio warmdown_ratio "
        "final_lr_frac",
        "optimiser": " ".join(field.name for field in fields(OptimConfig)),
        "logging": "eval_every eval_tokens eval_rows core_metric_every core_metric_max_per_task bundle bundle_url "
        "sample_every log_every wandb results",
    }

    # Where
    data: MayChange[Path] = Path("out/packed")
    """Folder of packed rows (make tokenize)."""
    model_tag: MayChange[str] = ""
    """Name of the run; empty takes d<depth>-<attention> and what is unlike the paper's form: d20-gka-PS-VE."""
    compile: MayChange[Literal["auto", "on", "off"]] = "auto"
    """Whether to use torch.compile; auto does on CUDA if a compiler is installed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What activations and products are rounded to, matrices are float32; auto = bfloat16 on CUDA, else float32."""
    verify_data: MayChange[bool] = True
    """Check the data's checksums before training, on every machine."""

    max_seq_len: Annotated[int, Bounds(1, other=(-1, "the data's"))] = -1
    """Context length T; -1 takes the data's."""

    # Horizon: the first of these that is set decides
    num_iterations: CountOrOff = -1
    """Number of steps; -1 leaves it to the training FLOPs."""
    target_flops: PositiveOrOff = -1.0
    """Total training FLOPs; -1 leaves the number of steps to the ratio."""
    target_param_data_ratio: PositiveOrOff = 10.5
    """Training tokens per scaling parameter (matrices and head)."""

    # Optimisation
    device_batch_size: MayChange[RowsAtOnce] = "auto"
    """Rows that a process computes at once; auto takes what fits the memory. It changes speed, not results."""
    total_batch_size: CountOrAutomatic = -1
    """Tokens per step over all processes; -1 = automatic."""
    warmup_ratio: Annotated[float, Bounds(0, 1)] = 0.0
    """Part of the steps spent warming up."""
    warmdown_ratio: Annotated[float, Bounds(0, 1)] = 0.5
    """Part of the steps spent warming down."""
    final_lr_frac: Annotated[float, Bounds(0, 1, open_most=True)] = 0.0
    """Learning rate at the end, as a fraction."""

    # Reports
    eval_tokens: MayChange[CountOrAll] = 20_971_520
    """Tokens of each split to evaluate on; -1 = all."""
    core_metric_every: MayChange[CountOrOff] = -1
    """Steps between scores on CORE (nanochat's: 2000), and one at the end; -1 = off."""
    core_metric_max_per_task: MayChange[CountOrAll] = 500
    """Examples of each of CORE's tasks; -1 = all."""
    eval_rows: MayChange[EvalRows] = "upstream"
    """Rows of a split: upstream = the first of nanochat's loader (the paper's way), spaced = evenly spaced, as always
    where packing split documents."""
    sample_every: MayChange[CountOrOff] = 2000
    """Steps between samples of text, nanochat's seven prompts; -1 = never."""

    @property
    def tag(self) -> str:
        values = "" if self.gka_values == "rotated" or not has_gka(self.attention, self.depth) else self.gka_values
        everywhere = "everywhere" if self.offset_layers == "all" else ""
        mixing, others = self.SHAPE.words_of(self)
        learned = ["channels"] * self.channel_bandwidths + ["gates"] * self.head_gates
        tables = {"auto": "", "all": "VE", "every-layer": "VE-every-layer", "none": "no-VE"}[self.value_embeds]
        form = f"d{self.depth}", self.attention, self.head_offsets, *mixing, everywhere, values, *others
        return self.model_tag or "-".join(part for part in (*form, *learned, tables) if part)

    def identity(self) -> dict[str, Any]:
        settings = super().identity()
        if not has_gka(self.attention, self.depth):
            del settings["gka_values"]  # means nothing there
        return settings

    def check_continues(self, saved: dict[str, Any]) -> None:
        if (asked := of_the_study(saved)) and self.SHAPE is GPTConfig:
            raise UserError(
                f"the run in {self.folder} has {', '.join(asked)}, of the study's forms: add --forms {STUDY}"
            )
        saved = {name: value for name, value in saved.items() if (name, value) not in OF_THE_STUDY.items()}
        super().check_continues({"gka_values": BEFORE_ROTATED, **saved})

    def horizon(self, model: GPT, processes: int) -> Horizon:
        """How long `model` trains. Raises UserError if a step's tokens are not rows enough for every process."""
        length, vocab_size = model.config.sequence_len, model.config.vocab_size
        horizon = plan(
            model,
            lambda depth: self.shape(depth, length, vocab_size),
            ratio=self.target_param_data_ratio,
            total_batch_size=self.total_batch_size,
            num_iterations=self.num_iterations,
            target_flops=self.target_flops,
        )
        tokens = horizon.total_batch_size
        if tokens % length:
            raise UserError(f"--total-batch-size must be a multiple of the context length {length}, got {tokens}")
        if tokens // length < processes:
            problem = f"a step has {tokens // length} rows for {processes} processes"
            raise UserError(f"{problem}; raise --total-batch-size")
        return horizon
