"""The Makefile's names, paths and launchers, worked out from what the user set; and its checks.

    python3 -m runs.names make CORPUS=builtin NGPU=7      prints make variables
    python3 -m runs.names help|check-gpu|check-images|... DATA=...

make reads this before there is an environment: it needs the standard library alone, and no newer Python than 3.8.
Settings are given as NAME=value; an empty value is the same as none.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

DEFAULTS = {"BASE": "out", "CORPUS": "fineweb", "SHARDS": "170", "VOCAB": "32768", "SEQ": "2048", "DEPTH": "20"}
STUDY = {"CORPUS": "builtin", "VOCAB": "4096", "SEQ": "512"}  # what make study takes in place of some of them
VENV = ".venv/bin"
# A small vision model that learns digits in a minute or two, without the augmentation that large ones need.
SMALL_VISION = (
    "--device-type cpu --input-size 32 --model-kwargs embed_dim=64 depth=2 num_heads=2 --epochs 40 --batch-size 16 "
    "--lr 0.2 --repeated-aug 1 --mixup 0 --cutmix 0 --aa= --reprob 0 --hflip 0 --scale 0.8 1 --model-ema-decay 0.99 "
    "--eval-every 5"
)
SMALL_LANGUAGE = (
    "make pretrain-d20 DEPTH=4 CORPUS=builtin VOCAB=4096 SEQ=256 "
    'ARGS="--device-type cpu --num-iterations 100 --total-batch-size 8192"'
)
# Settings that are whole numbers, and their least and most; the commands, later in the chain, take no others.
WHOLE = {"NNODES": (1, None), "RESTARTS": (0, None), "NGPU": (0, None), "DEPTH": (1, None), "SHARDS": (2, 1823)}
WHOLE.update({"VOCAB": (265, 65536), "SEQ": (1, 2**20)})
GIVE_DATA = (
    "Give DATA=folder with train/ and val/ (ImageNet as class folders, or webdataset tars) "
    'or DATA=hf:ILSVRC/imagenet-1k (after "hf auth login")'
)
HELP = """
  NGPU={NGPU} processes, DEPTH={DEPTH} layers (the demo has 4), SHARDS={SHARDS}, VOCAB={VOCAB}, SEQ={SEQ}
  NNODES=1 (machines, each with NGPU processes, that meet at RDZV=host:port), RESTARTS=0 (after a crash)
  CORPUS={CORPUS} (fineweb, builtin or a folder of parquet files), BASE={BASE} (outputs)
  RUN={RUN} (what eval-bpb, eval-core, sample and export take; eval-deit takes MODEL's, figures the demo's)
  DATA=folder of images with train/ and val/ (or hf:NAME, hf-stream:NAME, wds:FOLDER, digits)
  MODEL=any timm name, WANDB_MODE=disabled (offline, online), ARGS='flags for the command of the target'"""


class Problem(Exception):
    """Something the user can mend; the message says how."""


def count_gpus():
    """How many GPUs nvidia-smi lists; 0 without it."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    return sum(line.startswith(b"GPU") for line in listed.stdout.splitlines())


def dataset(corpus, shards):
    """A name of its own for every corpus: fineweb-170, builtin, text-1234567890 (checksum of the folder's path)."""
    if corpus == "builtin":
        return corpus
    if corpus == "fineweb":
        return "fineweb-" + shards
    path = os.path.abspath(corpus)
    checksum = subprocess.run(["cksum"], input=path.encode() + b"\n", stdout=subprocess.PIPE).stdout.split()[0]
    return os.path.basename(path) + "-" + checksum.decode()


def fetch_flags(base, corpus, shards):
    """What nanochat_gka.corpus makes: shards are fetched once, to corpus/fineweb, however many of them are read."""
    flags = f"--source {corpus} --out {base}/corpus/{corpus}"
    return flags + " --num-shards " + shards if corpus == "fineweb" else flags


def finish_corpus(given):
    """Link the first SHARDS of the fetched shards to the folder where just these are read, and mark it complete."""
    setting = dict(DEFAULTS, **given)
    complete = Path(names(given)["PREPARED"])
    complete.parent.mkdir(parents=True, exist_ok=True)
    if setting["CORPUS"] == "fineweb":
        fetched = sorted(Path(setting["BASE"], "corpus", "fineweb").glob("shard_*.parquet"))
        for shard in fetched[: int(setting["SHARDS"])]:
            link = complete.parent / shard.name
            if link.exists():
                link.unlink()
            os.link(str(shard), str(link))
    complete.touch()


