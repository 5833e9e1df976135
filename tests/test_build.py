"""What is built and installed: symbols of the native library, a pure-Python wheel, `info`, doctests, names of files."""

import doctest
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import specdec_kernels as sk
from specdec_kernels import _backends, _schemas

ROOT = pathlib.Path(__file__).parents[1]


def run(*command, cwd=ROOT, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(c) for c in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def library() -> pathlib.Path:
    found = sorted(pathlib.Path(sk.__file__).parent.glob("_cpu*.so"))
    if not found:
        pytest.skip("the native library is not built")
    return found[0]


def test_native_is_built_where_it_can_be():
    """Otherwise every native test would be skipped without a word."""
    if os.environ.get("SPECDEC_BUILD_CPU") == "0" or not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no compiler, or a pure-Python installation is wanted")
    assert _backends.NATIVE_MISSING in (None, "SPECDEC_SKIP_NATIVE=1")


def undefined_symbols(path) -> list[str]:
    done = run("nm", "-D", "--undefined-only", path)
    assert done.returncode == 0, done.stderr
    return [line.split()[-1].split("@")[0] for line in done.stdout.splitlines()]


def beyond_the_shims(symbols) -> list[str]:
    """Symbols that belong to torch but not to its stable C shims, whose names are aoti_torch_* and torch_*; and Python's."""
    mangled = re.compile(r"_Z\w*?(2at|3c10|5torch|6caffe2)")
    return [s for s in symbols if mangled.match(s) or re.match(r"_?Py[A-Z_]", s) or re.match(r"(THP|mkl|omp_|GOMP)", s)]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_library_uses_only_the_stable_shims():
    symbols = undefined_symbols(library())
    assert any(s.startswith(("aoti_torch_", "torch_")) for s in symbols)
    assert beyond_the_shims(symbols) == []


def test_symbol_check_sees_what_it_must():
    bad = [
        "_ZN3c106detail14torchCheckFailEPKcS2_jS2_",
        "_ZN2at4_ops5empty4callE",
        "_ZNK5torch8autograd4NodeE",
        "PyObject_Call",
    ]
    good = ["aoti_torch_get_dtype", "torch_parallel_for", "_ZSt4cerr", "_ZNSt6localeC1Ev", "memcpy", "_Znwm"]
    assert beyond_the_shims(bad + good) == bad


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_library_exports_nothing_but_torch_needs():
    """Two builds must be able to live in one process: no kernel of ours is a global symbol."""
    done = run("nm", "-D", "--defined-only", "-C", library())
    ours = [line for line in done.stdout.splitlines() if "specdec" in line.lower()]
    assert ours == []


@pytest.fixture(scope="session")
def pure_wheel(tmp_path_factory) -> pathlib.Path:
    """A wheel built without the native library, from a copy of the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("specdec_kernels", "python_ref", "csrc", "tests", "bench"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    done = run(sys.executable, "-m", "pip", "wheel", *flags, "-w", out, source, cwd=out, SPECDEC_BUILD_CPU="0")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(pure_wheel, tmp_path_factory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("site")
    flags = ["--no-deps", "--no-index", "--disable-pip-version-check", "--target", target]
    done = run(sys.executable, "-m", "pip", "install", *flags, pure_wheel, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_wheel_contents(pure_wheel):
    """The oracle under a name that cannot collide; tests, bench and python_ref stay out; every module of the package is in."""
    names = zipfile.ZipFile(pure_wheel).namelist()
    tops = {n.split("/")[0] for n in names if ".dist-info" not in n}
    assert tops == {"specdec_kernels", "specdec_kernels_ref"}
    for package, installed_as in (("specdec_kernels", "specdec_kernels"), ("python_ref", "specdec_kernels_ref")):
        for path in (ROOT / package).rglob("*.py"):
            assert f"{installed_as}/{path.relative_to(ROOT / package).as_posix()}" in names


PURE = """
import sys, pathlib, torch, specdec_kernels as sk, specdec_kernels_ref as ref
assert pathlib.Path(sk.__file__).is_relative_to(sys.argv[1]), sk.__file__
logits = torch.tensor([[0.0, 9.0, 0.0], [0.0, 0.0, 9.0], [9.0, 0.0, 0.0]])
call = (logits, torch.tensor([1, 0]), torch.tensor([0, 2], dtype=torch.int32), sk.SamplingTensors.create(0.0))
print(sk.verify_chain(*call).tokens.tolist(), ref.verify_chain(*call).tokens.tolist())
"""


def test_pure_python_install(installed):
    """Without a compiler the package installs, imports, runs on plain torch and says so."""
    done = run(sys.executable, "-c", PURE, installed, cwd=installed, PYTHONPATH=str(installed))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[1, 2, -1]] [[1, 2, -1]]"
    assert done.stderr.count("the extension was not built") == 1
    info = [sys.executable, "-m", "specdec_kernels", "info"]
    done = run(*info, cwd=installed, PYTHONPATH=str(installed), TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    report = json.loads(done.stdout)
    native = report["backends"]["native (CPU)"]
    assert not native["available"] and native["reason"].startswith("the extension was not built; build it")
    assert "TRITON_INTERPRET=1" in report["backends"]["triton"]["reason"]
    assert report["ops"] == {op: ["eager"] for op in _schemas.SCHEMAS}


def test_library_that_does_not_load(installed, tmp_path):
    """A library of another torch or machine: the import works, the reason is told."""
    broken = tmp_path / "site"
    shutil.copytree(installed, broken)
    (broken / "specdec_kernels" / "_cpu.so").write_bytes(b"not a library")
    done = run(sys.executable, "-c", PURE, broken, cwd=broken, PYTHONPATH=str(broken))
    assert done.returncode == 0, done.stderr
    assert "_cpu.so does not load" in done.stderr


def test_info_command():
    done = run(sys.executable, "-m", "specdec_kernels")
    report = json.loads(done.stdout)
    assert report["specdec_kernels"] == sk.__version__
    assert set(report["ops"]) == set(_schemas.SCHEMAS)
    assert run(sys.executable, "-m", "specdec_kernels", "nonsense").returncode == 2


DOCTESTS = (
    "params", "nucleus", "sample", "filter_probs", "verify_chain", "verify_tree", "build_tree", "trees", "schedule_lengths",
    "draft_vocab", "lossy", "status", "kv_rollback", "kv_append_slots", "kv_evict", "kv_compact", "kv_copy_pages",
    "paged_kv_cache", "state_select", "markov_step",
)  # fmt: skip


@pytest.mark.parametrize("name", DOCTESTS)
def test_doctests(name):
    module = importlib.import_module(f"specdec_kernels.{name}")
    import torch

    result = doctest.testmod(module, extraglobs={"torch": torch, **{n: getattr(sk, n) for n in sk.__all__}})
    assert result.attempted > 0 and result.failed == 0


@pytest.mark.parametrize("op", _schemas.SCHEMAS)
def test_one_op_one_name(op):
    """`git ls-files '*<op>*'` shows an op in every layer."""
    expected = [
        f"csrc/cpu/{op}.cpp",
        f"specdec_kernels/{op}.py",
        f"specdec_kernels/eager/{op}.py",
        f"python_ref/{op}.py",
        f"tests/test_{op}.py",
    ]
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard").stdout.splitlines()
    if not listed:  # not a checkout
        listed = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file()]
    assert [e for e in expected if e not in listed] == []


def test_imports_point_one_way():
    """python_ref imports torch alone; the package imports neither it nor the tests."""
    imports = re.compile(r"^\s*(?:from|import)\s+(\.*[\w.]*)", re.M)
    for path in (ROOT / "python_ref").glob("*.py"):
        modules = {m.split(".")[0] for m in imports.findall(path.read_text()) if not m.startswith(".")}
        assert modules <= {"torch", "math", "typing", "dataclasses", "__future__"}, path
    for path in (ROOT / "specdec_kernels").rglob("*.py"):
        modules = {m.split(".")[0] for m in imports.findall(path.read_text())}
        assert not modules & {"python_ref", "specdec_kernels_ref", "tests", "bench"}, path
