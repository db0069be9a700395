"""Seeds, thread count and the GPU marker for every test."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on CPU tensors

settings.register_profile("gka", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gka")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def kernel_resources(request, tmp_path_factory):
    """`python -m runs.kernel_resources`, at work behind the other tests from the start: it takes a core for two minutes. None if nobody asks."""
    if not any(item.path.name == "test_triton_compile.py" for item in request.session.items):
        yield None
        return
    folder = tmp_path_factory.mktemp("kernel_resources")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = ["nice", sys.executable, "-m", "runs.kernel_resources", "--processes", "1"]
    with open(folder / "out", "w") as out, open(folder / "err", "w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=Path(__file__).parents[1])
    yield process, folder
    process.terminate()
    process.wait()


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """A folder with corpus/, tokenizer/ and packed/, made by the real commands' functions."""
    import tiny

    from nanochat_gka import pack, tokenizer

    root = tmp_path_factory.mktemp("tiny")
    tiny.write_corpus(root / "corpus")
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    pack.main(pack.PackConfig(corpus=root / "corpus", tokenizer=root / "tokenizer", out=root / "packed", sequence_len=tiny.SEQUENCE_LEN, workers=1))
    return root
