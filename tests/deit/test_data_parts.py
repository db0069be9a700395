"""What a run was trained on is what evaluating and continuing it read: the parts of its data too."""

import json

import pytest

from deit_gka import evaluate
from deit_gka import train as training
from deit_gka.training.config import TrainConfig
from image_files import png, write
from tiny_vision import encoded, photo
from trainkit_gka.cli import run
from vision_runs import flags, in_process, train

datasets = pytest.importorskip("datasets")
PARTS = ["--data-config", "full", "--val-split", "test", "--target-key", "fine", "--input-key", "picture"]
SHORT = ["--epochs", 1, "--warmup-epochs", 0, "--num-workers", 0]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Two configurations with train and test splits, two columns of images and two of labels."""
    folder = tmp_path_factory.mktemp("hub")
    kinds = {"coarse": datasets.ClassLabel(names=["x", "y"]), "fine": datasets.ClassLabel(names=["a", "b", "c"])}
    features = datasets.Features(picture=datasets.Image(), mask=datasets.Image(), **kinds)
    lines, sizes = ["---", "configs:"], ["dataset_info:"]
    for config, count in (("small", 12), ("full", 24)):
        sizes += [f"- config_name: {config}", "  splits:"]
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, size in (("train", count), ("test", 9)):
            pictures = [{"bytes": encoded(photo(number, number)), "path": None} for number in range(size)]
            columns = {"coarse": [n % 2 for n in range(size)], "fine": [n % 3 for n in range(size)]}
            rows = datasets.Dataset.from_dict({"picture": pictures, "mask": pictures, **columns}, features=features)
            (folder / config).mkdir(exist_ok=True)
            rows.to_parquet(folder / config / f"{split}.parquet")
            lines += [f"  - split: {split}", f"    path: {config}/{split}.parquet"]
            sizes += [f"  - {{name: {split}, num_bytes: 1, num_examples: {size}}}"]  # a stream's length
    (folder / "README.md").write_text("\n".join([*lines, *sizes, "---", ""]))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
        patch.setenv("HF_DATASETS_CACHE", str(cache))
        bars = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()  # on stderr, where a mistake is one line
        yield
        if bars:
            datasets.enable_progress_bars()


@pytest.mark.parametrize("form", ["hf", "hf-stream"])
def test_a_run_keeps_the_parts_of_its_data(form, hub, tmp_path, capsys):
    data = f"{form}:{hub}"
    more = [*PARTS, *SHORT, "--repeated-aug", 1]
    train(data, tmp_path, *more, "--stop-after", 1)
    named = dict(zip((flag[2:].replace("-", "_") for flag in PARTS[::2]), PARTS[1::2]))
    state = json.loads((tmp_path / "run/checkpoints/step_00000001/state.json").read_text())
    assert (state["trained_on"], state["parts"], state["classes"]) == (data, named, ["a", "b", "c"])
    argv = [*flags(data, tmp_path, *more), "--target-key", "coarse"]
    message = in_process(training.main, TrainConfig, *argv, capsys=capsys)
    assert "--target-key is coarse but the run in" in message and "has fine; use its value" in message
    assert "resuming at update 1 of 2" in train(data, tmp_path, *more).stdout
    finished = json.loads((tmp_path / "results.jsonl").read_text())
    assert named.items() <= finished["config"].items()
    results = tmp_path / "eval.jsonl"
    argv = ["--run", tmp_path / "run", "--device-type", "cpu", "--num-workers", 0, "--results", results]
    run(evaluate.main, evaluate.EvaluateConfig, list(map(str, argv)))
    found = json.loads(results.read_text())
    assert found["config"]["data"] == data and named.items() <= found["config"].items()
    assert {key: found["metrics"]["model"][key] for key in ("top1", "images")} == {
        key: finished["metrics"][key] for key in ("top1", "images")
    }
    assert found["metrics"]["model"]["preprocessing"] == "resize 18, centre crop 16, bicubic"
    assert "resize 18, centre crop 16, bicubic; " in capsys.readouterr().out
    run(evaluate.main, evaluate.EvaluateConfig, list(map(str, [*argv, "--val-split", "train"])))
    assert json.loads(results.read_text().splitlines()[-1])["metrics"]["model"]["images"] == 24


def test_the_runs_own_data_named_again_is_read_as_it_was_trained_on(tmp_path, capsys):
    """Of two columns of labels, the run's; other data has parts of its own, and those of the run are named."""
    number = datasets.Value("int64")
    features = datasets.Features(image=datasets.Image(), colour=number, label=number)
    for name in ("own", "other"):
        for split, size in (("train", 24), ("validation", 8)):
            pictures = [{"bytes": png(200 * (place % 2)), "path": None} for place in range(size)]
            colours = [place % 2 for place in range(size)]
            columns = {"image": pictures, "colour": colours, "label": [1 - colour for colour in colours]}
            (tmp_path / name).mkdir(exist_ok=True)
            rows = datasets.Dataset.from_dict(columns, features=features)
            rows.to_parquet(tmp_path / name / f"{split}.parquet")
    own = f"hf:{tmp_path / 'own'}"
    train(own, tmp_path, *SHORT, "--target-key", "colour")
    results = tmp_path / "eval.jsonl"

    def evaluated(*more):
        argv = ["--run", tmp_path / "run", "--device-type", "cpu", "--num-workers", 0, "--results", results, *more]
        run(evaluate.main, evaluate.EvaluateConfig, list(map(str, argv)))
        found = json.loads(results.read_text().splitlines()[-1])
        return found["metrics"]["model"]["top1"], found["config"].get("target_key"), capsys.readouterr().err

    top1, key, said = evaluated()
    assert evaluated("--data", own) == (top1, key, said) and key == "colour" and "warning" not in said
    assert evaluated("--data", own, "--target-key", "label")[:2] == (100 - top1, "label")
    top1_of_other, key, said = evaluated("--data", f"hf:{tmp_path / 'other'}")
    assert (top1_of_other, key) == (100 - top1, None)
    assert said.count("\n") == 1 and said.startswith(f"warning: hf:{tmp_path / 'other'} is not the data that ")
    assert "its --target-key colour is not taken over" in said
    assert evaluated("--data", f"hf:{tmp_path / 'other'}", "--target-key", "colour") == (top1, "colour", "")


def test_an_evaluation_says_what_it_does_not_use(uninterrupted, pictures, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir()
        for folder in (pictures / split).iterdir():
            (tmp_path / "data" / split / folder.name).symlink_to(folder)
    write(tmp_path / "data/val/IMG_1.HEIC")
    argv = ["--run", uninterrupted / "run", "--data", tmp_path / "data", "--device-type", "cpu", "--num-workers", 0]
    argv += ["--results", tmp_path / "eval.jsonl"]
    run(evaluate.main, evaluate.EvaluateConfig, list(map(str, argv)))
    assert "warning: val: not used: 1 .heic; convert .heic" in capsys.readouterr().err
