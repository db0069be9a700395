"""Check make's settings and the hardware before anything is installed, fetched or computed.

    python3 -m runs.check TARGET...

The settings that the user gave are in the environment. A problem is one line and exit code 2. It runs before there is
an environment: the standard library alone, no newer Python than 3.8.
"""

import os
import sys

from trainkit_gka import gpus

# The least and the most of a setting; None: no bound.
BOUNDS = {
    "DEPTH": (1, None),
    "NGPU": (0, None),
    "NNODES": (1, None),
    "RESTARTS": (0, None),
    "SHARDS": (2, 1823),
    "VOCAB": (265, 65536),
    "SEQ": (1, 2**20),
}
FOLDERS = (
    "Give DATA=folder with train/ and val/ (ImageNet as class folders, or webdataset tars) "
    'or DATA=hf:ILSVRC/imagenet-1k (after "hf auth login")'
)


class Problem(Exception):
    """Something the user can mend; the message says how."""


def check(targets, settings):
    """Raises Problem for the first reason why one of the targets cannot run. settings: by name."""
    if "setup" in targets and sys.version_info < (3, 10):
        raise Problem("Python 3.10 or newer is needed; set PYTHON=python3.x")
    check_numbers(settings)
    for target in targets:
        of_paper = target.startswith(("pretrain-d20", "train-deit-", "ablate-"))
        if of_paper and not has_device(settings):
            small = "pretrain-small" if target.startswith("pretrain") else "train-small"
            raise Problem(
                f"no GPU is visible, and {target} would take years without one. "
                f'Run "make demo", or train a small one on a CPU: make {small}'
            )
        if target.startswith("train-deit-") or target in ("ablate-projections", "train-small"):
            check_images(settings.get("DATA", ""))


def check_numbers(settings):
    """Raises Problem if a setting is out of range, or several machines have no place to meet."""
    for name, (least, most) in BOUNDS.items():
        value = settings.get(name, str(least))
        if not value.isdigit() or not least <= int(value) <= (most or 2**31):
            limits = f"between {least} and {most}" if most else f"of {least} or more"
            raise Problem(f"{name}={value} must be a whole number {limits}")
    if (settings.get("NNODES", "1") != "1") != ("RDZV" in settings):
        raise Problem("NNODES=2 or more and RDZV=host:port, one of these machines and a free port, need each other")


def has_device(settings):
    """Whether there is a GPU, the user asks for the CPU, or only asks what a training would be."""
    flags = settings.get("ARGS", "").replace("_", "-").replace("=", " ").split()
    return "--dry-run" in flags or "--device-type cpu" in " ".join(flags) or gpus.count() > 0


def check_images(data):
    """Raises Problem if there are no images. data: the setting DATA."""
    if not data:
        raise Problem(f"no images. {FOLDERS}, or DATA=cifar10 or digits")
    form, _, place = data.partition(":")
    folder = place if form == "wds" else data
    named = folder in ("digits", "cifar10") or form in ("hf", "hf-stream")
    if not named and not os.path.isdir(os.path.expanduser(folder)):
        raise Problem(f"DATA={data}: there is no such folder. {FOLDERS}")


def main(targets):
    if "--help" in targets:
        print(__doc__)
        return
    try:
        check(targets, {name: value for name, value in os.environ.items() if value})
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
