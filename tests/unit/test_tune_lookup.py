"""Which entry `auto` is given, and what it is told of files that are of no use: one warning, never an exception."""

import dataclasses
import pathlib
import warnings as warnings_module

import pytest

import flux_ops
from flux_ops.tuner.cache import store
from flux_ops.tuner.lookup import Caches, device_name, shipped_paths
from tests.unit.test_tune_cache import USELESS, write
from tests.unit.tuning import BUILD, PRODUCT, content, entry


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def make(tmp_path, warnings):
    """make(user's entries, shipped entries, ...) -> Caches."""

    def caches(user=(), *shipped):
        paths = [tmp_path / "user.json", *(tmp_path / f"shipped{i}.json" for i in range(len(shipped)))]
        for path, entries in zip(paths, (user, *shipped), strict=True):
            if entries:
                store(str(path), entries, BUILD)
        return Caches(str(paths[0]), map(str, paths[1:]), BUILD, warnings.append)

    return caches


def found(caches, **changes):
    answer = caches.lookup(dataclasses.replace(PRODUCT, **changes))
    return answer and answer[0].choice


def test_own_bucket_then_nearest_then_none(make, warnings):
    caches = make([entry("at 8192"), entry("at 2048", m=2048), entry("at 1024", m=1024)])
    asked = {8192: "at 8192", 8000: "at 8192", 16384: "at 8192", 4500: "at 8192", 1100: "at 1024", 513: "at 1024"}
    for m, choice in asked.items():
        assert found(caches, m=m) == choice, m
    assert found(caches, m=448) is None
    assert found(caches, m=18432 + 1) is None
    assert found(caches, m=4096) == "at 8192"  # as near as 2048: the larger one
    assert warnings == []


def test_the_nearest_that_suits(make):
    caches = make([entry("at 8192"), entry("at 2048", m=2048)])
    asked = dataclasses.replace(PRODUCT, m=4096)
    assert caches.lookup(asked, lambda one: one.product.m == 2048)[0].choice == "at 2048"
    assert caches.lookup(asked, lambda one: False) is None
    assert caches.lookup(dataclasses.replace(PRODUCT, m=8000), lambda one: one.product.m != 8192) is None


def test_where_it_is_from(make, tmp_path):
    caches = make([entry()])
    assert caches.lookup(PRODUCT)[1] == f"{tmp_path}/user.json, M = 8192"
    near = dataclasses.replace(PRODUCT, m=10240)
    assert caches.lookup(near)[1] == f"{tmp_path}/user.json, M = 8192, the nearest to 10240"


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PRODUCT) if f.name != "m"])
def test_another_product_finds_nothing(make, field):
    value = getattr(PRODUCT, field)
    other = value * 2 if isinstance(value, int) else {"ag_gemm": "gemm_rs", "nk": "kn"}.get(value, value + "x")
    assert found(make([entry()]), **{field: other}) is None


def test_user_comes_before_the_package_and_this_process_before_both(make):
    caches = make([entry("user")], [entry("shipped"), entry("only shipped", m=64)])
    assert found(caches) == "user"
    assert found(caches, m=64) == "only shipped"
    caches.remember(entry("own"))
    assert found(caches) == "own"


def test_own_bucket_of_the_package_comes_before_a_near_one_of_the_user(make):
    caches = make([entry("user", m=4096)], [entry("shipped")])
    assert found(caches) == "shipped"
    assert found(caches, m=5000) == "user"


def test_a_file_that_changes_is_read_anew(make, tmp_path):
    caches = make()
    assert found(caches) is None
    store(str(tmp_path / "user.json"), [entry("new")], BUILD)
    assert found(caches) == "new"


@pytest.mark.parametrize("name", USELESS)
def test_useless_file_is_one_warning(make, tmp_path, warnings, name):
    caches = make((), [entry("shipped")])
    data, reason = USELESS[name]
    write(tmp_path / "user.json", data)
    for _ in range(3):
        assert found(caches) == "shipped"
    assert len(warnings) == 1
    assert f"{tmp_path}/user.json" in warnings[0]
    assert reason in warnings[0]


@pytest.mark.parametrize("kind", ("directory", "loop of links", "not for this user"))
def test_what_is_no_file_is_one_warning(make, tmp_path, warnings, kind, monkeypatch):
    caches = make()
    path = tmp_path / "user.json"
    if kind == "directory":
        path.mkdir()
    elif kind == "loop of links":
        path.symlink_to(path)
    else:
        write(path, content(entry()).encode())
        monkeypatch.setattr("flux_ops.tuner.cache.open", _refused, raising=False)
    assert found(caches) is None
    assert found(caches) is None
    assert len(warnings) == 1
    assert str(path) in warnings[0]


def _refused(*_, **__):
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("changes", ({"device": "NVIDIA A100, 108 SMs"}, {"tp": 8}), ids=("device", "tp"))
def test_users_file_for_other_devices_or_tp_is_one_warning(make, warnings, changes):
    caches = make([entry(**changes)])
    assert found(caches) is None
    assert found(caches) is None
    (warning,) = warnings
    assert str(next(iter(changes.values()))) in warning
    assert "GPU, 132 SMs at TP = 2" in warning


def test_packages_file_for_other_devices_is_none(make, warnings):
    assert found(make((), [entry(device="NVIDIA A100, 108 SMs")])) is None
    assert warnings == []


def test_no_files_at_all(warnings):
    caches = Caches("", [], BUILD, warnings.append)
    assert found(caches) is None
    caches.remember(entry("own"))
    assert found(caches) == "own"
    assert warnings == []


def test_device_names():
    assert device_name("cpu").startswith("CPU, ")


def test_shipped_files_are_those_of_the_package(monkeypatch, tmp_path):
    monkeypatch.setattr("flux_ops.tuner.lookup.SHIPPED", pathlib.Path(tmp_path))
    write(tmp_path / "h100.json", content(entry()).encode())
    write(tmp_path / "notes.txt", b"")
    assert shipped_paths() == [f"{tmp_path}/h100.json"]


@pytest.mark.parametrize("answer", (OverflowError("too large"), (entry("fused"), "a name of \udcfc")))
def test_the_operators_get_text_or_nothing(monkeypatch, answer):
    """The other ranks wait for what this one has found: nothing may stop it on the way."""

    def lookup(*_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    hooks = flux_ops.ops._hooks
    monkeypatch.setattr(hooks.caches, "lookup", lookup)
    with warnings_module.catch_warnings():
        warnings_module.simplefilter("ignore")
        choice, origin = hooks.tuned("ag_gemm", 64, 8, 8, "float32", False, 2, ("cpu", -1))
    assert (choice, origin.isascii()) == ("" if isinstance(answer, Exception) else "fused", True)
