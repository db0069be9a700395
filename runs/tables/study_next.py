"""What a GPU budget should run next: commands, and their hours by arithmetic from FLOPs alone."""

from dataclasses import dataclass

from deit_gka.model.accounting import vit_cost
from deit_gka.model.registry import SIZES
from deit_gka.recipe import Recipe
from nanochat_gka.accounting import AccountingConfig, account
from runs.paper.gpt_d20_gka import RECIPE as GKA
from runs.paper.gpt_d20_softmax import RECIPE as SOFTMAX
from runs.table import Table
from runs.tables.study_equal import LEARNED

H100_FLOPS = 989e12  # NVIDIA's figure for dense bfloat16, per second
LANGUAGE_SHARE, VISION_SHARE = 0.4, 0.2  # of it that is assumed to be reached
IMAGENET = 1_281_167  # images of an epoch
SEEDS = 3
SMALL_FLOPS = 5e17  # of every training of 12 layers


@dataclass(frozen=True)
class Run:
    """A command of make, the FLOPs of one of its trainings, and how many seeds of it are wanted."""

    command: str
    flops: float
    share: float
    seeds: int

    @property
    def hours(self) -> float:
        """Of one H100, for all seeds."""
        return self.seeds * self.flops / (self.share * H100_FLOPS) / 3600


def runs() -> list[Run]:
    """In the order in which they should be run: small before large."""
    offsets = "--head-offsets PS --offset-layers all"
    hybrid = "--attention GGGA --offset-layers all"
    # At equal FLOPs; without value embeddings; and with softmax in one layer of four.
    forms = [("pretrain-d20", ""), ("pretrain-d20-best", ""), ("pretrain-d20-best", "--value-embeds none")]
    forms += [("pretrain-d20-best", hybrid), ("pretrain-d20-base", ""), ("pretrain-d20-base", offsets)]
    forms += [("pretrain-d20-base", f"{offsets} {LEARNED} --gate-lr 0.005")]
    equal = f"--target-flops {SMALL_FLOPS:g}"
    small = [
        Run(_make(target, f"{flags} {equal}".strip(), 12, SEEDS), SMALL_FLOPS, LANGUAGE_SHARE, SEEDS)
        for target, flags in forms
    ]
    large = [
        Run(_make(target, flags, 20, 1), _language_flops(20, recipe), LANGUAGE_SHARE, 1)
        for target, flags, recipe in (
            ("pretrain-d20", "", GKA),
            ("pretrain-d20-best", "", GKA),
            ("pretrain-d20-base", "", SOFTMAX),
            ("pretrain-d20-base", offsets, SOFTMAX),
        )
    ]
    spatial = "--model-kwargs spatial_offsets=LUD"
    vision = [
        Run(f"make train-deit-{name} DATA=/imagenet" + _args(flags, seeds=1), _vision_flops(kind), VISION_SHARE, 1)
        for name, flags, kind in (
            ("ti", "", "gka"),
            ("ti", f"{spatial} --model-tag ti-LUD", "gka"),
            ("ti-base", "", "softmax"),
            ("ti", f"--attention softmax {spatial} --model-tag ti-softmax-LUD", "softmax"),
        )
    ]
    return small + vision + large


def table_of_runs() -> list[Table]:
    """Commands, FLOPs of one run, seeds, and hours of one H100."""
    rows = [[f"`{run.command}`", f"{run.flops:.2e}", str(run.seeds), f"{run.hours:.1f}"] for run in runs()]
    rows.append(["all", "", "", f"{sum(run.hours for run in runs()):.0f}"])
    return [Table.of(["command", "training FLOPs", "seeds", "hours of one H100"], rows)]


def _make(target: str, flags: str, depth: int, seeds: int) -> str:
    return f"make {target}" + (f" DEPTH={depth}" if depth != 20 else "") + _args(flags, seeds)


def _args(flags: str, seeds: int) -> str:
    own = " ".join(filter(None, [flags, "--seed N --model-tag NAME-N" if seeds > 1 else ""]))
    return f' ARGS="{own}"' if own else ""


def _language_flops(depth: int, recipe: dict) -> int:
    ratio = recipe["target-param-data-ratio"]
    return account(AccountingConfig(depth=depth, attention=recipe["attention"], target_param_data_ratio=ratio))[
        "train_flops"
    ]


def _vision_flops(kind: str) -> int:
    """Three times the forward pass, for every image of the paper's 300 epochs."""
    shape = SIZES["tiny"]
    forward = vit_cost(kind, shape["embed_dim"], shape["depth"], shape["num_heads"]).flops
    return 3 * forward * IMAGENET * Recipe().epochs


TABLES = {"study-next": table_of_runs}
