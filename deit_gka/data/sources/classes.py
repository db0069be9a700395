"""The classes of images: in what order they are numbered, and whether two sets of images have the same."""

from collections.abc import Iterable, Sequence

from deit_gka.data.sources.base import ImageSource, ignored_text
from trainkit_gka.cli import UserError

IMAGENET = {"train": 1_281_167, "val": 50_000}


def in_order(names: Iterable[str]) -> list[str]:
    """Names sorted as text, as torchvision does; by value if all of them are whole numbers, as ImageNet-V2's are."""
    names = sorted(names)
    return sorted(names, key=int) if are_numbers(names) else names


def are_numbers(names: Iterable[str]) -> bool:
    """Whether all names are whole numbers."""
    return all(name.isascii() and name.isdigit() for name in names)


def numbers_by_name(classes: Sequence[str], known: Sequence[str]) -> list[int] | None:
    """The number of each of `classes` in `known`; None if they are not the same names."""
    if list(classes) == list(known):
        return list(range(len(classes)))
    numbers = {name: number for number, name in enumerate(known)}
    same = len(classes) == len(known) == len(numbers) and numbers.keys() == set(classes)
    return [numbers[name] for name in classes] if same else None


def numbers_in_model(classes: Sequence[str], data: str, known: Sequence[str], model: str) -> tuple[list[int], str]:
    """The model's number for each class of the data, and a note on how they were matched; empty if nothing moved.

    classes: names in the data. known: the names that come with the model, in its order; empty if they are not recorded.
    Where all names differ (folders, numbers, words), the data's order is taken. Raises UserError if some are the same.
    """
    numbers = list(range(len(classes)))
    if not known:
        first = ", ".join(f"{number} '{name}'" for number, name in enumerate(classes[:3]))
        return numbers, f"{model} does not name its classes; taken in the data's order: {first}, ..."
    if (by_name := numbers_by_name(classes, known)) is not None:
        moved = [f"'{name}' is {to}, not {at}" for at, (name, to) in enumerate(zip(classes, by_name)) if at != to]
        return by_name, f"classes are numbered as in {model}, by name: {moved[0]}" if moved else ""
    if set(known) & set(classes):
        unknown = next((name for name in classes if name not in set(known)), classes[0])
        raise UserError(f"{data} has a class '{unknown}', which {model} does not know; the two must agree")
    if are_numbers(known):  # perhaps sorted as text, from whatever number they begin
        numbers.sort(key=lambda place: int(known[place]))
    example = f"{data} has other names for its classes ('{classes[0]}' for '{known[numbers[0]]}')"
    return numbers, f"warning: {example}; they are taken to be the same in the same order"


def one_class_text(classes: Sequence[str]) -> str:
    """A warning about images of a single class; empty for more."""
    return f"all images are of one class, '{classes[0]}': any model is right about all" if len(classes) == 1 else ""


def check_classes(train, val) -> list[str]:
    """Warnings about the images of both splits, sources or streams. Raises UserError if their classes differ."""
    for one, other in ((train, val), (val, train)):
        if missing := sorted(set(one.classes) - set(other.classes), key=one.classes.index):
            where = f"in {one.split} but not in {other.split} ({len(missing)} such)"
            raise UserError(f"class '{missing[0]}' is {where}; both need the same classes")
    if train.classes != val.classes:
        raise UserError("train and val number their classes differently; both need the same classes in the same order")
    warnings = [one_class_text(train.classes)]
    for source in (train, val):
        count = len(source) if isinstance(source, ImageSource) else source.length
        expected = IMAGENET[source.split]
        if len(source.classes) == 1000 and count not in (None, expected):
            warnings.append(f"{source.split} has {count:,} images of 1,000 classes, ImageNet-1k has {expected:,}")
        if isinstance(source, ImageSource):
            warnings.append(ignored_text(source))
    return list(filter(None, warnings))