def is_language(folder):
    """Whether a folder is a language run, one of its checkpoints or an exported language model."""
    for path in [folder / "config.json", folder / "state.json", *sorted(folder.glob("checkpoints/*/state.json"))]:
        try:
            about = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(about, dict) and ("model_config" in about or about.get("model_type") == "gka-gpt"):
            return True
    return False


def draw_commands(given, base):
    """What `make figures` runs: the command for what is named, or else of the demo's vision and language models."""
    vision, language = "deit_gka.draw", "nanochat_gka.draw"
    if "RUN" in given:
        return [language if is_language(Path(given["RUN"])) else vision]
    if "MODEL" in given or "IMAGE" in given:
        return [vision]
    if "TEXT" in given:
        return [language]
    return [vision, language] if any(Path(base, "demo", "runs").glob("d*-gka-paper-*")) else [vision]


def check_numbers(given):
    """Raises Problem for the first setting that is not a whole number, or out of its range."""
    for name, (least, most) in WHOLE.items():
        value = given.get(name, str(least))
        if not re.fullmatch("[0-9]+", value) or int(value) < least or (most and int(value) > most):
            in_range = f"between {least} and {most}" if most else f"of {least} or more"
            raise Problem(f"{name}={value} must be a whole number {in_range}")


def torchrun_flags(given):
    """What torchrun is told beside the number of processes: NNODES machines that meet at RDZV, and RESTARTS."""
    nodes, restarts = given.get("NNODES", "1"), given.get("RESTARTS", "0")
    if nodes == "1" and "RDZV" in given:
        raise Problem(f"RDZV={given['RDZV']} is where several machines meet: give their number too, NNODES=2 or more")
    flags = ["--standalone"] if nodes == "1" and restarts != "0" else []
    if nodes != "1":
        if "RDZV" not in given:
            raise Problem(f"NNODES={nodes} needs RDZV=host:port, the same on every machine: one of them, a free port")
        flags = [f"--nnodes {nodes} --rdzv-backend c10d --rdzv-id gka --rdzv-endpoint {shlex.quote(given['RDZV'])}"]
    return " ".join(flags + ([f"--max-restarts {restarts}"] if restarts != "0" else []))


def launcher(ranks, torchrun):
    """What runs a module; the dashes keep torchrun from taking our --run for its --run-path."""
    if ranks != "1" or torchrun:
        return f"{VENV}/python -m trainkit.torchrun {torchrun or '--standalone'} --nproc-per-node {ranks} -m --"
    return VENV + "/python -m"


def names(given):
    """The make variables, from the settings that were given."""
    check_numbers(given)
    setting = dict(DEFAULTS, **given)
    base, corpus = setting["BASE"], setting["CORPUS"]
    prepared = corpus in ("fineweb", "builtin")
    name = dataset(corpus, setting["SHARDS"])
    documents = f"{base}/corpus/{name}" if prepared else corpus
    tokenizer = f"{base}/tokenizer/{name}-{setting['VOCAB']}"
    packed = f"{base}/packed/{name}-{setting['VOCAB']}-{setting['SEQ']}"
    ngpu = given.get("NGPU") or str(count_gpus())
    ranks = "1" if ngpu == "0" else ngpu
    torchrun = torchrun_flags(given)
    run = shlex.quote(given["RUN"]) if "RUN" in given else ""
    demo = ["--ranks " + ranks] if "NGPU" in given and ranks != "1" else []
    demo += ["--depth " + given["DEPTH"]] if "DEPTH" in given else []
    named_rows = any(key in given for key in ("CORPUS", "SHARDS", "VOCAB", "SEQ"))
    return {
        "PREPARED": documents + "/.complete" if prepared else "",  # a file that is made when the corpus is complete
        "OWN_CORPUS": "" if prepared else documents,
        "FETCH": fetch_flags(base, corpus, setting["SHARDS"]),
        "READ_CORPUS": "--corpus " + documents,
        "VOCAB_FLAG": "--vocab-size " + setting["VOCAB"],
        "SEQ_FLAG": "--sequence-len " + setting["SEQ"],
        "DEPTH_FLAG": "--depth " + setting["DEPTH"],
        "TOKENIZER": tokenizer,
        "PACKED": packed,
        "PROCESSES": f"--ngpu {ranks}" + (f" --torchrun={shlex.quote(torchrun)}" if torchrun else ""),
        "LAUNCH": launcher(ranks, torchrun),
        "DEMO_FLAGS": " ".join(demo),
        # The rows are those the run was trained on, unless others are named.
        "ROWS": "--data " + packed if named_rows else "",
        "GKA_RUN": run or f"{base}/runs/d{setting['DEPTH']}-gka",
        "BASE_RUN": run or f"{base}/runs/d{setting['DEPTH']}-softmax",
        "DRAWN": f"--out {base}/figures --demo {base}/demo" + (f" --run {run}" if run else ""),
        "REPORTED": f"--base {base}" + (f" --run {run}" if run else ""),
        "EXPLORED": f"--demo {base}/demo" + (f" --run {run}" if run else ""),
        "DRAW": " ".join(draw_commands(given, base)),
        "MODEL_FLAG": "--model " + shlex.quote(given["MODEL"]) if "MODEL" in given else "",
        "DEIT_RUN": run or f"{base}/runs/{given.get('MODEL', 'deit_tiny_gka_patch16_224')}",
    }


