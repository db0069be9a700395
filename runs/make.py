"""What make runs: the commands of its targets, after those of the steps that they need first.

    python3 -m runs.make                               as the Makefile calls it: targets in GOALS, each setting in a
                                                       variable of its name, make's own flags in MAKEFLAGS
    python3 -m runs.make finish-corpus FROM TO COUNT   a step of `make data`

A command is a line for the shell. `make -n` shows the lines; without -n they run one after another, and the last takes
this process's place, so that signals and the exit code are its own.

It runs before there is an environment: the standard library alone, no newer Python than 3.8.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from runs import commands
from runs.settings import DEFAULTS, OF_TARGET, Problem, flags_of, read

PYTHON = ".venv/bin/python"
INSTALL = '-m pip install -e ".[dev]"'
READY, PATCHES_READY = ".venv/.installed", ".venv/.patches"
TEXTS = ("RUN", "MODEL", "DATA", "IMAGE", "TEXT", "BUNDLE", "COLUMN")  # settings without a default
COMPLETE = ".complete"  # a file in a corpus, made when all of it is there
MADE = ("fineweb", "builtin")  # the corpora that are fetched or written; any other is the user's own files
# The files of the site: pages, and what they link to.
SITE_FILES = "*.md docs gka nanochat_gka deit_gka trainkit_gka runs patches tests CITATION.cff LICENSE Makefile"
SITE_SOURCE = (
    "rm -rf out/site-source && mkdir -p out/site-source && "
    f"git ls-files -z -- {SITE_FILES} | xargs -0 cp --parents --target-directory out/site-source"
)
# The commands of a target. A word in braces is a name of `names`, quoted by `expand`; {ARGS} is what the user gave it.
COMMANDS = {
    "setup": [
        "{system} -m venv .venv",
        "{pip} -r requirements.txt",
        "{pip} --no-deps --editable .",
        f"touch {READY}",
    ],
    "clean": ["rm -rf .venv *.egg-info .pytest_cache .ruff_cache .hypothesis"],
    "demo": ["{py} runs.demo --out {BASE}/demo --ranks {ranks} --depth {demo_depth} --wandb {WANDB_MODE} {ARGS}"],
    "test": ["{py} pytest -n auto --dist loadfile {ARGS}"],
    "test-gpu": ["{py} pytest -m gpu {ARGS}"],
    "lint": ["{py} ruff check .", "{py} ruff format --check .", "{py} mypy"],
    "tokenizer": [
        "{py} nanochat_gka.tokenizer --corpus {documents} --vocab-size {VOCAB} --out {tokenizer} {ARGS}",
    ],
    "tokenize": [
        "{py} nanochat_gka.pack --corpus {documents} --tokenizer {tokenizer} --sequence-len {SEQ} "
        "--split-documents {split} --out {packed} {ARGS}"
    ],
    "eval-bpb": ["{launch} nanochat_gka.evaluate --results {BASE}/results.jsonl --data {rows} --run {run} {ARGS}"],
    "eval-bpb-base": [
        "{launch} nanochat_gka.evaluate --results {BASE}/results.jsonl --data {rows} --run {base_run} {ARGS}"
    ],
    "eval-core": ["{launch} nanochat_gka.eval_core --run {run} --out {BASE}/core --bundle {BUNDLE} {ARGS}"],
    "eval-core-base": ["{launch} nanochat_gka.eval_core --run {base_run} --out {BASE}/core --bundle {BUNDLE} {ARGS}"],
    "sample": ["{py} nanochat_gka.generate --run {run} --prompt {PROMPT} --stream {ARGS}"],
    "export": ["{py} nanochat_gka.export --run {run} --out {run}-export {ARGS}"],
    "eval-deit": [
        "{launch} deit_gka.evaluate --run {vision_run} --data {DATA} --results {BASE}/results.jsonl {ARGS}",
    ],
    "bench": [f"{{py}} runs.bench.{name} {{ARGS}}" for name in ("attention", "deit", "gpt", "report")],
    "tables": ["{py} runs.tables --base {BASE} {ARGS}"],
    "claims": ["cat docs/claims.md"],
    "report": ["{py} runs.report --base {BASE} --run {RUN} {shown} {ARGS}"],
    "study": ["{py} runs.study.train --data {packed} --runs {BASE}/study {ARGS}"],
    "site": [f"sh -c '{SITE_SOURCE}'", "{py} mkdocs build --strict {ARGS}"],
    "vendor": ["{system} patches/apply.py vendor"],
    "diff": ["{system} patches/apply.py apply", "{system} patches/apply.py diff"],
    "unpatch": ["{system} patches/apply.py reverse"],
    "test-patches": ["{py} pytest -rs -m 'upstream or not upstream' tests/patches {ARGS}"],
}
TRAIN = "{launch} {trainer} {ARGS}"
FETCH = "{py} nanochat_gka.corpus --source {CORPUS} --out {fetched}"
FINISH = "{system} -m runs.make finish-corpus {fetched} {documents} {SHARDS}"
DRAW = "{py} {draw} --out {BASE}/figures --demo {BASE}/demo --run {RUN} --model {MODEL} {shown} {ARGS}"
FOR_PATCHES = f"sh -c '{PYTHON} -m pip install --quiet -r patches/requirements.txt && touch {PATCHES_READY} || true'"
RECIPES = {  # the experiments that train language models
    "pretrain-d20": "runs.paper.gpt_d20_gka",
    "pretrain-d20-base": "runs.paper.gpt_d20_softmax",
    "pretrain-d20-best": "runs.study.gpt_d20_best",
    "pretrain-small": "runs.study.gpt_small",
}
NEEDS = {"tokenizer": ["data"], "tokenize": ["data", "tokenizer"], "study": ["tokenize"], "diff": ["vendor"]}
NEEDS.update({target: ["tokenize"] for target in RECIPES})
# A small vision model that learns digits in a minute or two, without the augmentation that large ones need.
SMALL_VISION = (
    "--device-type cpu --input-size 32 --model-kwargs embed_dim=64 depth=2 num_heads=2 --epochs 40 --batch-size 16 "
    "--lr 0.2 --repeated-aug 1 --mixup 0 --cutmix 0 --aa= --reprob 0 --hflip 0 --scale 0.8 1 --model-ema-decay 0.99 "
    "--eval-every 5 --warmup-epochs 0"
)
GIVE_DATA = (
    "Give DATA=folder with train/ and val/ (ImageNet as class folders, or webdataset tars) "
    'or DATA=hf:ILSVRC/imagenet-1k (after "hf auth login")'
)
HELP = """\
Settings, as NAME=value
  NGPU={NGPU} processes, DEPTH={DEPTH} layers (the demo has 4), SHARDS={SHARDS}, VOCAB={VOCAB}, SEQ={SEQ}
  NNODES=1 (machines of NGPU processes that meet at RDZV=host:port), RESTARTS=0 (after a crash)
  CORPUS={CORPUS} (fineweb, builtin, or a file or folder of .txt, .md, .jsonl, .json, .parquet)
  COLUMN=text (which column or field of your own files is the text), BASE={BASE} (outputs)
  RUN={RUN} (what the evaluations, sample and export take; figures: the demo's)
  DATA=folder of images with train/ and val/ (or hf:NAME, hf-stream:NAME, wds:FOLDER, digits)
  MODEL=any timm name, WANDB_MODE=disabled (offline, online)
  ENV_PYTHON=python of an environment of yours; .venv is then not made, and nothing is installed
  ARGS='flags for the command of the target': --dry-run shows what a training would be"""


def names(given):
    """The names in COMMANDS: every setting, and what is worked out from them; a list stands for several words."""
    setting = {**dict.fromkeys(TEXTS, ""), "PROMPT": "The", **DEFAULTS, **given}
    base, corpus, asked = setting["BASE"], setting["CORPUS"], given.get("NGPU", "")
    python = given.get("ENV_PYTHON", PYTHON)
    name = dataset(corpus, setting["SHARDS"])
    documents = corpus if reads_as_it_is(given) else f"{base}/corpus/{name}"
    whole = corpus != "fineweb" and setting.get("SPLIT_DOCUMENTS") == "no"  # FineWeb-Edu's documents always are
    packed = f"{base}/packed/{name}-{setting['VOCAB']}-{setting['SEQ']}" + ("-whole" if whole else "")
    # The rows of an evaluation are those that the run was trained on, unless others are named.
    named_rows = any(key in given for key in ("CORPUS", "SHARDS", "VOCAB", "SEQ"))
    return {
        **setting,
        "py": [python, "-m"],
        "launch": [python, *commands.launch("", max(1, int(asked or count_gpus())), torchrun_flags(given))[:-1]],
        "system": [setting["PYTHON"]],
        "pip": [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"],
        "shown": commands.flags(image=setting["IMAGE"], text=setting["TEXT"]),
        "ranks": asked if asked not in ("0", "1") else "",
        "demo_depth": given.get("DEPTH", ""),
        # Shards are fetched once, to corpus/fineweb, however many of them are read.
        "fetched": f"{base}/corpus/{corpus}" if corpus in MADE else documents,
        "documents": documents,
        "tokenizer": f"{base}/tokenizer/{name}-{setting['VOCAB']}",
        "split": "no" if whole else "",
        "packed": packed,
        "rows": packed if named_rows else "",
        "run": given.get("RUN", f"{base}/runs/d{setting['DEPTH']}-gka"),
        "base_run": given.get("RUN", f"{base}/runs/d{setting['DEPTH']}-softmax"),
        "vision_run": given.get("RUN", f"{base}/runs/{given.get('MODEL') or commands.vision_model('ti')}"),
    }


def expand(command, known):
    """A command as a line for the shell: names in braces become quoted words; a flag without a value is left out."""

    def replace(match):
        flag, word = match.groups()
        if word == "{ARGS}":
            return f"{flag or ''} {known['ARGS']}".lstrip()
        value = known[word[1:-1]] if re.fullmatch(r"\{\w+\}", word) else word.format(**known)
        if isinstance(value, list):
            return " ".join(map(shlex.quote, value)) + " "
        if not (flag and value):
            return shlex.quote(value) + " " if value else ""
        return f"{flag}{'=' if value.startswith('-') else ' '}{shlex.quote(value)} "

    return re.sub(r"(?:(--[\w-]+) )?([^ ]*\{\w+\}[^ ]*)(?: |$)", replace, command).rstrip(" ")


def chain(goals, given, look=False):
    """The lines that make runs for the targets that the user named, after what they need first; each target once.

    look: the commands are only shown, so nothing is checked that a run needs, such as a GPU. Raises Problem.
    """
    known, args, begun, lines = names(given), flags_of(given.get("ARGS", "")), [], []
    only_asks = is_dry_run(given.get("ARGS", ""))

    def need(target):
        if target == "setup" and "ENV_PYTHON" in given:
            return
        own = {**known, "ARGS": args if target in goals else ""}
        cleaned = target == "setup" and "clean" in begun  # it deletes the environment that is there
        if target in begun or (is_done(target, own) and not cleaned):
            return
        begun.append(target)
        if target == "clean" and "setup" in begun:
            begun.remove("setup")
        found = commands_of(target, given, own)
        if not look:
            check(target, given)
        for other in [] if only_asks else NEEDS.get(target, []):
            need(other)
        for command, more in found:
            line = expand(command, {**own, **more})
            if line.startswith(PYTHON) or command == FOR_PATCHES:
                need("setup")
            lines.append(line)

    check_environment(goals, given, look)
    for goal in goals:
        need(goal)
    return lines


def is_dry_run(flags):
    """Whether a trainer is only asked what a training would be; it takes - and _ alike."""
    return "--dry-run" in [word.replace("_", "-") for word in shlex.split(flags)]


def is_done(target, known):
    """Whether a step has made its file. Those of your own text always look at it: it may have changed."""
    if target == "setup":
        return not is_stale(READY, "requirements.txt", "pyproject.toml")
    made = {"data": COMPLETE, "tokenizer": "tokenizer.json", "tokenize": "manifest.json"}.get(target)
    folder = {"data": "documents", "tokenizer": "tokenizer", "tokenize": "packed"}.get(target)
    asked = known["ARGS"] and target != "data"  # which the step refuses, or does
    return bool(made and known["CORPUS"] in MADE and not asked and os.path.exists(f"{known[folder]}/{made}"))


def commands_of(target, given, known):
    """The commands of a target, each with names of its own. Raises Problem if there is no such target."""
    places = known["BASE"], known["WANDB_MODE"]
    if target in COMMANDS:
        first = [FOR_PATCHES] if target == "test-patches" and needs_packages(given) else []
        return [(command, {}) for command in first + COMMANDS[target]]
    if target == "data":
        fetch = {"fineweb": [FETCH + " --num-shards {SHARDS} {ARGS}", FINISH], "builtin": [FETCH + " {ARGS}", FINISH]}
        own = [] if known["documents"] == known["CORPUS"] else [FETCH + " --text-column {COLUMN} {ARGS}"]
        return [(command, {}) for command in fetch.get(known["CORPUS"], own)]
    if target == "figures":
        check_figures(given)
        return [(DRAW, {"draw": module}) for module in draw_commands(given, known["BASE"])]
    if target in RECIPES:
        recipe = importlib.import_module(RECIPES[target]).RECIPE
        own = commands.language(recipe, known["packed"], known["DEPTH"], *places)
        return [(TRAIN, {"trainer": ["nanochat_gka.train", *own]})]
    if target == "ablate-projections":
        models = commands.ablation()
        last = [] if is_dry_run(known["ARGS"]) else [("{py} runs.paper.ablation --runs {BASE}/runs", {})]
    elif target.startswith("train-deit-"):
        models, last = [(given.get("MODEL") or commands.vision_model(target[len("train-deit-") :]), [])], []
    else:
        raise Problem(f"there is no target {target}; make help lists them")
    trainers = [["deit_gka.train", *commands.vision(model, known["DATA"], *places), *own] for model, own in models]
    return [(TRAIN, {"trainer": trainer}) for trainer in trainers] + last


def needs_packages(given):
    """Whether the tests of the patches can have upstream's sources, and lack the packages that these need."""
    has_upstream = "NANOCHAT_SRC" in given or os.path.exists("vendor/nanochat")
    return has_upstream and "ENV_PYTHON" not in given and is_stale(PATCHES_READY, "patches/requirements.txt")


def check(target, given):
    """Raises Problem for what the user must mend before the target can run."""
    if target == "setup" and sys.version_info < (3, 10):
        raise Problem("Python 3.10 or newer is needed; set PYTHON=python3.x")
    if target == "data":
        check_corpus(given)
    elif target in RECIPES and target != "pretrain-small":
        check_gpu(given)
    elif target == "figures" and not os.path.exists(given.get("RUN", ".")):
        raise Problem(f"RUN={given['RUN']}: there is no such folder")
    elif target.startswith("train-deit-") or target == "ablate-projections":
        check_images(given)


def check_environment(goals, given, look):
    """Raises Problem if ENV_PYTHON is no Python, or is to be set up: nothing is installed in the user's environment."""
    python = given.get("ENV_PYTHON")
    if python and "setup" in goals:
        raise Problem(f"setup makes .venv, for which ENV_PYTHON={python} stands; install there: {python} {INSTALL}")
    if python and not look and not shutil.which(python):
        raise Problem(f"ENV_PYTHON={python}: there is no such program; give the python of an environment that has gka")


def is_stale(made, *sources):
    """Whether a file is missing, or older than one that it is made of."""
    return not os.path.exists(made) or any(os.path.getmtime(made) < os.path.getmtime(source) for source in sources)


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


def reads_as_it_is(given):
    """Whether your own corpus is nanochat's shards, or one that nanochat_gka.corpus made: its note is there."""
    corpus = given.get("CORPUS", DEFAULTS["CORPUS"])
    files = [path.name for path in Path(corpus).glob("[!.]*.parquet")] if corpus not in MADE else []
    shards = all(re.fullmatch(r"shard_\d{5}\.parquet", name) for name in files)
    return "COLUMN" not in given and len(files) > 1 and (shards or Path(corpus, "source.json").exists())


def finish_corpus(fetched, folder, count):
    """Link the first `count` of the fetched shards to the folder where just these are read, and mark it complete."""
    source, folder = Path(fetched), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if folder != source:
        for shard in sorted(source.glob("shard_*.parquet"))[: int(count)]:
            link = folder / shard.name
            if link.exists():
                link.unlink()
            os.link(str(shard), str(link))
        for note in source.glob("source.json"):  # by which packing knows FineWeb-Edu
            shutil.copy(str(note), str(folder / note.name))
    (folder / COMPLETE).touch()


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
        run = Path(given["RUN"])
        return [language if is_language(run) or (not run.exists() and "TEXT" in given) else vision]
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
    words = ["--standalone"] if nodes == "1" and restarts != "0" else []
    if nodes != "1":
        if not place:
            raise Problem(f"NNODES={nodes} needs RDZV=host:port, the same on every machine: one of them, a free port")
        match = re.fullmatch(r"(?:\w[\w.-]*|\[[\w.:]+\])(?::([0-9]+))?", place)
        if not match or not 0 < int(match[1] or 1) < 2**16:
            raise Problem(f"RDZV={place} must be host:port, the name or address of one of the machines and a free port")
        words = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-id", "gka", "--rdzv-endpoint", place]
    return words + (["--max-restarts", restarts] if restarts != "0" else [])


def has_device(given):
    """Whether there is a GPU, or the user asks for the CPU, or only what a training would be."""
    flags = given.get("ARGS", "")
    words = [word.replace("_", "-") for word in shlex.split(flags.replace("=", " "))]
    on_cpu = "--device-type cpu" in " ".join(words)
    return on_cpu or is_dry_run(flags) or count_gpus() > 0


def small(given, flags, **settings):
    """Words for the shell: a small run's settings and flags, in which what the user gave counts."""
    settings.update((name, given[name]) for name in settings if name in given)
    settings["ARGS"] = " ".join(filter(None, [flags, given.get("ARGS", "")]))
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items() if value)


