"""lm-evaluation-harness on our models: its command line, with one more kind of model, `gka`.

    .venv/bin/python -m pip install -e ".[lm-eval]"
    .venv/bin/python -m nanochat_gka.harness --model gka --model_args run=out/runs/d20-gka --tasks hellaswag

`run` is a run folder, a checkpoint folder, an exported model or a folder that transformers saved; `step` is one of a
run's checkpoints. What computes is the harness's own model `hf`, and its model_args and flags are what they are there.
`--model hf --model_args pretrained=FOLDER` works here too, for exported models and what transformers saved of them.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from nanochat_gka.model.checkpoints import export, load, saved_by_transformers
from trainkit_gka.cli import PassingFault, UserError, is_network, reason_of
from trainkit_gka.extras import advice

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    import nanochat_gka.hf  # noqa: F401 (teaches transformers our models)
except ImportError:
    print(f"error: lm_eval is not installed: {advice('lm-eval')}", file=sys.stderr)
    sys.exit(UserError.code)


@register_model("gka")
class GKAModel(HFLM):
    """The harness's `hf` on our model. settings: those of `hf`, but pretrained. Raises UserError for unusable ones."""

    def __init__(self, run: str = "", step: int = -1, **settings):
        if not run:
            raise UserError("--model_args needs run=FOLDER, a run of ours or an exported model")
        if settings.pop("trust_remote_code", False):
            raise UserError("--trust_remote_code is not for --model gka: no code that comes with a model is executed")
        with TemporaryDirectory(prefix="gka-") as scratch:
            folder = str(run)
            if not saved_by_transformers(Path(folder)):
                folder = f"{scratch}/model"
                export(load(run, step), Path(folder))
            elif step != -1:
                raise UserError(f"{run} was saved by transformers and has no steps: leave step out")
            super().__init__(folder, **{"backend": "causal", **settings})  # it knows its own library's types alone
        if self.max_length > self.config.rotary_positions:
            raise UserError(f"max_length must be at most {self.config.rotary_positions}, got {self.max_length}")

    def _loglikelihood_tokens(self, requests, *arguments, **options) -> list[tuple[float, bool]]:
        for texts, _, answer in requests:
            if not 0 < len(answer) <= self.max_length:
                limit = f"must have 1 to {self.max_length} (max_length)"
                raise UserError(f"an answer has {len(answer)} tokens and {limit}: {str(texts and texts[1])[:60]!r}")
        return super()._loglikelihood_tokens(requests, *arguments, **options)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts after BOS, which is given; `hf` would count how likely a second one is."""
        usual, self.add_bos_token = self.add_bos_token, False
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.add_bos_token = usual


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except Exception as error:  # of the harness, its tasks and data sets, torch and transformers: of any kind
        if "DEBUG" in sys.argv:  # --verbosity
            raise
        message, code = f"{type(error).__name__}: {reason_of(error)} (--verbosity DEBUG says where)", UserError.code
        if isinstance(error, UserError):
            message, code = str(error), error.code
        elif is_network(error):
            code = PassingFault.code
        print(f"\nerror: {message}", file=sys.stderr)  # a progress bar may be on the line
        sys.exit(code)


if __name__ == "__main__":
    main()
