"""Write text with a trained model.

    python -m nanochat_gka.generate --run out/runs/d20-gka --prompt "The for statement" --stream
    python -m nanochat_gka.generate --run out/runs/d20-gka --prompts-file prompts.txt --num-samples 4 > texts.jsonl
    python -m nanochat_gka.generate --run out/runs/d20-gka --interactive

Text goes to standard output: the prompt, then its continuation; with --prompts-file a JSON line per prompt. Messages
go to standard error.
"""

import codecs
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from nanochat_gka.generation.engine import Engine
from nanochat_gka.generation.sampling import Sampling
from nanochat_gka.model.checkpoints import load
from trainkit_gka.cli import Count, UserError, run
from trainkit_gka.distributed import setup
from trainkit_gka.progress import progress_bar, rate


@dataclass
class GenerateConfig(Sampling):
    """Continue prompts with a trained model. Base models continue text; they do not answer."""

    run: Path = Path("out/runs/d20-gka")
    """Run folder, one checkpoint folder in it, or an exported model."""
    step: int = -1
    """Checkpoint to take; -1 = the newest."""
    prompt: list[str] = field(default_factory=lambda: ["The "])
    """Texts to continue; an empty one begins a document."""
    prompts_file: Path | None = None
    """File with one prompt a line, in place of --prompt: plain text, or JSON strings (which may hold line breaks);
    - is standard input. Lines that cannot be continued are named, the others written, and the exit code is 2."""
    interactive: bool = False
    """Ask for prompts at the terminal, and stream."""
    stream: bool = False
    """Show each token as it comes, one continuation at a time."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a continuation, and are not part of it."""
    max_rows: Count = 32
    """Continuations that run at once."""
    keep_keys: bool = False
    """For models of --gka-values unrotated: keep keys in the cache, too; faster, for twice the memory. On a GPU
    they are always kept."""
    device_type: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to compute on; auto takes CUDA if there is one."""


def read_prompts(path: Path, check: Callable[[str], Any]) -> tuple[list[str], list[str]]:
    """The prompts of a file, one a line, and the problems of lines for which `check` raises UserError.

    A line that begins with a quote must be a JSON string. Raises UserError if the file has no prompts.
    """
    content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    prompts, problems = [], []
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            text = line.removesuffix(b"\r").decode()
            text = json.loads(text) if text.startswith('"') else text
            check(text)
            prompts.append(text)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            kind = "UTF-8 text" if isinstance(error, UnicodeDecodeError) else "a JSON string, but begins with a quote"
            problems.append(f"{path}:{number}: is not {kind} ({error})")
        except UserError as error:
            problems.append(f"{path}:{number}: {error}")
    if not prompts and not problems:
        raise UserError(f"{path} has no prompts")
    return prompts, problems


def write_stream(engine: Engine, prompts: list[str], config: GenerateConfig) -> int:
    """Write each prompt and each of its continuations as they come, one at a time. Returns the number of tokens."""
    count, begins = 0, True
    for piece in engine.stream(prompts, config, config.stop):
        print((prompts[piece.prompt] if begins else "") + piece.text, end="\n" if piece.is_done else "", flush=True)
        begins, count = piece.is_done, count + 1
    return count


def ask(engine: Engine, config: GenerateConfig) -> None:
    """Continue what is typed until the input ends; the same prompt gets another continuation the next time."""
    say("type the beginning of a text and press Enter (an empty line begins a document); Ctrl-D leaves")
    for turn in itertools.count():
        try:
            prompt = input("> " if sys.stdin.isatty() else "")
            write_stream(engine, [prompt], replace(config, seed=(config.seed + turn) % 2**63))
        except EOFError:
            return
        except UnicodeDecodeError:
            say("error: that is not UTF-8 text")
        except UserError as error:
            say(f"error: {error}")


def write_all(engine: Engine, prompts: list[str], config: GenerateConfig) -> int:
    """Write each prompt's continuations as soon as it and those before it are done. Returns the number of tokens."""
    texts = [[""] * config.num_samples for _ in prompts]
    remaining = [config.num_samples] * len(prompts)
    count = written = 0
    # The bar is for those who wait for a file to fill; text at a terminal is its own progress.
    errors = Console(stderr=True, force_terminal=False if sys.stdout.isatty() else None)
    with progress_bar(errors, redirect_stdout=False) as bar:
        task = bar.add_task("continuations", total=len(prompts) * config.num_samples, status="")
        for piece in engine.stream(prompts, config, config.stop):
            count += 1
            texts[piece.prompt][piece.sample] += piece.text
            if piece.is_done:
                bar.advance(task)
                remaining[piece.prompt] -= 1
            while written < len(prompts) and remaining[written] == 0:
                if config.prompts_file:
                    print(json.dumps({"prompt": prompts[written], "texts": texts[written]}), flush=True)
                else:
                    print(*(prompts[written] + text + "\n" for text in texts[written]), sep="\n", flush=True)
                written += 1
    return count


def say(message: str) -> None:
    """Print a message to standard error, apart from the text."""
    print(message, file=sys.stderr, flush=True)


def main(config: GenerateConfig) -> None:
    if config.prompts_file and (config.stream or config.interactive):
        raise UserError("--prompts-file writes a JSON line per prompt: leave --stream and --interactive out")
    if not config.prompt:
        raise UserError("--prompt needs a text; an empty text, '', begins a document")
    loaded = load(config.run, config.step, setup(config.device_type).device)
    shape = loaded.model.config
    say(f"{loaded.name}: {shape.attention}, depth {shape.n_layer}, step {loaded.step:,}")
    max_rows = 1 if config.stream or config.interactive else config.max_rows
    engine = Engine(loaded.model, loaded.tokenizer, max_rows, config.keep_keys or None)
    if config.interactive:
        return ask(engine, config)
    file = config.prompts_file
    prompts, problems = read_prompts(file, engine.tokens) if file else (config.prompt, [])
    for problem in problems:
        say(f"error: {problem}")
    started = time.perf_counter()
    tokens = (write_stream if config.stream else write_all)(engine, prompts, config)
    seconds = time.perf_counter() - started
    say(f"{tokens:,} tokens in {seconds:.1f} s, {rate(tokens / seconds, 'tokens/s')}")
    if problems:
        raise UserError(f"{len(problems)} of {len(prompts) + len(problems)} prompts are not continued, see above")


if __name__ == "__main__":
    run(main, GenerateConfig)
