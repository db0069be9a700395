"""The Python of every page runs as printed, block after block, where a reader would run it."""

import importlib.util

import pytest

from nanochat_gka import export
from sources import ROOT, page_blocks, tracked

NEEDS = {
    "docs/use-in-your-model.md": ("transformers",),
    "docs/hugging-face.md": ("transformers", "peft", "onnxruntime", "onnxscript"),
}
PRINTS = {"docs/figures.md": "softmax torch.Size([2, 6, 261, 261]) None"}
EXAMPLES = {str(path): blocks for path in tracked(".md") if (blocks := page_blocks(ROOT / path, "python"))}


@pytest.fixture(scope="module")
def checkout(trained, tmp_path_factory):
    """A folder with the files that the pages assume: a run of make pretrain-small (here a tiny one) and its exports."""
    root, (run, _) = tmp_path_factory.mktemp("checkout"), trained
    runs = root / "out/runs"
    runs.mkdir(parents=True)
    (runs / "d4-preset").symlink_to(run)
    export.main(export.ExportConfig(run=run, out=runs / "d4-preset-export"))
    if not any(importlib.util.find_spec(name) is None for name in NEEDS["docs/hugging-face.md"]):
        export.main(export.ExportConfig(run=run, out=root / "out/d4-gka", onnx=True))
    return root


def test_pages_have_examples():
    names = ("use-in-your-model", "train-text", "train-images", "figures", "hugging-face")
    assert {"README.md", *(f"docs/{name}.md" for name in names)} <= set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, checkout, monkeypatch, capsys):
    for needed in NEEDS.get(name, ()):
        pytest.importorskip(needed, reason=f"needs {needed}: pip install -e '.[hf,onnx]'")
    monkeypatch.chdir(checkout)
    known: dict[str, object] = {}
    for block in EXAMPLES[name]:
        exec(compile(block, name, "exec"), known)
    assert PRINTS.get(name, "") in capsys.readouterr().out
