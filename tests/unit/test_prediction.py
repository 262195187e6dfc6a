"""`python -m flux_ops info --predict`: the model's word on shapes and numbers of ranks, without a GPU."""

import argparse

import pytest

from flux_ops import extension, info, prediction

pytestmark = pytest.mark.skipif(extension.module is None, reason=f"no compiled part: {extension.why_not_loaded}")


def predicted(capsys, *given):
    """(exit status, lines of stdout, stderr) of the command."""
    parser = argparse.ArgumentParser()
    info.add_arguments(parser)
    status = info.run(parser.parse_args(["--predict", *given]))
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def cells(lines, name, op):
    (line,) = [line for line in lines if line.split()[0] == name and line.split()[2] == op]
    return line.split(maxsplit=6)


def test_a_line_for_each_shape_and_op(capsys):
    status, lines, _ = predicted(capsys, "--world", "8", "--lists", "mlp,gpt3")
    assert status == 0
    assert "TP = 8" in lines[0]
    assert len(lines) == 3 + 10 * 3
    *_, choice, product_us, link_us, by = cells(lines, "llama3.1-70b", "gemm_rs")
    assert choice.startswith("fused:")
    assert float(link_us) == pytest.approx(7 / 8 * 8192 * 8192 * 2 / 370e3, abs=0.05)
    assert by == "product"
    assert float(product_us) > float(link_us)
    assert float(cells(lines, "llama3.1-70b", "gemm_ar")[5]) == pytest.approx(2 * float(link_us), abs=0.1)


def test_more_ranks_have_less_to_compute_and_more_to_send(capsys):
    by_world = [cells(predicted(capsys, "--world", w)[1], "llama-7b", "ag_gemm") for w in ("2", "4", "8")]
    products, links = ([float(line[column]) for line in by_world] for column in (4, 5))
    assert products == sorted(products, reverse=True)
    assert links == sorted(links)


def test_few_rows(capsys):
    _, lines, _ = predicted(capsys, "--lists", "decode")
    assert [line.split()[2] for line in lines if line.startswith("70b-1 ")] == ["gemm_ar"]  # no shard of one row
    *_, choice, product_us, _, by = cells(lines, "70b-16", "gemm_ar")
    assert (choice, product_us, by) == ("fused:64x16/one-shot", "-", "-")
    *_, choice, product_us, _, by = cells(lines, "70b-16", "gemm_rs")
    assert (choice, product_us, by) == ("fused:64x16", "-", "-")
    *_, choice, _, _, by = cells(predicted(capsys, "--world", "8", "--lists", "gpt3")[1], "gpt3-1k", "gemm_rs")
    assert (choice, by) == ("sequential", "both, in turn")


@pytest.mark.parametrize(
    "given,words",
    ((["--world", "17"], "world is 17; it must be 2 to 16."), (["--lists", "none"], "no list 'none'")),
)
def test_what_there_is_not(capsys, given, words):
    status, lines, error = predicted(capsys, *given)
    assert (status, lines) == (2, [])
    assert words in error
    assert error.count("\n") == 1


def test_without_the_compiled_part(capsys, monkeypatch):
    monkeypatch.setattr(extension, "module", None)
    monkeypatch.setattr(extension, "why_not_loaded", "it is missing")
    assert predicted(capsys) == (2, [], "flux_ops info: error: it is missing\n")


@pytest.mark.parametrize(
    "choice,product_us,by",
    (
        ("fused:a", 5.0, "product"),
        ("fused:a", 3.0, "link"),
        ("fused:a", None, "-"),
        ("sequential", 5.0, "both, in turn"),
        ("decomposed:two-shot", 3.0, "both, in turn"),
    ),
)
def test_bound(choice, product_us, by):
    assert prediction.bound(choice, product_us, 4.0) == by
