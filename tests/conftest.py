"""Seeds, thread count and the GPU marker for every test."""

import os
import signal

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as for a shell's background job; the commands under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core for each worker, and for the processes it starts

import pytest
import torch
from hypothesis import settings

import watchdog

watchdog.start()
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on CPU tensors

settings.register_profile("gka", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("gka")


def pytest_sessionstart():
    """Compile the CPU kernel if need be: a command under test that did it would say so among its errors."""
    from gka.impl.cpu import build

    os.environ.setdefault(build.FOLDER, str(build.cache_folder()))  # for commands with a HOME of their own
    build.obstacle()


# Those that take 10 s or more start first: no worker shall be left alone with one at the end.
LONG_FILES = {"test_triton_compile.py", "test_train.py", "test_resume.py", "test_study.py", "test_workers.py"}
LONG_FILES |= {"test_explore.py", "test_report.py", "test_cpu_build.py", "test_bench_commands.py", "test_cut_off.py"}
LONG_FILES |= {"test_train_mistakes.py", "test_corpus.py", "test_generate.py", "test_pack_interrupted.py"}


def pytest_configure(config):
    config.option.loadscopereorder = False  # xdist would start files by their number of tests


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tokenized(tmp_path_factory):
    """A folder with corpus/ and tokenizer/, made by the real command's function."""
    import tiny
    from nanochat_gka import tokenizer

    root = tmp_path_factory.mktemp("tiny")
    tiny.write_corpus(root / "corpus")
    tokenizer.main(tokenizer.TokenizerConfig(corpus=root / "corpus", out=root / "tokenizer", vocab_size=300))
    return root


@pytest.fixture(scope="session")
def packed(tokenized):
    """The same folder, with packed/ too."""
    import processes
    import tiny
    from nanochat_gka import pack

    root = tokenized
    processes.server()  # before packing starts one that lacks the libraries
    pack.main(
        pack.PackConfig(
            corpus=root / "corpus",
            tokenizer=root / "tokenizer",
            out=root / "packed",
            sequence_len=tiny.SEQUENCE_LEN,
            workers=1,
        )
    )
    return root


@pytest.fixture
def no_compiler():
    """torch.compile finds no C++ compiler in this process."""
    from torch._inductor import config

    torch._dynamo.reset()  # what is compiled needs no compiler
    with config.patch({"cpp.cxx": (None, "no-such-compiler")}):
        yield


@pytest.fixture(scope="module")  # Playwright keeps an event loop running in its thread, which other tests must not meet
def browser():
    """A headless Chromium; see `tests/support/browser.py`."""
    import browser as support

    with support.launch() as chromium:
        yield chromium
