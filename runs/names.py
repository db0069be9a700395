"""The Makefile's names, paths and launchers, worked out from what the user set; and its checks.

    python3 -m runs.names make CORPUS=builtin NGPU=7      prints make variables
    python3 -m runs.names help|check-gpu|check-images|... DATA=...

make reads this, and settings.py, before there is an environment: the standard library alone, no newer Python than 3.8.
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

from runs.settings import DEFAULTS, Problem, as_make, flag, flags_of, joined, read

VENV = ".venv/bin"
COMPLETE = ".complete"  # a file in a corpus, made when all of it is there
TEXTS = ("RUN", "MODEL", "DATA", "IMAGE", "TEXT", "PROMPT", "BUNDLE", "PYTHON", "ARGS")
# A small vision model that learns digits in a minute or two, without the augmentation that large ones need.
SMALL_VISION = (
    "--device-type cpu --input-size 32 --model-kwargs embed_dim=64 depth=2 num_heads=2 --epochs 40 --batch-size 16 "
    "--lr 0.2 --repeated-aug 1 --mixup 0 --cutmix 0 --aa= --reprob 0 --hflip 0 --scale 0.8 1 --model-ema-decay 0.99 "
    "--eval-every 5 --warmup-epochs 0"
)
SMALL_LANGUAGE = "--device-type cpu --num-iterations 100 --total-batch-size 8192"
GIVE_DATA = (
    "Give DATA=folder with train/ and val/ (ImageNet as class folders, or webdataset tars) "
    'or DATA=hf:ILSVRC/imagenet-1k (after "hf auth login")'
)
HELP = """
  NGPU={NGPU} processes, DEPTH={DEPTH} layers (the demo has 4), SHARDS={SHARDS}, VOCAB={VOCAB}, SEQ={SEQ}
  NNODES=1 (machines, each with NGPU processes, that meet at RDZV=host:port), RESTARTS=0 (after a crash)
  CORPUS={CORPUS} (fineweb, builtin, or your own .txt, .md, .jsonl, .json, .parquet: a file or a folder)
  COLUMN=text (which column or field of your own files is the text), BASE={BASE} (outputs)
  RUN={RUN} (what eval-bpb, eval-core, sample and export take; eval-deit takes MODEL's, figures the demo's)
  DATA=folder of images with train/ and val/ (or hf:NAME, hf-stream:NAME, wds:FOLDER, digits)
  MODEL=any timm name, WANDB_MODE=disabled (offline, online), ARGS='flags for the command of the target'"""


def count_gpus():
    """How many GPUs CUDA shows to a process: those of nvidia-smi, or what CUDA_VISIBLE_DEVICES names; 0 without it."""
    if not shutil.which("nvidia-smi"):
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("GPU")]
    uuids = [line.rpartition("(UUID: ")[2].rstrip(")") for line in lines]
    return visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(uuids, named):
    """How many of these GPUs CUDA_VISIBLE_DEVICES leaves, read as CUDA does: numbers or UUIDs up to the first wrong."""
    if named is None:
        return len(uuids)
    seen = []
    for name in map(str.strip, named.split(",")):
        if name.startswith("MIG-"):  # a part of a GPU; CUDA uses one
            return 1
        number = re.match(r"\+?([0-9]+)", name)
        meant = [int(number[1])] if number else [i for i, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(meant) != 1 or meant[0] >= len(uuids):
            break
        seen += meant
    return len(seen) if len(set(seen)) == len(seen) else 0  # one that is named twice leaves none


def dataset(corpus, shards):
    """A name of its own for every corpus: fineweb-170, builtin, text-1234567890 (checksum of the folder's path)."""
    if corpus == "builtin":
        return corpus
    if corpus == "fineweb":
        return "fineweb-" + shards
    path = os.path.abspath(corpus)
    checksum = subprocess.run(["cksum"], input=os.fsencode(path) + b"\n", stdout=subprocess.PIPE).stdout.split()[0]
    return os.path.basename(path) + "-" + checksum.decode()


def fetch_flags(base, corpus, shards):
    """What nanochat_gka.corpus makes: shards are fetched once, to corpus/fineweb, however many of them are read."""
    shards = shards if corpus == "fineweb" else ""
    return joined(flag("source", corpus), flag("out", f"{base}/corpus/{corpus}"), flag("num-shards", shards))


def own_corpus(given, made):
    """Where your own text is read, and what nanochat_gka.corpus makes of it before: nothing of nanochat's shards.

    Nor of a corpus that it made, which has its note. made: the folder that it writes otherwise.
    """
    corpus, column = given["CORPUS"], given.get("COLUMN", "")
    files = [path.name for path in Path(corpus).glob("[!.]*.parquet")]
    shards = all(re.fullmatch(r"shard_\d{5}\.parquet", name) for name in files)
    if not column and len(files) > 1 and (shards or Path(corpus, "source.json").exists()):
        return corpus, ""
    return made, joined(flag("source", corpus), flag("out", made), flag("text-column", column))


def finish_corpus(given):
    """Link the first SHARDS of the fetched shards to the folder where just these are read, and mark it complete."""
    setting = dict(DEFAULTS, **given)
    complete = Path(setting["BASE"], "corpus", dataset(setting["CORPUS"], setting["SHARDS"]), COMPLETE)
    complete.parent.mkdir(parents=True, exist_ok=True)
    if setting["CORPUS"] == "fineweb":
        fetched = sorted(Path(setting["BASE"], "corpus", "fineweb").glob("shard_*.parquet"))
        for shard in fetched[: int(setting["SHARDS"])]:
            link = complete.parent / shard.name
            if link.exists():
                link.unlink()
            os.link(str(shard), str(link))
        note = fetched[0].with_name("source.json")  # by which packing knows FineWeb-Edu
        if note.exists():
            shutil.copy(str(note), str(complete.parent / note.name))
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


def torchrun_flags(given):
    """What torchrun is told beside the number of processes: NNODES machines that meet at RDZV, and RESTARTS."""
    nodes, restarts, place = given.get("NNODES", "1"), given.get("RESTARTS", "0"), given.get("RDZV", "")
    if nodes == "1" and place:
        raise Problem(f"RDZV={place} is where several machines meet: give their number too, NNODES=2 or more")
    flags = ["--standalone"] if nodes == "1" and restarts != "0" else []
    if nodes != "1":
        if not place:
            raise Problem(f"NNODES={nodes} needs RDZV=host:port, the same on every machine: one of them, a free port")
        match = re.fullmatch(r"(?:\w[\w.-]*|\[[\w.:]+\])(?::([0-9]+))?", place)
        if not match or not 0 < int(match[1] or 1) < 2**16:
            raise Problem(f"RDZV={place} must be host:port, the name or address of one of the machines and a free port")
        flags = [f"--nnodes {nodes} --rdzv-backend c10d --rdzv-id gka --rdzv-endpoint {shlex.quote(place)}"]
    return " ".join(flags + ([f"--max-restarts {restarts}"] if restarts != "0" else []))


def launcher(ranks, torchrun):
    """What runs a module; the dashes keep torchrun from taking our --run for its --run-path."""
    if ranks != "1" or torchrun:
        return f"{VENV}/python -m trainkit_gka.torchrun {torchrun or '--standalone'} --nproc-per-node {ranks} -m --"
    return VENV + "/python -m"


def names(given):
    """The make variables, from the settings that were given: words for the shell, quoted where it needs that."""
    setting = dict(DEFAULTS, **given)
    base, corpus, text = setting["BASE"], setting["CORPUS"], {name: given.get(name, "") for name in TEXTS}
    prepared = corpus in ("fineweb", "builtin")
    name = dataset(corpus, setting["SHARDS"])
    documents, fetch = f"{base}/corpus/{name}", fetch_flags(base, corpus, setting["SHARDS"])
    if not prepared:
        documents, fetch = own_corpus(given, documents)
    tokenizer = f"{base}/tokenizer/{name}-{setting['VOCAB']}"
    whole = corpus != "fineweb" and setting.get("SPLIT_DOCUMENTS") == "no"  # FineWeb-Edu's documents always are
    packed = f"{base}/packed/{name}-{setting['VOCAB']}-{setting['SEQ']}" + ("-whole" if whole else "")
    asked = given.get("NGPU", "")
    ranks = str(max(1, int(asked or count_gpus())))
    torchrun = torchrun_flags(given)
    run, gka_run = text["RUN"], text["RUN"] or f"{base}/runs/d{setting['DEPTH']}-gka"
    named_rows = any(key in given for key in ("CORPUS", "SHARDS", "VOCAB", "SEQ"))
    return {
        # Names of the steps that are to be done. Those of your own text always are: they look whether it has changed.
        "PREPARED": "prepare-corpus" if prepared and not os.path.exists(f"{documents}/{COMPLETE}") else "",
        "OWN_CORPUS": "" if prepared else "own-corpus",
        "TOKENIZER_STEP": "" if prepared and os.path.exists(f"{tokenizer}/tokenizer.json") else "train-tokenizer",
        "ROWS_STEP": "" if prepared and os.path.exists(f"{packed}/manifest.json") else "pack-rows",
        "OUTPUTS": shlex.quote(base),
        "FETCH": fetch,
        "READ_CORPUS": flag("corpus", documents),
        "VOCAB_FLAG": "--vocab-size " + setting["VOCAB"],
        "SEQ_FLAG": joined("--sequence-len " + setting["SEQ"], flag("split-documents", "no" if whole else "")),
        "DEPTH_FLAG": "--depth " + setting["DEPTH"],
        "TOKENIZER": shlex.quote(tokenizer),
        "PACKED": shlex.quote(packed),
        "PROCESSES": joined("--ngpu " + ranks, torchrun and "--torchrun=" + shlex.quote(torchrun)),
        "LAUNCH": launcher(ranks, torchrun),
        "DEMO_FLAGS": joined(
            flag("ranks", ranks if asked and ranks != "1" else ""), flag("depth", given.get("DEPTH", ""))
        ),
        # The rows are those the run was trained on, unless others are named.
        "ROWS": flag("data", packed if named_rows else ""),
        "GKA_RUN": shlex.quote(gka_run),
        "BASE_RUN": shlex.quote(run or f"{base}/runs/d{setting['DEPTH']}-softmax"),
        "DEIT_RUN": shlex.quote(run or f"{base}/runs/{text['MODEL'] or 'deit_tiny_gka_patch16_224'}"),
        "EXPORTED": shlex.quote(gka_run + "-export"),
        "DRAW": " ".join(draw_commands(given, base)),
        "DRAWN": joined(flag("out", base + "/figures"), flag("demo", base + "/demo"), flag("run", run)),
        "REPORTED": joined(flag("base", base), flag("run", run)),
        "EXPLORED": joined(flag("demo", base + "/demo"), flag("run", run)),
        "SHOWN": joined(flag("image", text["IMAGE"]), flag("text", text["TEXT"])),
        "MODEL_FLAG": flag("model", text["MODEL"]),
        "DATA_FLAG": flag("data", text["DATA"]),
        "BUNDLE_FLAG": flag("bundle", text["BUNDLE"]),
        "PROMPT_FLAG": flag("prompt", text["PROMPT"] or "The"),
        "WANDB_FLAG": flag("wandb", setting["WANDB_MODE"]),
        "FLAGS": flags_of(text["ARGS"]),
        "SYSTEM_PY": shlex.quote(text["PYTHON"]),
        "GIVEN": " ".join(shlex.quote("=".join(pair)) for pair in given.items()),
    }


def has_device(given):
    """Whether there is a GPU, or the user asks for the CPU."""
    flags = " ".join(given.get("ARGS", "").replace("=", " ").split())
    return "--device-type cpu" in flags or count_gpus() > 0


def small(given, flags, **settings):
    """Words for the shell: a small run's settings and flags, in which what the user gave counts."""
    settings.update((name, given[name]) for name in settings if name in given)
    settings["ARGS"] = joined(flags, given.get("ARGS", ""))
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())