def as_make(variables):
    """The variables as words of make, NAME:=value with the spaces of a value as |, which the Makefile turns back."""
    escaped = {name: value.replace("$", "$$").replace("#", "\\#") for name, value in variables.items()}
    return " ".join(f"{name}:={value.replace(' ', '|')}" for name, value in escaped.items())


def has_device(given):
    """Whether there is a GPU, or the user asks for the CPU."""
    flags = " ".join(given.get("ARGS", "").replace("=", " ").split())
    return "--device-type cpu" in flags or count_gpus() > 0


def check_python(given):
    """Raises Problem if this Python is too old."""
    if sys.version_info < (3, 10):  # noqa: UP036 (make runs this with any Python)
        raise Problem("Python 3.10 or newer is needed; set PYTHON=python3.x")


def check_gpu(given):
    """Raises Problem if a language model would train on a CPU unasked."""
    if not has_device(given):
        depth = given.get("DEPTH", DEFAULTS["DEPTH"])
        start = f"no GPU is visible, and a depth-{depth} run would take years without one."
        raise Problem(f'{start} Run "make demo", or try the same chain small: {SMALL_LANGUAGE}')


def check_images(given):
    """Raises Problem if there are no images, or a vision model would train on a CPU unasked."""
    if not given.get("DATA"):
        missing = "no images" if has_device(given) else "no images and no GPU"
        raise Problem(f'{missing}. {GIVE_DATA}, or run "make demo", which needs neither')
    if not has_device(given):
        start = 'no GPU is visible, and 300 epochs would take years without one. Run "make demo", or try the command'
        raise Problem(f'{start} small: DATA=digits BASE=out/small ARGS="{SMALL_VISION}"')


def check_figures(given):
    """Raises Problem if what is drawn cannot be drawn of what is given."""
    drawn = draw_commands(given, given.get("BASE", DEFAULTS["BASE"]))
    if drawn == ["nanochat_gka.draw"] and ("IMAGE" in given or "MODEL" in given):
        raise Problem("figures of a language run take TEXT='...', not IMAGE or MODEL")
    if drawn == ["deit_gka.draw"] and "TEXT" in given:
        raise Problem("figures of a vision model take IMAGE=file, not TEXT; RUN=folder may name a language run")


def check_corpus(given):
    """Raises Problem if CORPUS is not a corpus."""
    corpus = given.get("CORPUS", DEFAULTS["CORPUS"])
    if corpus not in ("fineweb", "builtin") and not os.path.isdir(corpus):
        raise Problem(f"CORPUS={corpus} is neither fineweb nor builtin nor a folder")


def show_targets(makefile):
    """Print every target of a Makefile that has a description."""
    for targets, description in re.findall(r"^([a-z0-9 -]+):.*## (.*)$", makefile, re.MULTILINE):
        for target in targets.split():
            print(f"  make {target:<18} {description}")


def main(words):
    """Do what the first word says, with the settings in the others."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make help | head` ends quietly
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    asked, pairs = words[0], (word.split("=", 1) for word in words[1:])
    given = {name: value for name, value in pairs if value}
    if given.pop("FOR", "") == "study":
        given = {**STUDY, **given}
    steps = {
        "check-python": check_python,
        "check-gpu": check_gpu,
        "check-images": check_images,
        "check-corpus": check_corpus,
        "check-figures": check_figures,
        "finish-corpus": finish_corpus,
    }
    if asked == "make":
        try:
            print(as_make(names(given)))
        except Problem as problem:
            print(as_make({"PROBLEM": str(problem)}))  # which make says itself, in one line
    elif asked == "help":
        show_targets(Path("Makefile").read_text())
        settings = {**DEFAULTS, "NGPU": count_gpus(), **given, "RUN": names(given)["GKA_RUN"]}
        print(HELP.format(**settings))
    else:
        try:
            steps[asked](given)
        except Problem as problem:
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
