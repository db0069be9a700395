"""What a package needs and the operator does not: named in one line where it is missing."""

import importlib.util


class MissingExtra(ModuleNotFoundError):
    """A package of gka was imported without what it needs; the message says what to install."""


def require(package: str, extra: str, *modules: str) -> None:
    """Raises MissingExtra unless all of `modules`, which gka[extra] installs for `package`, can be found."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        message = f'{", ".join(missing)} {verb} not installed: run pip install "gka[{extra}]"'
        raise MissingExtra(message, name=package)  # python -m says it in one line if the name is its package's
