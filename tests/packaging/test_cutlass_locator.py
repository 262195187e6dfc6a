"""third_party/cutlass.py: where the CUTLASS headers are looked for."""

import pytest

from third_party import cutlass


def make_headers(folder, major=4, minor=2):
    header = folder / cutlass.MARKER
    header.parent.mkdir(parents=True)
    header.write_text(f"#define CUTLASS_MAJOR {major}\n#define CUTLASS_MINOR {minor}\n")
    return folder


def test_wheel(tmp_path):
    include = make_headers(tmp_path / "include")
    assert cutlass.include_dir({}, wheel_source=tmp_path) == include


@pytest.mark.parametrize("given", ("", "include"))
def test_override_names_the_checkout_or_its_include_folder(tmp_path, given):
    include = make_headers(tmp_path / "mine" / "include", major=5, minor=0)
    make_headers(tmp_path / "wheel" / "include")
    environ = {"CUTLASS_DIR": str(tmp_path / "mine" / given)}
    assert cutlass.include_dir(environ, wheel_source=tmp_path / "wheel") == include


def test_wrong_override_is_not_replaced_by_the_wheel(tmp_path):
    make_headers(tmp_path / "include")
    with pytest.raises(cutlass.CutlassNotFound, match=r"CUTLASS_DIR=/nowhere has no include/cutlass/version\.h"):
        cutlass.include_dir({"CUTLASS_DIR": "/nowhere"}, wheel_source=tmp_path)


def test_missing_is_one_sentence_with_both_remedies(tmp_path):
    with pytest.raises(cutlass.CutlassNotFound) as caught:
        cutlass.include_dir({}, wheel_source=tmp_path)
    message = str(caught.value)
    assert "nvidia-cutlass==4.2.0.0" in message
    assert "CUTLASS_DIR" in message
    assert "\n" not in message


def test_old_headers_are_refused_with_both_versions(tmp_path):
    make_headers(tmp_path / "include", major=3, minor=9)
    with pytest.raises(cutlass.CutlassNotFound, match=r"is 3\.9, 4\.2 or newer"):
        cutlass.include_dir({}, wheel_source=tmp_path)
