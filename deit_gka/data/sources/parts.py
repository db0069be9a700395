"""Flags that say which part of the data to take."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from trainkit_gka.cli import Group, MayChange, UserError, flag_of


@dataclass(frozen=True)
class DataParts:
    """Names within the data; empty ones are found where there is no choice. All but the first are timm's flags."""

    data_config: MayChange[Annotated[str, Group.DATA]] = ""
    """The configuration of a Hugging Face dataset that has several."""
    train_split: MayChange[Annotated[str, Group.DATA]] = ""
    """The training images: a split of a Hugging Face dataset, such as train[:90%], or a folder. Empty = train."""
    val_split: MayChange[Annotated[str, Group.DATA]] = ""
    """The validation images, such as test. Empty = validation, val or valid."""
    input_key: MayChange[Annotated[str, Group.DATA]] = ""
    """The column of the images, or the suffix of their members in tars: left.jpg, or "jpg;png" for either."""
    target_key: MayChange[Annotated[str, Group.DATA]] = ""
    """The column of the labels, or the suffix of their members in tars, such as cls."""

    def split_names(self, split: str, usual: tuple[str, ...]) -> tuple[str, ...]:
        """The names that the split "train" or "val" may have."""
        name = self.train_split if split == "train" else self.val_split
        return (name,) if name else usual

    def given_parts(self) -> dict[str, str]:
        """The names that are not empty, by field."""
        return {name: value for name in ALL_PARTS if (value := getattr(self, name))}

    def refuse(self, data: str, *names: str) -> None:
        """Raises UserError if one of these fields is not empty: `data` has no such part."""
        for name in self.given_parts():
            if name in names:
                raise UserError(f"{data} has nothing that {flag_of(name)} could choose; leave it out")


NONE = DataParts()
ALL_PARTS = tuple(field.name for field in fields(DataParts))


def check_parts(parts: DataParts, saved: dict[str, str], folder: Path) -> None:
    """Raises UserError that names the first flag whose value differs from that of the run in `folder`."""
    for name in ALL_PARTS:
        value, before = getattr(parts, name) or "none", saved.get(name) or "none"
        if value != before:
            raise UserError(f"{flag_of(name)} is {value} but the run in {folder} has {before}; use its value")
