"""Say what the study's finished rows show: print its tables, and draw its pictures and the one of speed.

python -m runs.tables.findings                the tables are those that `python -m runs.tables` writes into the page
"""

from dataclasses import dataclass
from pathlib import Path

from runs.frames import RESULTS
from runs.study import pictures
from runs.study.scores import Scores
from runs.study.speed import speeds_of
from runs.tables import speedups, study, study_equal, study_heads, study_settings, study_speed
from trainkit_gka.cli import UserError, run
from trainkit_gka.progress import console


@dataclass
class FindingsConfig:
    """Print the study's tables, and draw its pictures, from the rows in runs/results/study."""

    results: Path = RESULTS / "study"
    """Folder of the results, a file of JSON lines for each corpus."""
    out: Path = RESULTS / "pictures"
    """Folder for the pictures."""


def main(config: FindingsConfig) -> None:
    files = sorted(config.results.glob("*.jsonl"))
    if not files:
        raise UserError(f"no results in {config.results}; make study writes some")
    for room in (study, study_equal, study_speed, study_settings, study_heads):
        for name, tables_of in room.TABLES.items():
            print(f"\n{name}\n")
            for table in tables_of(config.results):
                table.show()

    config.out.mkdir(parents=True, exist_ok=True)
    speeds = speeds_of(config.results)
    drawn = [speedups.picture(config.out, config.results.parent)]
    drawn += [pictures.context(config.results, config.out), pictures.images(config.results, config.out)]
    for path in (path for path in files if not path.name.startswith("vision_")):
        drawn += pictures.of_text(Scores.read(path), speeds, path.stem, config.out)
    for figure in filter(None, drawn):
        console.print(f"drew {figure.path}", highlight=False, markup=False)


if __name__ == "__main__":
    run(main, FindingsConfig)
