"""What a package needs and the operator does not: named in one line where it is missing."""

import importlib.util


class MissingExtra(ModuleNotFoundError):
    """A package of gka was imported without what it needs; the message says what to install."""


def missing(extra: str, *modules: str) -> str:
    """Which of `modules`, which gka[extra] installs, cannot be found, and what to do, in one line; else empty."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return ""
    verb = "is" if len(absent) == 1 else "are"
    return f'{", ".join(absent)} {verb} not installed: run pip install "gka[{extra}]"'


def require(package: str, extra: str, *modules: str) -> None:
    """Raises MissingExtra unless all of `modules`, which gka[extra] installs for `package`, can be found."""
    if reason := missing(extra, *modules):
        raise MissingExtra(reason, name=package)  # python -m says it in one line if the name is its package's
