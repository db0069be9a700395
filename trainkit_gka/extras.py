"""Optional dependencies: one line names those that are missing and how to install them."""

import importlib.metadata
import importlib.util
import re


class MissingExtra(ModuleNotFoundError):
    """A package of gka was imported without its dependencies; the message says how to install them."""


def missing(extra: str, *modules: str) -> str:
    """One line that names those of `modules`, of gka[extra], that are not installed; empty if none is missing."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    verb = "is" if len(absent) == 1 else "are"
    return f"{', '.join(absent)} {verb} not installed: {advice(extra)}" if absent else ""


def advice(extra: str) -> str:
    """The command that installs an extra."""
    return f'run pip install "gka[{extra}]" (in a checkout: pip install -e ".[{extra}]")'


def require(package: str, extra: str, *modules: str) -> None:
    """Raises MissingExtra unless all of `modules`, which gka[extra] installs for `package`, can be found."""
    if reason := missing(extra, *modules):
        raise MissingExtra(reason, name=package)  # python -m prints it in one line if `name` is its package


def require_version(package: str, extra: str, distribution: str, oldest: str) -> None:
    """Raises MissingExtra if an installed distribution is older than `oldest`, such as 5.23."""
    version = importlib.metadata.version(distribution)
    installed, needed = ([*map(int, re.findall(r"\d+", text)[:2])] for text in (version, oldest))
    if installed < needed:
        raise MissingExtra(f"{distribution} {version} is older than {oldest}: {advice(extra)}", name=package)
