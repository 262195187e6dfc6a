"""`python -m flux_ops tune` and `info`, as a user runs them."""

import json
import os
import subprocess
import sys

import pytest

import flux_ops
from flux_ops.tuner.shapes import parse_shapes

ROOT = os.path.dirname(os.path.dirname(flux_ops.__file__))


def run(*args, **env):
    """(exit status, lines of stdout, stderr)."""
    env = {**os.environ, "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "", **env}
    command = [sys.executable, "-m", "flux_ops", *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    return result.returncode, result.stdout.splitlines(), result.stderr


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A file in which two products are tuned, and what the command said."""
    path = str(tmp_path_factory.mktemp("tuned") / "tune.json")
    shapes = "64,72,64;128,72,64"
    status, lines, errors = run(
        "tune", "--op", "gemm_rs", "--shapes", shapes, "--dtype", "fp32", "--rounds", "2", "--out", path
    )
    assert status == 0, errors
    return path, lines


def test_tune_tells_what_it_found(tuned):
    path, lines = tuned
    assert lines[0] == f"2 products, 0 of them in {path} already"
    for line, m in zip(lines[1:], (64, 128), strict=True):
        assert line.startswith(f"gemm_rs M,N,K = {m},72,64: ")
        assert "sequential" in line


def test_tune_goes_on_where_it_stopped(tuned):
    path, _ = tuned
    before = os.stat(path).st_mtime_ns
    status, lines, _ = run("tune", "--op", "gemm_rs", "--shapes", "64,72,64", "--dtype", "fp32", "--out", path)
    assert (status, lines) == (0, [f"1 products, 1 of them in {path} already"])
    assert os.stat(path).st_mtime_ns == before


def test_show_and_compare(tuned):
    path, _ = tuned
    status, lines, _ = run("tune", "--show", "--out", path)
    assert status == 0
    assert lines[0] == path
    assert [line.split()[:4] for line in lines[3:]] == [["gemm_rs", "64", "72", "64"], ["gemm_rs", "128", "72", "64"]]
    status, lines, _ = run("tune", "--compare", FLUX_TUNE_CACHE=path)
    assert status == 0
    assert "of 2 shapes" in lines[-1]


def test_merge(tuned, tmp_path):
    path, _ = tuned
    out = str(tmp_path / "all.json")
    assert run("tune", "--merge", out, path, path)[:2] == (0, [f"{out}: 2 entries"])
    foreign = tmp_path / "foreign.json"
    foreign.write_text(json.dumps({"schema": 99}))
    status, _, errors = run("tune", "--merge", out, str(foreign))
    assert status == 2
    assert f"{foreign}: its schema is 99" in errors


def test_merge_of_nothing(tuned, tmp_path):
    out, missing = str(tmp_path / "all.json"), str(tmp_path / "missing.json")
    for inputs, words in (((tuned[0], missing), f"{missing}: there is no such file"), ((), "--merge OUT IN")):
        status, lines, errors = run("tune", "--merge", out, *inputs)
        assert (status, lines) == (2, [])
        assert errors.startswith("flux_ops tune: error: ")
        assert words in errors
        assert not os.path.exists(out)


@pytest.mark.parametrize("rounds", ("0", "-3"))
def test_a_number_of_rounds_that_can_not_be(rounds, tmp_path):
    out = str(tmp_path / "tune.json")
    status, lines, errors = run("tune", "--shapes", "64,72,64", "--rounds", rounds, "--out", out)
    assert (status, lines) == (2, [])
    assert f"--rounds is {rounds}" in errors
    assert errors.count("\n") == 1


def test_foreign_file_is_refused_before_anything_is_measured(tmp_path):
    foreign = tmp_path / "foreign.json"
    foreign.write_text("[]")
    status, lines, errors = run("tune", "--shapes", "64,72,64", "--out", str(foreign))
    assert (status, lines) == (2, [])
    assert f"{foreign}: it holds a JSON list" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "shapes,words",
    (
        ("", ["no shape"]),
        ("64,72", ["'64,72'", "M,N,K"]),
        ("64,0,64", ["'64,0,64'"]),
        ("64,64,64;7,64,64", ["'7,64,64'", "ag_gemm", "multiple of the 2 ranks"]),
        ("nowhere.json", ["nowhere.json", "No such file"]),
    ),
)
def test_shapes_that_make_no_sense(shapes, words):
    with pytest.raises(ValueError, match=r"M,N,K|can't be read|an M that") as error:
        parse_shapes(shapes, "ag_gemm", 2)
    for word in words:
        assert word in str(error.value)


def test_shapes_of_a_file(tmp_path):
    path = tmp_path / "shapes.json"
    x, y, z = ({"name": name, "M": m, "H": 16, "I": 32} for name, m in (("x", 64), ("y", 1), ("z", 2)))
    path.write_text(json.dumps({"about": "", "a": [x], "b": [], "d": [y, z]}))
    assert parse_shapes(str(path), "ag_gemm", 2) == [(64, 16, 16), (2, 16, 16)]
    assert parse_shapes(f"{path}:a", "gemm_rs", 4) == [(64, 16, 8)]
    assert parse_shapes(f"{path}:d", "gemm_ar", 2) == [(1, 16, 16), (2, 16, 16)]
    with pytest.raises(ValueError, match="takes none of these M"):
        parse_shapes(f"{path}:d", "ag_gemm", 3)
    with pytest.raises(ValueError, match="no list 'c'; it has a, b, d"):
        parse_shapes(f"{path}:c", "gemm_rs", 2)


def test_info_tells_of_the_settings_and_the_files(tmp_path):
    path = tmp_path / "tune.json"
    path.write_text("{")
    env = {"FLUX_TUNE_CACHE": str(path), "FLUX_TIMEOUT": "7", "FLUX_CHECK": "0", "FLUX_CPU_THREADS": "3"}
    status, lines, _ = run("info", **env)
    assert status == 0
    text = "\n".join(lines)
    for word in (flux_ops.__version__, "timeout 7 s", "no comparison", "CPU threads 3", f"ignored: {path}: "):
        assert word in text
    status, lines, _ = run("info", FLUX_TUNE_CACHE="off")
    assert status == 0
    assert lines[-1].endswith("no file is in use")
