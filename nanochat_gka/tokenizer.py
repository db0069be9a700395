"""Train the tokenizer on the training split of a corpus.

python -m nanochat_gka.tokenizer --corpus out/corpus/fineweb --out out/tokenizer
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from nanochat_gka.data.corpora import ParquetCorpus, file_changes, fingerprint
from nanochat_gka.data.shards import start_anew
from nanochat_gka.data.tokenizer import FILE_NAME, VOCAB, Tokenizer
from trainkit_gka.cli import Count, CountOrAll, UserError, flag_of, run
from trainkit_gka.files import locked, read_json, write_json
from trainkit_gka.progress import progress_bar

RECIPE = "train.json"
FLAGS = ("vocab_size", "doc_cap", "max_chars")  # that decide what is trained, beside the files


@dataclass
class TokenizerConfig:
    """Train the BPE tokenizer on the training split of a corpus."""

    corpus: Path = Path("out/corpus/builtin")
    """Folder of parquet files."""
    out: Path = Path("out/tokenizer")
    """Folder for tokenizer.json (and train.json, which says what it was trained on)."""
    vocab_size: Annotated[int, VOCAB] = 32768
    """Tokens, the 9 special ones included."""
    max_chars: CountOrAll = 2_000_000_000
    """Characters to train on. -1 = all."""
    doc_cap: Count = 10_000
    """Characters taken of one document."""


def main(config: TokenizerConfig) -> None:
    corpus = ParquetCorpus(config.corpus)
    corpus.print_remarks()
    files = fingerprint(corpus.files("train"))
    recipe = {key: getattr(config, key) for key in FLAGS}
    recipe |= {"corpus": files["source"], "checksums": files["checksums"]}
    with locked(config.out, "training a tokenizer in"):
        if (config.out / FILE_NAME).exists():
            _check_recipe(config.out, recipe)
            print(f"{config.out}: already there, vocabulary {Tokenizer.load(config.out).vocab_size}")
            return
        write_json(config.out / RECIPE, recipe)
        tokenizer = Tokenizer.train(training_documents(corpus, config.doc_cap, config.max_chars), config.vocab_size)
        tokenizer.save(config.out)
        if tokenizer.vocab_size < config.vocab_size:
            print(f"the text has too few pairs of tokens to merge for --vocab-size {config.vocab_size:,}")
        sample = next(corpus.documents("val"), "")
        ratio = len(sample.encode()) / max(1, len(tokenizer.encode(sample)))
        print(f"{config.out}: vocabulary {tokenizer.vocab_size}, {ratio:.2f} bytes per token on a validation document")


def training_documents(corpus: ParquetCorpus, doc_cap: int, max_chars: int) -> Iterator[str]:
    """Training documents cut to `doc_cap` characters, up to the one that takes the sum above `max_chars` (-1 = all)."""
    total, limit = 0, max_chars if max_chars > 0 else None
    with progress_bar() as bar:
        task = bar.add_task("reading text for the tokenizer", total=limit, status="characters")
        for document in corpus.documents("train"):
            total += len(document[:doc_cap])
            bar.update(task, completed=total)
            yield document[:doc_cap]
            if limit and total > limit:
                break


def _check_recipe(out: Path, recipe: dict[str, Any]) -> None:
    """Raise UserError if the tokenizer in `out` was not trained by `recipe`."""
    if not (out / RECIPE).exists():
        raise UserError(f"{out} holds a tokenizer and nothing that says what it was trained on; {start_anew(out)}")
    previous = read_json(out / RECIPE, "recipe")
    differences = [f"{flag_of(key)} {previous.get(key)}" for key in FLAGS if previous.get(key) != recipe[key]]
    if changes := file_changes(previous, recipe, "corpus"):
        differences.append(f"other corpus files: {changes}")
    if differences:
        raise UserError(f"{out} holds a tokenizer trained with {differences[0]}; {start_anew(out)}")


if __name__ == "__main__":
    run(main, TokenizerConfig)
