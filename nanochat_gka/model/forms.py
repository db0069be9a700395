"""Research forms of the model, which live outside of this package: `--forms MODULE` imports them.

A form is a subclass of `GPTConfig` with settings of its own, whose methods say what is different, and a dataclass of
flags for them. Its module registers both. `runs.study.forms` is one.
"""

import importlib
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import make_dataclass

from nanochat_gka.model.config import FORMS, OF_THE_STUDY, STUDY, GPTConfig, ModelFlags
from trainkit_gka.cli import UserError

FLAGS: dict[str, type] = {}  # module -> the flags of its form


def register(shape: type[GPTConfig], flags: type) -> None:
    """Make a form known. flags: a frozen dataclass of the fields that `shape` adds, or gives more values."""
    flags.SHAPE = shape
    FORMS.append(shape)
    FLAGS[flags.__module__] = flags


def use(module: str) -> None:
    """Import a module of forms, so that models of its forms load; nothing for "". Raises UserError."""
    if not module:
        return
    try:
        importlib.import_module(module)
    except (ModuleNotFoundError, TypeError) as error:  # TypeError: it begins with a dot
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # what the module needs is missing
        raise UserError(f"--forms {module}: there is no such module; run the command where Python finds it") from None
    if not _flags_of(module):
        raise UserError(f"--forms {module}: the module registers no form")


def extended(config_class: type[ModelFlags]) -> Callable[[list[str]], type[ModelFlags]]:
    """For `cli.run`: the class of a command's flags, with those of the module that `--forms` names."""

    def of(argv: list[str]) -> type[ModelFlags]:
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--forms", nargs="?")
        module = parser.parse_known_args(argv)[0].forms or ""
        flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
        asked = [flag for flag in flags if flag[2:].replace("-", "_") in OF_THE_STUDY]
        if asked and not module:
            raise UserError(f"{asked[0]} is of the study's forms: add --forms {STUDY}, in a clone of the project")
        use(module)
        return with_flags(config_class, module)

    return of


def with_flags(config_class: type[ModelFlags], module: str) -> type[ModelFlags]:
    """The class with the flags of a module that is imported; itself for ""."""
    if not module:
        return config_class
    forms, own = _flags_of(module), {"__doc__": config_class.__doc__}
    return make_dataclass(config_class.__name__, (), bases=(*forms, config_class), namespace=own, frozen=True)


def _flags_of(module: str) -> list[type]:
    return [flags for name, flags in FLAGS.items() if module and f"{name}.".startswith(f"{module}.")]
