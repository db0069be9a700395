"""Packing on several machines: each packs a part of the units into a folder of its own, and a last call joins these."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from nanochat_gka.data import shards
from nanochat_gka.data.units import Unit
from trainkit_gka.cli import UserError, reason_of
from trainkit_gka.files import locked


@dataclass(frozen=True)
class Part:
    """Part `number`, from 1, of `count`: units that follow each other, so that a machine reads few of the files."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """The part that `text` names, such as 2/8. Raises UserError if it names none."""
        number, slash, count = text.partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise UserError(f"--part must be NUMBER/COUNT with a number from 1 to the count, such as 2/8, got {text!r}")
        return cls(int(number), int(count))

    def folder(self, out: Path) -> Path:
        """Where the part is packed: no file in it is another machine's."""
        return out / f"part-{self.number}-of-{self.count}"

    def of(self, units: list[Unit]) -> list[Unit]:
        """The units of the part; those of all parts are all units."""
        return units[(self.number - 1) * len(units) // self.count : self.number * len(units) // self.count]


def join(out: Path, identity: dict) -> None:
    """Move the units of all parts in `out` up into it. A join that is killed is continued by the next one.

    Rows without a record, which may still be on their way from another machine, stay where they are, and their part's
    folder with them. Raises UserError if a part is of another tokenizer, length or corpus than `identity` says, is
    being packed, or is not a folder of `out`'s disk.
    """
    folders = sorted(path for path in out.glob("part-*-of-*") if path.is_dir())
    for folder in folders:
        if folder.is_symlink():
            raise UserError(f"{folder} is a link; put the part's folder itself into {out}")
        if not (folder / shards.PLAN).exists() and any(folder.glob("*_*.json")):
            raise UserError(f"{folder} has no {shards.PLAN}; copy the whole folder of the part again")
        shards.check_plan(folder, identity)
    for folder in folders:
        try:
            with locked(folder, "packing"):
                _move_up(folder, out)
                unknown = sorted(folder.glob("*_*.bin"))
            if unknown:
                print(f"{folder} stays: {unknown[0].name} has no record; delete the folder if nothing is copied there")
            else:
                shutil.rmtree(folder)
        except OSError as error:
            advice = f"it must be an ordinary folder on the disk of {out}: copy it there"
            raise UserError(f"{folder} cannot be joined ({reason_of(error)}); {advice}") from None


def _move_up(folder: Path, out: Path) -> None:
    for record in folder.glob("*_*.json"):
        rows = record.with_suffix(".bin")
        if rows.exists():  # otherwise a killed join has moved them
            os.replace(rows, out / rows.name)
        os.replace(record, out / record.name)
