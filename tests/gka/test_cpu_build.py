"""Building the CPU kernel: once, into a folder that can be chosen, and without a compiler sdpa takes over."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import processes
from gka.impl.cpu import build
from sources import ROOT

needs_compiler = pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle()))


def begin(folder, output: Path, **variables) -> processes.Running:
    """Start a process that looks for the kernel, with the cache `folder`; it notes what it says in `output`."""
    environ = {name: value for name, value in os.environ.items() if name not in ("CXX", build.SWITCH)}
    places = {"PYTHONPATH": str(ROOT), build.FOLDER: str(folder), "OMP_NUM_THREADS": "1"}
    # None: a variable is not set.
    return processes.start("ask_cpu_kernel", folder=output, env={build.SWITCH: None, **environ, **places, **variables})


def ask(folder, **variables):
    """Two lines of what a process does that has not looked for the kernel yet, and what it says."""
    with tempfile.TemporaryDirectory() as output:
        done = begin(folder, Path(output), **variables).wait()
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def wrapper(folder, text: str):
    """A compiler that is a shell script."""
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def copier(folder, first: str = ""):
    """A compiler that copies the finished library in place of compiling, which takes seconds. It runs `first` first."""
    return wrapper(folder, f'{first}\nfor output; do :; done\ncp {build.library()._name} "$output"\n')


@needs_compiler
def test_two_processes_build_once_and_later_ones_load(tmp_path):
    """The compiler counts how often it links. What it built serves later processes that have another one or none."""
    count, cache = tmp_path / "runs", tmp_path / "cache"
    compiler = copier(tmp_path, f'case "$*" in *" -c "*) ;; *) echo run >> {count};; esac')
    (cache / "building-killed").mkdir(parents=True)  # of a build that was killed
    both = [begin(cache, tmp_path / f"output-{number}", CXX=compiler) for number in range(2)]
    ended = [process.wait() for process in both]
    assert [done.stdout for done in ended] == ["cpu 9\n"] * 2 and count.read_text() == "run\n"
    assert sum("compiling the CPU kernel, once" in done.stderr for done in ended) == 1
    for variables in (dict(CXX=compiler), dict(CXX=f"{compiler} -pipe"), dict(CXX="/nope/g++"), dict(PATH="/nowhere")):
        assert ask(cache, **variables) == (["cpu 9"], "") and count.read_text() == "run\n"
    assert len(list(cache.iterdir())) == 2  # the library and the lock: nothing half-made


LATIN = "printf 'in a.h:\\na.h:1: error: unit\\351 inconnue\\n' >&2; exit 3"
REFUSALS = [  # variables, or a compiler's script, and the reason
    (LATIN, "failed with exit code 3: a.h:1: error: "),
    (dict(PATH="/nowhere"), "no C++ compiler was found (CXX, g++, c++, clang++); install one, such as g++"),
    (dict(CXX="/nope/g++ -pipe"), "CXX=/nope/g++ -pipe names a compiler that is not there, /nope/g++"),
    (dict(CXX='g++ "'), 'CXX=g++ " is not a command: No closing quotation'),
    (dict(CXX="false"), "false failed with exit code 1: it said nothing"),
    ({build.SWITCH: "0"}, f"turned off by {build.SWITCH}=0"),  # which is not logged
]


@pytest.mark.parametrize("variables,reason", REFUSALS, ids=[reason[:30] for _, reason in REFUSALS])
def test_without_the_kernel_sdpa_takes_over_and_one_line_says_why(tmp_path, variables, reason):
    variables = dict(CXX=wrapper(tmp_path, f"{variables}\n")) if isinstance(variables, str) else variables
    lines, log = ask(tmp_path / "cache", **variables)
    assert lines[0] == "sdpa 9" and 'impl="cpu" is unavailable: ' in lines[1] and reason in "\n".join(lines)
    logged = build.SWITCH not in variables
    assert log.count('impl="auto" takes sdpa: ') == logged and (reason in log.splitlines()[-1] if logged else not log)
    assert not list(tmp_path.glob("cache/building-*"))


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
NEW = None  # a folder that is not there yet
FOLDERS = [(NEW, None, True), (0o755, None, True), (0o775, None, False), (0o1777, None, False)]


@needs_compiler
@pytest.mark.parametrize("variables", [{build.FOLDER: "/dev/null/cache"}, dict(HOME="/proc/none")], ids=str)
def test_without_a_folder_the_process_compiles_for_itself(tmp_path, monkeypatch, variables):
    """As in an image whose home folder does not exist or is read-only."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    places = {build.FOLDER: None, "XDG_CACHE_HOME": None, **variables}
    lines, log = ask(tmp_path, CXX=copier(tmp_path), **places)
    assert lines == ["cpu 9"] and not list(tmp_path.glob("gka-*"))
    assert str(*variables.values()) in log and f"{build.FOLDER} chooses another folder" in log


@needs_compiler
@pytest.mark.parametrize("mode,owner,private", [*FOLDERS, pytest.param(0o755, 54321, False, marks=AS_ROOT)])
def test_the_cache_is_a_folder_of_this_user_to_which_nobody_else_writes(tmp_path, monkeypatch, mode, owner, private):
    """Otherwise the process compiles into a temporary folder, says so in one line, and leaves nothing in either. A new
    folder is private whatever the umask.
    """
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    if mode is not NEW:
        cache.mkdir()
        cache.chmod(mode)
    if owner is not None:
        os.chown(cache, owner, owner)
    before = os.umask(0)
    lines, log = ask(cache, CXX=copier(tmp_path))
    os.umask(before)
    assert mode is not NEW or stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert lines == ["cpu 9"] and not list(temporary.iterdir())
    assert bool(list(cache.glob("*.so"))) == private != (f"may write to {cache}" in log)


