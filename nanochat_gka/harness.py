"""lm-evaluation-harness on our models: its command line, with one more kind of model, `gka`.

    .venv/bin/python -m pip install -e ".[lm-eval]"
    .venv/bin/python -m nanochat_gka.harness --model gka --model_args run=out/runs/d20-gka --tasks hellaswag

`run` is a run folder, a checkpoint folder or an exported model. Further model_args: step, max_length (tokens of
context, default the model's own), batch_tokens and max_rows (the size of a batch of scoring and of generation). All
other flags are the harness's.
"""

import sys
from collections.abc import Sequence

import torch

from nanochat_gka.core_metric.questions import Question
from nanochat_gka.core_metric.scoring import batches, judge
from nanochat_gka.core_metric.task_scorer import BATCH_TOKENS
from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import load
from trainkit.cli import UserError
from trainkit.distributed import setup
from trainkit.extras import advice
from trainkit.progress import progress_bar

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
except ImportError:
    print(f"error: lm_eval is not installed: {advice('lm-eval')}", file=sys.stderr)
    sys.exit(UserError.code)

MAX_NEW_TOKENS = 256  # the harness's own default where a task does not say


@register_model("gka")
class GKAModel(TemplateLM):
    """A language model of this project for the harness. Raises UserError if `run` or `device` is missing."""

    def __init__(
        self,
        run: str,
        step: int = -1,
        device: str | None = None,
        max_length: int | None = None,
        batch_tokens: int | None = None,
        max_rows: int = 32,
        batch_size=None,  # the harness always gives one; ours is counted in tokens
        max_batch_size=None,
    ):
        super().__init__()
        self._device = torch.device(device) if device else setup().device
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"--device {device}, the harness's default, needs a GPU: pass --device cpu")
        self.loaded = load(run, step, self._device)
        model = self.loaded.model
        self.max_length = min(int(max_length or model.config.sequence_len), model.rotary.length - 1)
        self.batch_tokens = int(batch_tokens or BATCH_TOKENS[self._device.type])
        self.engine = Engine(model, self.loaded.tokenizer, int(max_rows))

    @property
    def eot_token_id(self) -> int:
        return self.loaded.tokenizer.bos_id  # what ends a document begins the next

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        """Ids of a text. They begin with BOS, as documents in training do, unless add_special_tokens is False."""
        ids = self.loaded.tokenizer.encode(string)
        return ids if add_special_tokens is False else [self.loaded.tokenizer.bos_id, *ids]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(log-likelihood, is greedy) of every continuation; requests: (texts, context ids, continuation ids)."""
        return self._score([(context, continuation) for _, context, continuation in requests], disable_tqdm)

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]], quiet: bool) -> list[tuple[float, bool]]:
        questions = []
        for context, continuation in pairs:
            # The last token is predicted and not an input, so one more than max_length fits.
            prompt = [*context, *continuation][-(self.max_length + 1) :]
            questions.append(Question([prompt], [max(1, len(prompt) - len(continuation))], gold=1, greedy=True))
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(questions)
        with progress_bar() as bar:
            task = bar.add_task("log-likelihoods", total=len(questions), status="", visible=not quiet)
            for batch in batches(questions, self.batch_tokens):
                for place, [verdict] in zip(batch, judge(self.loaded.model, [questions[i] for i in batch])):
                    scores[place] = (-verdict.nats, verdict.greedy)
                bar.advance(task, len(batch))
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once, from BOS, in windows of max_length tokens."""
        pairs, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                pairs.append(utils.make_disjoint_window(window))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (score, _) in zip(owners, self._score(pairs, disable_tqdm)):
            totals[number] += score
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop text.

        The generation arguments until, max_gen_toks, do_sample, temperature, top_k and top_p are used; requests with
        the same ones run together.
        """
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        for numbers in groups.values():
            sampling, stop = self._sampling(requests[numbers[0]].args[1])
            prompts = [self._fitting(requests[number].args[0], sampling.max_tokens) for number in numbers]
            for number, [text] in zip(numbers, self.engine.complete(prompts, sampling, stop)):
                texts[number] = text
        return texts

    def _sampling(self, arguments: dict) -> tuple[Sampling, list[str]]:
        """The harness's generation arguments as ours, and the stop texts. Raises UserError for too many new tokens."""
        until, tokens = arguments.get("until") or [], int(arguments.get("max_gen_toks", MAX_NEW_TOKENS))
        if not 0 < tokens < self.max_length - 1:
            room = f"no room for a prompt within max_length {self.max_length}"
            raise UserError(f"max_gen_toks {tokens} leaves {room}: give less (--gen_kwargs), or a larger max_length")
        given = arguments.get("temperature")
        sampled = arguments.get("do_sample", float(given or 0) > 0)
        temperature = (1.0 if given is None else float(given)) if sampled else 0.0
        top_k, top_p = int(arguments.get("top_k") or 0), float(arguments.get("top_p") or 1.0)
        sampling = Sampling(max_tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p)
        return sampling, [text for text in ([until] if isinstance(until, str) else until) if text]

    def _fitting(self, context: str, new_tokens: int) -> str:
        """The end of a context that leaves room for new_tokens within max_length."""
        ids, room = self.loaded.tokenizer.encode(context), max(1, self.max_length - new_tokens - 1)
        return context if len(ids) <= room else self.loaded.tokenizer.decode(ids[-room:])


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
