"""Say what the study's finished rows show: print its tables, and draw its pictures.

python -m runs.study.findings                the tables are those that `python -m runs.tables` writes into the page
"""

from dataclasses import dataclass
from pathlib import Path

from runs.frames import RESULTS
from runs.study import pictures, pictures_of_forms
from runs.study.scores import Scores
from runs.study.speed import speeds_of
from runs.tables import study, study_equal, study_heads, study_settings, study_speed
from trainkit_gka.cli import UserError, run
from trainkit_gka.plots import Figure
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
    config.out.mkdir(parents=True, exist_ok=True)

    for room in (study, study_equal, study_speed, study_settings, study_heads):
        for name, tables_of in room.TABLES.items():
            print(f"\n{name}\n")
            for table in tables_of(config.results):
                table.show()

    def say(figure: Figure | None, what: str) -> None:
        said = f"drew {figure.path}" if figure else f"nothing to draw of {what}: not run"
        console.print(said, highlight=False, markup=False)

    for path in (path for path in files if not path.name.startswith("vision_")):
        scores = Scores.read(path)
        for draw in (pictures.compute, pictures.budgets, pictures.longer, pictures_of_forms.forms):
            say(draw(scores, config.out, path.stem), f"{draw.__name__} for {path.stem}")
        say(pictures.time(scores, config.out, path.stem, speeds_of(config.results)), f"time for {path.stem}")
    say(pictures_of_forms.context(config.results, config.out), "heads")
    say(pictures_of_forms.images(config.results, config.out), "images")


if __name__ == "__main__":
    run(main, FindingsConfig)
