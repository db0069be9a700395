"""Several models on several images: who is drawn with whom."""

from collections.abc import Sequence

from deit_gka.figures.sheet import Subject

Subjects = Sequence[Subject]


def by_image(subjects: Subjects) -> list[list[Subject]]:
    """A list for every image: the models on it, in the order that they came."""
    return _grouped(subjects, "image")


def by_model(subjects: Subjects) -> list[list[Subject]]:
    """A list for every model: what it does with the images, in the order that they came."""
    return _grouped(subjects, "model")


def _grouped(subjects: Subjects, name: str) -> list[list[Subject]]:
    groups: dict[str, list[Subject]] = {}
    for subject in subjects:
        groups.setdefault(getattr(subject, name), []).append(subject)
    return list(groups.values())
