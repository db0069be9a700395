"""One HTML page of what was trained and measured: it needs no network and no server, and a browser opens the file.

    make report                        (python -m runs.report)
    make report RUN=out/runs/d20-gka   of one run

It holds the runs with their hardware and commands, learning curves, bandwidths, attention pictures, benchmarks, the
paper's tables beside ours, the claims, and views of the kernel that are computed in the page.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from nanochat_gka.draw import TEXT
from runs.report import build
from trainkit_gka import cli
from trainkit_gka.files import atomic, check_named
from trainkit_gka.progress import console


@dataclass
class ReportConfig:
    """Write one HTML page, without network or server, of what was trained and measured."""

    base: Path = Path("out")
    """Folder of all outputs: the runs are those in BASE/runs and BASE/demo/runs."""
    run: tuple[Path, ...] = ()
    """Folders of runs to report, language and vision. Without any: all in BASE."""
    image: tuple[Path, ...] = ()
    """Image files for the attention pictures and the live view. Without any: held-out images that the vision run was
    trained for, or the two photographs that come with scikit-learn."""
    text: str = TEXT
    """The text that language models read, in the pictures and in the live views."""
    out: Path | None = None
    """The file to write; by default BASE/report.html."""


def main(config: ReportConfig) -> None:
    started = time.perf_counter()
    out = config.out or config.base / "report.html"
    if not config.run:
        check_named(config.base, ReportConfig.base, "the outputs of runs")
    if out.is_dir():
        raise cli.UserError(f"--out is the file to write, and {out} is a folder")
    content = build.render(config.base, config.run, config.image, config.text)
    with atomic(out) as temporary:
        temporary.write_text(content, encoding="utf-8")
    console.print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    cli.run(main, ReportConfig)
