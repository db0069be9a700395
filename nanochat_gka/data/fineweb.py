"""FineWeb-Edu from the Hugging Face hub, in the shards that nanochat trains on."""

import os
import re
import shutil
from pathlib import Path

from nanochat_gka.data.corpora import claim, link_files
from trainkit_gka.cli import Bounds, PassingFault, UserError, reason_of
from trainkit_gka.files import atomic, locked, remove_stale_temporaries, sha256
from trainkit_gka.progress import progress_bar

REPOSITORY = "karpathy/fineweb-edu-100b-shuffle"
LATER = (408, 429)  # the statuses of a server that would answer another time
SHARDS = Bounds(2, 1823)  # the last one is the validation split


def fetch(out: Path, num_shards: int, downloads: Path) -> None:
    """Fetch those of the first `num_shards` shards (about 100 MB each) that `out` lacks; run again, it continues.

    downloads: the folder that they are fetched to; if it is another one than `out`, `out` gets links. Raises
    PassingFault if a shard does not arrive, and UserError if the hub refuses it.
    """
    names = [f"shard_{index:05d}.parquet" for index in range(num_shards)]
    new = [name for name in names if not (out / name).exists()]
    if new and out.resolve() == downloads.resolve():
        _fetch_all(new, out)
    elif new:
        with locked(downloads, "writing"):
            remove_stale_temporaries(downloads)
            claim(downloads, "fineweb")
            _fetch_all([name for name in new if not (downloads / name).exists()], downloads)
        link_files(downloads, names, out)
    print(f"{out}: {num_shards:,} shards ({len(new):,} new)")


def _fetch_all(names: list[str], folder: Path) -> None:
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()  # ours counts shards
    logging.set_verbosity_error()  # of its retries
    with progress_bar() as bar:
        for name in bar.track(names, task_id=bar.add_task("FineWeb-Edu shards", total=len(names), status="")):
            try:
                _fetch(name, folder)
            except Exception as error:  # the client raises its own and its transport's kinds: all mean "not fetched"
                status = getattr(getattr(error, "response", None), "status_code", 0)
                refused = 400 <= status < 500 and status not in LATER
                raise (UserError if refused else PassingFault)(
                    f"could not download {name} of {REPOSITORY}: {reason_of(error)}. Check the network and run the "
                    "same command again (it continues where it stopped), or read other text: --source builtin, or a "
                    "file or folder"
                ) from None


def _fetch(name: str, folder: Path) -> None:
    """Fetch one shard. Raises OSError if its sha256 differs from the hub's, and whatever the hub's client raises."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    incoming = folder / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)  # of a killed process
    try:
        hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=incoming)
        etag = get_hf_file_metadata(hf_hub_url(REPOSITORY, name, repo_type="dataset")).etag or ""
        if re.fullmatch("[0-9a-f]{64}", etag) and sha256(incoming / name) != etag:
            raise OSError("it arrived damaged, its sha256 is not the hub's")
        with atomic(folder / name) as temporary:
            os.replace(incoming / name, temporary)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