@needs_compiler
@pytest.mark.parametrize("damage", [lambda text: b"damaged", lambda text: text[: len(text) // 2]], ids=["text", "half"])
def test_a_damaged_library_is_named_and_not_loaded(tmp_path, damage):
    """Reading behind the file's end would end the process. Nor is it built again: what damaged it may do so again."""
    cache, compiler = tmp_path / "cache", copier(tmp_path)
    assert ask(cache, CXX=f"{compiler} -pipe")[0] == ["cpu 9"]
    (path,) = cache.glob("*.so")
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    lines, _ = ask(cache, CXX=f"{compiler} -pipe")
    assert lines[0] == "sdpa 9" and f"{path} is damaged; remove it" in lines[1] and path.read_bytes() == before


@pytest.mark.parametrize("by", ["its time", "a signal"])
def test_a_compiler_that_hangs_is_ended_with_its_children(by, tmp_path, monkeypatch):
    """After its time, and at once where a signal ends the command that compiles."""
    script = f"sleep 600 & echo $! >> {tmp_path}/children\nwait\n"
    monkeypatch.setenv("CXX", wrapper(tmp_path, script))
    if by == "its time":
        monkeypatch.setattr(build, "TIMEOUT", 2)
        ended = pytest.raises(build.Unavailable, match=r"compiler did not finish in 2 seconds$")
    else:
        before, ended = signal.signal(signal.SIGALRM, signal.default_int_handler), pytest.raises(KeyboardInterrupt)
        signal.setitimer(signal.ITIMER_REAL, 2)
    began = time.monotonic()
    with ended:
        build._built("AVX2", tmp_path)
    assert time.monotonic() - began < 20
    if by == "a signal":
        signal.signal(signal.SIGALRM, before)
    children = list(map(int, (tmp_path / "children").read_text().split()))
    assert len(children) == len(list(build.SOURCE.glob("*.cpp"))) and not processes.still_there(children, 60)


def test_what_decides_the_library_is_in_its_name(monkeypatch, tmp_path):
    (tmp_path / "a.cpp").write_text("int a;")
    monkeypatch.setattr(build, "SOURCE", tmp_path)
    names = {build._digest(("-O3",)), build._digest(("-O2",))}
    (tmp_path / "a.cpp").write_text("int b;")
    assert len(names | {build._digest(("-O3",))}) == 3
    assert not any("native" in flag for flags in (build.FLAGS, *build.INSTRUCTIONS.values()) for flag in flags)


PLACES = {build.FOLDER: "here", "XDG_CACHE_HOME": "caches", "HOME": "home"}


@pytest.mark.parametrize("first,folder", zip((*PLACES, None), ("here", "caches/gka", "home/.cache/gka", None)))
def test_the_cache_folder_can_be_chosen(monkeypatch, tmp_path, first, folder):
    """By the first of three variables that is set. A user may have no home folder, as in a container."""
    names = list(PLACES)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name in names[names.index(first) :] if first else ():
        monkeypatch.setenv(name, str(tmp_path / PLACES[name]))
    if first:
        assert build.cache_folder() == tmp_path / folder
    elif build.obstacle() is None:
        used, library = [], Path(build.library()._name)
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
        monkeypatch.setattr(build, "_outcome", None)
        monkeypatch.setattr(build, "_built", lambda instructions, folder: used.append(folder) or library)
        assert build.obstacle() is None and used[0].parent == Path(tempfile.gettempdir())


def test_a_child_forked_while_a_thread_builds_does_not_wait_for_it():
    outcome = build.obstacle()
    with build._lock:
        assert processes.in_a_forked_child(lambda: build.obstacle() == outcome, timeout=20)


@needs_compiler
def test_a_struct_of_another_size_than_pythons_is_an_error(monkeypatch):
    size = build.structs.SIZE
    monkeypatch.setattr(build.structs, "SIZE", size + 8)
    monkeypatch.setattr(build, "_outcome", None)
    with pytest.raises(RuntimeError, match=f"GkaRequest has {size} bytes in the library and {size + 8} bytes in"):
        build.obstacle()


def with_avx2(*words) -> str:
    """What Python prints where torch is held to AVX2."""
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_compiler
def test_the_kernel_for_avx2_keeps_to_the_budget():
    code = "from gka.impl.cpu import build; from operator_cases import check; print(build.library()._name)\n"
    code += "for values in (False, True): check('cpu', (1, 63, 2, 20), causal=True, window=20, with_values=values)"
    assert Path(with_avx2("-c", code).strip()).name.startswith("gka-avx2-")


@pytest.mark.slow
@needs_compiler
def test_the_kernel_for_avx2_passes_the_tests_of_the_kernel():
    tests = [str(ROOT / f"tests/gka/test_cpu_{name}.py") for name in ("kernel", "decoding")]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    with_avx2(*command, "-k", "any_features or foreign_keys or every_form or number_of_threads")