def check_python(given):
    """Raises Problem if this Python is too old."""
    if sys.version_info < (3, 10):  # noqa: UP036 (make runs this with any Python)
        raise Problem("Python 3.10 or newer is needed; set PYTHON=python3.x")


def check_gpu(given):
    """Raises Problem if a language model would train on a CPU unasked."""
    if not has_device(given):
        depth = given.get("DEPTH", DEFAULTS["DEPTH"])
        start = f"no GPU is visible, and a depth-{depth} run would take years without one."
        words = small(given, SMALL_LANGUAGE, CORPUS="builtin", VOCAB="4096", SEQ="256")
        raise Problem(f'{start} Run "make demo", or try the same chain small: make pretrain-d20 DEPTH=4 {words}')


def check_images(given):
    """Raises Problem if there are no images, or a vision model would train on a CPU unasked."""
    if not given.get("DATA"):
        missing = "no images" if has_device(given) else "no images and no GPU"
        raise Problem(f'{missing}. {GIVE_DATA}, or run "make demo", which needs neither')
    form, _, place = given["DATA"].partition(":")
    folder = place if form == "wds" else given["DATA"]
    if folder != "digits" and form not in ("hf", "hf-stream") and not os.path.isdir(os.path.expanduser(folder)):
        raise Problem(f"DATA={given['DATA']}: there is no such folder. {GIVE_DATA}")
    if not has_device(given):
        start = 'no GPU is visible, and 300 epochs would take years without one. Run "make demo", or try the command'
        base = shlex.quote(given.get("BASE", DEFAULTS["BASE"]) + "/small")
        raise Problem(f"{start} small: BASE={base} {small(given, SMALL_VISION, DATA='digits')}")


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
    if corpus not in ("fineweb", "builtin") and not os.path.exists(corpus):
        raise Problem(f"CORPUS={corpus} is neither fineweb nor builtin nor a folder or file")


def show_targets(makefile):
    """Print every target of a Makefile that has a description."""
    for targets, description in re.findall(r"^([a-z0-9 -]+):.*## (.*)$", makefile, re.MULTILINE):
        for target in targets.split():
            print(f"  make {target:<18} {description}")


def main(words):
    """Do what the first word says, with the settings in the others."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make help | head` ends quietly
    sys.stdout.reconfigure(errors="surrogateescape")  # a name that is not text comes out as it came in
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    asked = words[0]
    steps = {
        "check-python": check_python,
        "check-gpu": check_gpu,
        "check-images": check_images,
        "check-corpus": check_corpus,
        "check-figures": check_figures,
        "finish-corpus": finish_corpus,
    }
    try:
        given = read(words[1:])
        if asked == "make":
            print(as_make(names(given)))
        elif asked == "help":
            show_targets(Path("Makefile").read_text())
            settings = {**DEFAULTS, "NGPU": count_gpus(), **given, "RUN": names(given)["GKA_RUN"]}
            print(HELP.format(**settings))
        else:
            steps[asked](given)
    except Problem as problem:
        if asked == "make":
            print(as_make({"PROBLEM": str(problem)}))  # which make says itself, in one line
        else:
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
