"""setup.py end to end, on a small project that has this one's build files and two sources of a few lines."""

import ast
import os
import shutil
import subprocess
import sys
import tarfile

import pytest
import torch

from tools import build_config
from tools.build_config import ROOT

BINDINGS = """\
#include <Python.h>
#if defined(FLUX_WITH_CUDA)
#define FLUX_NO_CUDA_REASON ""
int launch();
#else
int launch() { return 0; }
#endif
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() {
  PyObject* m = PyModule_Create(&module);
  PyModule_AddStringConstant(m, "no_cuda_reason", FLUX_NO_CUDA_REASON);
  PyModule_AddStringConstant(m, "torch_version", FLUX_TORCH_VERSION);
  PyModule_AddIntConstant(m, "launched", launch());
  return m;
}
"""

KERNEL = """\
#include <cutlass/version.h>
__global__ void kernel() {}
int launch() { return CUTLASS_MAJOR; }
"""


@pytest.fixture
def project(tmp_path):
    for name in ("tools", "third_party"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").touch()
    for folder in ("csrc/kernels", "flux_ops"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "flux_ops" / "__init__.py").touch()
    shutil.copy(ROOT / "flux_ops" / "version.py", tmp_path / "flux_ops")
    (tmp_path / "csrc" / "bindings.cpp").write_text(BINDINGS)
    return tmp_path


def build(project, **env):
    """Runs `setup.py build_ext --inplace`; a value of None unsets a variable."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FLUX_", "CUTLASS_", "TORCH_CUDA_"))}
    clean.update(env)
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=project, env=clean, capture_output=True, text=True, timeout=110)


def imported(project):
    """The attributes of the module that was built, read by a Python that has loaded torch as the package does."""
    names = "no_cuda_reason", "torch_version", "launched"
    program = f"import torch; from flux_ops import _C; print([getattr(_C, name) for name in {names}])"
    result = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return dict(zip(names, ast.literal_eval(result.stdout), strict=True))


def last_line(result):
    return result.stderr.strip().splitlines()[-1]


def test_without_nvcc_the_cpu_part_is_built_and_the_module_knows_why(project):
    result = build(project, CUDA_HOME="/no where")
    assert result.returncode == 0, result.stderr
    reason = "CUDA_HOME=/no where has no bin/nvcc: set it to the folder of a CUDA toolkit"
    assert f"without CUDA kernels: {reason}." in result.stdout
    module = imported(project)
    assert module["no_cuda_reason"] == reason
    assert module["torch_version"] == torch.__version__


def test_what_can_not_be_built_is_one_line(project):
    result = build(project, FLUX_BUILD_CUDA="1", CUDA_HOME="/nowhere")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1, result.stderr
    for word in ("flux_ops: error: FLUX_BUILD_CUDA=1", "CUDA_HOME=/nowhere"):
        assert word in last_line(result)


def test_torch_missing(project):
    (project / "torch.py").write_text("raise ImportError('No module named torch')")
    result = build(project)
    assert result.returncode == 1
    assert "building needs torch 2.11 to 2.14 in" in last_line(result)


def test_build_after_a_failed_one(project):
    source = project / "csrc" / "bindings.cpp"
    source.write_text("int f() { return undeclared; }\n")
    failed = build(project, FLUX_BUILD_CUDA="0")
    assert failed.returncode == 1
    assert "undeclared" in failed.stdout
    assert str(project / "build" / "cpu.log") in last_line(failed)
    source.write_text(BINDINGS)
    assert build(project, FLUX_BUILD_CUDA="0").returncode == 0
    assert "every object is up to date" in build(project, FLUX_BUILD_CUDA="0").stdout


class TestWithACompiler:
    @pytest.fixture(autouse=True)
    def needs_all(self):
        p = build_config.probe(os.environ, torch.__version__, torch.version.cuda)
        if missing := build_config.missing_for_cuda(p):
            pytest.skip(missing)

    def test_kernels_are_for_sm_90a_whatever_the_environment_says(self, project):
        (project / "csrc" / "kernels" / "k.cu").write_text(KERNEL)
        result = build(project, FLUX_BUILD_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0")
        assert result.returncode == 0, result.stdout + result.stderr
        assert "csrc/kernels/k.cu" in result.stdout
        log = (project / "build" / "cuda.log").read_text()
        assert "nvcc_checked: 1 kernels" in log
        assert "sm_90a" in log
        assert "sm_80" not in log
        assert imported(project)["launched"] == 4  # the major version of CUTLASS


def test_sdist_has_all_that_a_build_reads(tmp_path):
    pytest.importorskip("build")
    options = ["--sdist", "--no-isolation", "--skip-dependency-check", "--outdir", tmp_path]
    command = [sys.executable, "-m", "build", *options, ROOT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "third_party/cutlass.py"}
    for folder, pattern in (("csrc", "*.*"), ("tools", "*.py"), ("flux_ops", "*.py")):
        wanted |= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}
    assert wanted <= files, sorted(wanted - files)
    assert not [name for name in files if name.endswith((".so", ".o", ".pyc"))]


def test_data_of_the_package_is_installed(project):
    """The tuned choices and the benchmark's shapes, from a build and in the source archive."""
    shutil.copy(ROOT / "MANIFEST.in", project)
    data = ("flux_ops/tuner/caches/h100.json", "flux_ops/bench/shapes.json")
    for file in data:
        (project / file).parent.mkdir(parents=True)
        (project / file).write_text("{}")
    for package in ("tuner", "bench"):
        (project / "flux_ops" / package / "__init__.py").touch()
    for command in ("build_py", "sdist"):
        done = subprocess.run(
            [sys.executable, "setup.py", "--quiet", command], cwd=project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (archive,) = project.glob("dist/*.tar.gz")
    with tarfile.open(archive) as tar:
        archived = tar.getnames()
    for file in data:
        assert list(project.glob(f"build/**/{file}")), file
        assert [name for name in archived if name.endswith(file)], file
