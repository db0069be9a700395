"""What a GPU budget should run next: commands, and their hours by arithmetic from FLOPs alone."""

from dataclasses import dataclass

from deit_gka.model.accounting import vit_cost
from deit_gka.model.registry import SIZES
from deit_gka.recipe import Recipe
from nanochat_gka.accounting import AccountingConfig, account
from runs.paper.gpt_d20_gka import RECIPE as GKA
from runs.paper.gpt_d20_softmax import RECIPE as SOFTMAX
from runs.sections.sources import table

H100_FLOPS = 989e12  # NVIDIA's figure for dense bfloat16, per second
LANGUAGE_SHARE, VISION_SHARE = 0.4, 0.2  # of it that is assumed to be reached
IMAGENET = 1_281_167  # images of an epoch
SEEDS = 3


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
    forms = [("pretrain-d20", "", GKA), ("pretrain-d20-best", "", GKA)]
    forms += [("pretrain-d20-base", "", SOFTMAX), ("pretrain-d20-base", offsets, SOFTMAX)]
    language = [
        Run(_make(target, flags, depth, seeds), _language_flops(depth, recipe), LANGUAGE_SHARE, seeds)
        for depth, seeds in ((12, SEEDS), (20, 1))
        for target, flags, recipe in forms
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
    return language[: len(forms)] + vision + language[len(forms) :]


def table_of_runs() -> str:
    """Commands, FLOPs of one run, seeds, and hours of one H100."""
    rows = [[f"`{run.command}`", f"{run.flops:.2e}", str(run.seeds), f"{run.hours:.1f}"] for run in runs()]
    rows.append(["all", "", "", f"{sum(run.hours for run in runs()):.0f}"])
    return table(["command", "training FLOPs", "seeds", "hours of one H100"], rows)


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
