"""Check make's settings and the hardware before anything is installed, fetched or computed.

    python3 -m runs.check TARGET...

The settings that the user gave are in the environment. A problem is one line and exit code 2. It runs before there is
an environment: the standard library alone, no newer Python than 3.8.
"""

import os
import shlex
import sys

from trainkit_gka import gpus

LEAST = {"DEPTH": 1, "NGPU": 0, "NNODES": 1, "RESTARTS": 0, "SHARDS": 2, "VOCAB": 265, "SEQ": 1}
MOST = {"SHARDS": 1823, "VOCAB": 65536, "SEQ": 2**20}
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
        if target.startswith("pretrain-d20"):
            check_gpu(settings)
        elif target.startswith("train-deit-") or target in ("ablate-projections", "train-small"):
            check_images(target, settings)


def check_numbers(settings):
    """Raises Problem if a setting is out of range, or several machines have no place to meet."""
    for name, least in LEAST.items():
        value, most = settings.get(name, str(least)), MOST.get(name, 2**31)
        if not value.isdigit() or not least <= int(value) <= most:
            limits = f"between {least} and {most}" if name in MOST else f"of {least} or more"
            raise Problem(f"{name}={value} must be a whole number {limits}")
    if (settings.get("NNODES", "1") != "1") != ("RDZV" in settings):
        raise Problem("NNODES=2 or more and RDZV=host:port, one of these machines and a free port, need each other")


def has_device(settings):
    """Whether there is a GPU, the user asks for the CPU, or only asks what a training would be."""
    flags = settings.get("ARGS", "").replace("_", "-").replace("=", " ").split()
    return "--dry-run" in flags or "--device-type cpu" in " ".join(flags) or gpus.count() > 0


def check_gpu(settings):
    """Raises Problem if a language model of the paper would be trained on a CPU unasked."""
    if not has_device(settings):
        small = words(settings, "CORPUS", "COLUMN", "VOCAB", "SEQ", "BASE", "ARGS")
        depth = settings.get("DEPTH", "20")
        raise Problem(
            f"no GPU is visible, and a depth-{depth} run would take years without one. "
            f'Run "make demo", or train a small one on a CPU: make pretrain-small{small}'
        )


def check_images(target, settings):
    """Raises Problem if there are no images, or a vision model of the paper would be trained on a CPU unasked."""
    data = settings.get("DATA", "")
    is_small = target == "train-small"
    if not data:
        missing = "no images" if is_small or has_device(settings) else "no images and no GPU"
        rest = "or DATA=cifar10 or digits" if is_small else 'or run "make demo", which needs neither'
        raise Problem(f"{missing}. {FOLDERS}, {rest}")
    form, _, place = data.partition(":")
    folder = place if form == "wds" else data
    named = folder in ("digits", "cifar10") or form in ("hf", "hf-stream")
    if not named and not os.path.isdir(os.path.expanduser(folder)):
        raise Problem(f"DATA={data}: there is no such folder. {FOLDERS}")
    if not is_small and not has_device(settings):
        raise Problem(
            "no GPU is visible, and 300 epochs would take years without one. "
            'Run "make demo", or train a small one on a CPU: make train-small{}'.format(
                words(settings, "DATA", "BASE", "ARGS")
            )
        )


def words(settings, *names):
    """These settings as words of a shell's command line, each after a space."""
    return "".join(f" {name}={shlex.quote(settings[name])}" for name in names if settings.get(name))


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
