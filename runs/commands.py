"""Words of the commands that train: for make, which has no environment yet, and for what starts them later.

The standard library alone, no newer Python than 3.8.
"""

from runs.settings import Problem

VISION_SIZES = {"ti": "tiny", "s": "small", "b": "base"}
# What a target calls a kind of attention -> the word for it in timm's names. Without one a target trains GKA.
VISION_KINDS = {"base": "", "vlt": "_vlt", "gka": "_gka"}
HYBRID = "GGGA"  # the ablation's fourth model, its kinds by layer


def flags(**values):
    """Flags and their values as words, joined where a value has a dash first; nothing for one without a value.

    True is a flag without a word.
    """
    words = []
    for name, value in values.items():
        flag, text = "--" + name.replace("_", "-"), str(value)
        if value is True:
            words.append(flag)
            continue
        words += [f"{flag}={text}"] if text.startswith("-") else [flag, text] if text else []
    return words


def launch(module, ranks=1, torchrun=()):
    """The words after `python` that run a module in `ranks` processes on this machine; torchrun: more of its flags.

    --standalone takes their place if there are none.
    """
    if ranks == 1 and not torchrun:
        return ["-m", module]
    # The last dashes keep torchrun from taking our --run for its --run-path.
    where = ["-m", "trainkit_gka.torchrun", *(torchrun or ["--standalone"]), "--nproc-per-node", str(ranks)]
    return [*where, "-m", "--", module]


def language(recipe, data, depth, base, wandb):
    """The trainer's flags for a language model; recipe: what the experiment is about, by flag."""
    return [*flags(data=data), *places(base, wandb), *flags(depth=depth, **recipe)]


def vision(model, data, base, wandb):
    """The trainer's flags for a vision model."""
    return [*flags(data=data), *places(base, wandb), *flags(model=model)]


def places(base, wandb):
    """The trainers' flags for where outputs go."""
    return flags(out=f"{base}/runs", results=f"{base}/results.jsonl", wandb=wandb)


def vision_model(name):
    """timm's name of the paper's model `name`, such as ti or s-vlt. Raises Problem."""
    size, _, kind = name.partition("-")
    if size not in VISION_SIZES or (kind or "gka") not in VISION_KINDS:
        known = f"{{{','.join(VISION_SIZES)}}}-{{{','.join(VISION_KINDS)}}}"
        raise Problem(f"there is train-deit-{known}, not train-deit-{name}")
    return f"deit_{VISION_SIZES[size]}{VISION_KINDS[kind or 'gka']}_patch16_224"


def ablation():
    """The models of the ablation, size Ti: (timm's name, more flags of the trainer) of every kind and of the hybrid."""
    models = [(vision_model(f"ti-{kind}"), []) for kind in VISION_KINDS]
    return [*models, (vision_model("ti"), flags(attention=HYBRID))]
