"""What the user set for make: read, checked, and worded for the shell.

Settings are given as NAME=value; an empty value is the same as none. It is read before there is an environment: the
standard library alone, no newer Python than 3.8.
"""

import os
import re
import shlex

DEFAULTS = {"BASE": "out", "CORPUS": "fineweb", "SHARDS": "170", "VOCAB": "32768", "SEQ": "2048", "DEPTH": "20"}
DEFAULTS["WANDB_MODE"] = "disabled"
SMALL = {"CORPUS": "builtin", "VOCAB": "4096", "SEQ": "512"}
OF_TARGET = {  # what a target takes in place of some of them
    "study": {**SMALL, "SPLIT_DOCUMENTS": "no"},  # the rows of its results
    "pretrain-small": {**SMALL, "DEPTH": "4", "NGPU": "1"},  # a step has four rows
}
PATHS = {"BASE", "CORPUS", "RUN", "DATA", "IMAGE", "BUNDLE", "ENV_PYTHON"}
WANDB_MODES = ("disabled", "offline", "online")
# Settings that are whole numbers, and their least and most; the commands, later in the chain, take no others.
WHOLE = {"NNODES": (1, None), "RESTARTS": (0, None), "NGPU": (0, None), "DEPTH": (1, None), "SHARDS": (2, 1823)}
WHOLE.update({"VOCAB": (265, 65536), "SEQ": (1, 2**20)})


class Problem(Exception):
    """Something the user can mend; the message says how."""


def read(setting):
    """The settings that have a value, as the commands take them. Raises Problem for what cannot be right."""
    given = {name: value for name, value in setting.items() if value}
    for name, value in given.items():
        if re.search("[\x00-\x08\x0a-\x1f\x7f]", value):
            raise Problem(f"{name} has a line break or another control character, which make cannot pass on")
    for name in PATHS & set(given):
        path = os.path.expanduser(given[name])
        given[name] = ("./" if path.startswith("-") else "") + (path.rstrip("/") or path[:1])
    for name, (least, most) in WHOLE.items():
        value = given.get(name, str(least))
        if not re.fullmatch("[0-9]+", value) or int(value) < least or (most and int(value) > most):
            in_range = f"between {least} and {most}" if most else f"of {least} or more"
            raise Problem(f"{name}={value} must be a whole number {in_range}")
        if name in given:
            given[name] = str(int(value))
    if given.get("WANDB_MODE", "disabled") not in WANDB_MODES:
        raise Problem(f"WANDB_MODE={given['WANDB_MODE']} must be {' or '.join(WANDB_MODES)}")
    return given


def flags_of(text):
    """ARGS for the shell: its quotes, ~ and * work as anywhere; $, ; and the like are plain characters."""
    try:
        shlex.split(text)
    except ValueError as error:
        raise Problem(f"ARGS={text}: {str(error).lower()}") from None

    def plain(match):
        single, double, escaped, special = match.groups()
        if double:
            return re.sub(r"(\\.)|([$`])", lambda inner: inner[1] or "\\" + inner[2], double)
        return single or escaped or "\\" + special

    return re.sub(r"""('[^']*')|("(?:\\.|[^"\\])*")|(\\.)|([$`;&|<>()#!])""", plain, text)