def check_gpu(given):
    """Raises Problem if a language model would train on a CPU unasked."""
    if not has_device(given):
        depth = given.get("DEPTH", DEFAULTS["DEPTH"])
        start = f"no GPU is visible, and a depth-{depth} run would take years without one."
        settings = {name: given[name] for name in ("CORPUS", "COLUMN", "VOCAB", "SEQ", "BASE") if name in given}
        words = f"make pretrain-small {small(given, '', **settings)}".rstrip()
        raise Problem(f'{start} Run "make demo", or train a small one on a CPU: {words}')


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
    if corpus not in MADE and not os.path.exists(corpus):
        raise Problem(f"CORPUS={corpus} is neither fineweb nor builtin nor a folder or file")


def show_help(makefile, given):
    """Print the Makefile's targets in its groups, and the settings."""
    for group, targets, description in re.findall(
        r"^(?:## (.*)|([a-z0-9 -]+): launch  ## (.*))$", makefile, re.MULTILINE
    ):
        print(group or f"  {targets:<25} {description}")
    settings = {**DEFAULTS, "NGPU": count_gpus(), **given}
    print(HELP.format(**{"RUN": names(given)["run"], **settings}))


def run(lines):
    """Show and run commands. Ctrl-C, SIGTERM and a closed terminal let the one that runs save, and end them all."""
    children, heard = [], []

    def stop(number, frame=None):
        heard.append(number)
        if children and number != signal.SIGINT:  # which the terminal has sent to the child too
            children[-1].send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    for line in lines:
        print(line, flush=True)
        words = ["sh", "-c", "exec " + line]
        if heard:  # between two commands
            sys.exit(128 + heard[0])
        if line is lines[-1]:
            os.execvp(words[0], words)
        children.append(subprocess.Popen(words))
        if heard:  # while it was started: it may not have been passed on
            stop(heard[0])
        code = children[-1].wait()
        if heard or code:
            sys.exit(128 + heard[0] if heard else code if code > 0 else 128 - code)


def main(words):
    """Run the targets in GOALS, or a step of one that `words` name."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `make help | head` ends quietly
    sys.stdout.reconfigure(errors="surrogateescape")  # a name that is not text comes out as it came in
    if words[:1] == ["finish-corpus"]:
        finish_corpus(*words[1:])
        return
    if words:
        print(__doc__.strip())
        return
    letters = os.environ.get("MAKEFLAGS", "").split(" ")[0]  # make's own flags that are one letter, or nothing
    look = letters.isalpha() and not {"n", "q", "t"}.isdisjoint(letters)
    goals = os.environ.pop("GOALS", "").split()  # a make that a command calls has goals of its own
    try:
        given = read({name: os.environ.get(name, "") for name in os.environ.get("SETTINGS", "").split()})
        for goal in goals:
            given = {**OF_TARGET.get(goal, {}), **given}
        lines = chain([goal for goal in goals if goal != "help"], given, look)
        if "help" in goals:
            show_help(Path("Makefile").read_text(), given)
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    if look:
        print("".join(f"{line}\n" for line in lines), end="")
    elif lines:
        run(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
