"""Seeds, thread count and the GPU marker for every test."""

import gc
import os
import signal
from pathlib import Path

# A shell's background job ignores SIGINT, and nohup's SIGHUP; the commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for each worker, and for the processes it starts

import pytest
import torch
from hypothesis import settings

import processes

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on CPU tensors

settings.register_profile("gka", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gka")


def pytest_sessionstart(session):
    """Compile the CPU kernel if need be: commands under test would print that they do."""
    from gka.impl.cpu import build

    os.environ.setdefault(build.FOLDER, str(build.cache_folder()))  # for commands with a HOME of their own
    build.obstacle()
    if "PYTEST_XDIST_WORKER" in os.environ and session.config.rootpath == Path(__file__).parents[1]:
        processes.server()  # before a test makes a command's function start one that lacks the libraries


def pytest_collection_finish():
    """The garbage collector need not look through what is imported again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would start files by their number of tests


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(threads):
    """One thread for small work: several wait for one another on a busy machine."""
    threads(1)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: -item.path.stat().st_size)  # long files first, so that workers end together
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory):
    """A folder with corpus/ and tokenizer/, made by the real command's function."""
    import tiny
    from nanochat_gka.tokenizer import TokenizerConfig, main

    root = tmp_path_factory.mktemp("tiny")
    main(TokenizerConfig(corpus=tiny.write_corpus(root / "corpus"), out=root / "tokenizer", vocab_size=300))
    return root


@pytest.fixture(scope="session")
def packed(tokenized):
    """The same folder, with packed/ too, nanochat's rows."""
    from nanochat_gka.pack import main
    from tiny_pack import config

    processes.server()  # before packing starts one that lacks the libraries
    main(config(tokenized, tokenized / "packed"))
    return tokenized


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """78 training JPEGs in 3 classes, 27 of validation."""
    import tiny_vision

    processes.server()  # before a test starts one that lacks the libraries
    return tiny_vision.write_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def figures(monkeypatch):
    """File name -> the figure that would be written there; nothing is rendered."""
    from matplotlib.figure import Figure

    drawn = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: drawn.update({path.name: self}))
    return drawn


@pytest.fixture
def no_compiler():
    """torch.compile finds no C++ compiler in this process."""
    from torch._inductor import config

    torch._dynamo.reset()  # what is compiled needs no compiler
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield
