"""The benchmark without ranks: what is measured, where results go, and the tables and the picture made of them."""

import argparse
import json
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks import table
from flux_ops.bench import candidates, command, report, rows, studies
from flux_ops.tuner.shapes import read_lists
from tests.gpu.run import Collector

RESULTS = report.RESULTS / "h200-tp2.json"
needs_results = pytest.mark.skipif(not RESULTS.exists(), reason="a source archive has no results")


def arguments(*given):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["--device", "cuda", "--world", "2", *given])


def row(op="ag_gemm", name="a", list_name="mlp", mode="graph", shape=(64, 32, 16), notes=None, **times):
    spread = {"q1": 1.0, "q3": 1.0, "min": 1.0, "max": 1.0, "samples": 3, "calls": 2, "spread": 0.01}
    made = {n.replace("_", "-"): {"median": t, **spread} for n, t in times.items()}
    sizes = dict(zip("MHI", shape, strict=True))
    return {"list": list_name, "name": name, "op": op, "mode": mode, **sizes, "times": made, "notes": notes or {}}


def document(*rows, **more):
    fields = ("driver", "torch", "cuda", "nccl", "commit")
    environment = {"card": "H", "tp": 2, "date": "2026-01-02T03:04:05", **dict.fromkeys(fields, "1")}
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    return {"environment": environment, "dtype": "bfloat16", "modes": modes, "rounds": 3, "rows": list(rows), **more}


class TestWhatIsMeasured:
    def test_lists_bring_their_ops(self):
        found = command.layers(arguments("--lists", "mlp,decode"))
        by_list = {name: ops for name, _, ops in found}
        assert by_list["mlp"] == ("ag_gemm", "gemm_rs")
        assert by_list["decode"] == ("gemm_ar",)

    def test_rows_that_the_ranks_can_not_share_are_left_out(self):
        found = command.layers(arguments("--lists", "decode", "--ops", "gemm_rs"))
        assert [shape.name for _, shape, _ in found] == [s.name for _, s in read_lists(command.SHAPES, "decode")][1:]

    def test_a_study_has_ops_of_its_own(self):
        assert {ops for *_, ops in command.layers(arguments("--study", "transfer"))} == {("ag_gemm",)}

    @pytest.mark.parametrize(
        "given,words",
        (
            (["--ops", "gemm_xx"], "'gemm_xx'; there are ag_gemm, gemm_rs"),
            (["--lists", "none"], "no list 'none'"),
            (["--shapes", "none"], "no shape"),
            (["--study", "rows", "--rows", "1,0"], "--rows is '1,0'"),
            (["--study", "rows", "--rows", "1,,2"], "--rows is '1,,2'"),
            (["--rows", "1"], "--rows goes with --study rows"),
            (["--rounds", "-1"], "--rounds is -1"),
            (["--name", "a/b"], "--name is 'a/b'"),
            (["--without", "fused,bogus"], "--without has 'bogus'; there are gemm, sequential, torch, one-shot"),
        ),
    )
    def test_names_that_there_are_not(self, given, words, capsys):
        assert command.run(arguments(*given)) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1

    def test_one_file_of_shapes(self):
        assert (report.ROOT / "benchmarks" / "shapes.json").samefile(command.SHAPES)

    def test_rivals_of_each_op(self):
        args = arguments("--explore", "X/p1,decomposed:Y", "--without", "fused")
        names = command.Benchmark(args).names
        assert names("ag_gemm", None) == ["gemm", "sequential", "torch", "fused:X/p1", "decomposed:Y", "auto"]
        assert names("gemm_ar", None)[2:4] == ["one-shot", "two-shot"]
        assert candidates.is_ours("decomposed:Y")
        assert not any(candidates.is_ours(name) for name in candidates.NOT_OURS)


class TestRows:
    """The study of the number of rows."""

    def settled(self, *given):
        args = arguments("--study", "rows", *given)
        command.settle(args)
        return args

    def test_defaults_are_its_own(self):
        args = self.settled()
        assert (args.modes, args.rounds) == ("graph", 8)
        assert {(shape.h, shape.i) for _, shape, _ in command.layers(args)} == {(8192, 28672)}
        args = self.settled("--modes", "eager", "--rounds", "3", "--shapes", "llama-7b")
        assert (args.modes, args.rounds) == ("eager", 3)
        assert {shape.name for _, shape, _ in command.layers(args)} == {"llama-7b"}
        args = arguments()
        command.settle(args)
        assert (args.modes, args.rounds) == ("eager,graph", 20)

    def test_every_small_number_and_the_edges(self):
        by_op = {op: [] for op in candidates.OPS}
        for _, shape, ops in command.layers(self.settled("--world", "8")):
            for op in ops:
                by_op[op].append(shape.m)
        assert by_op["gemm_ar"] == [*range(1, 66), 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025]
        edges = [near for edge in (128, 256, 512, 1024) for near in (edge - 8, edge, edge + 8)]
        assert by_op["ag_gemm"] == by_op["gemm_rs"] == [*range(8, 73, 8), *edges]

    def test_a_list_of_rows(self):
        found = command.layers(self.settled("--rows", "7,3", "--ops", "gemm_ar,gemm_rs"))
        assert [(shape.m, ops) for _, shape, ops in found] == [
            (2, ("gemm_rs",)),
            (3, ("gemm_ar",)),
            (4, ("gemm_rs",)),
            (6, ("gemm_rs",)),
            (7, ("gemm_ar",)),
            (8, ("gemm_rs",)),
        ]

    @pytest.mark.parametrize("modes,rivals", (("graph", []), ("eager,graph", ["one-shot", "two-shot"])))
    def test_rivals_run_eagerly(self, modes, rivals):
        contest = rows.Rows(None, self.settled("--modes", modes), [])
        assert contest.names("gemm_ar", None) == ["gemm", "sequential", *rivals, "auto"]

    def made(self, m, op="gemm_ar", **times):
        return row(op, "70b", shape=(m, 32, 16), **times) | {"ran": {"auto": "fused x"}}

    def lines(self, op, *made):
        return studies.table(document(*made, study="rows"), op, "graph").splitlines()

    def test_flags(self):
        lines = self.lines(
            "gemm_ar",
            self.made(1, gemm=9.0, sequential=12.0, auto=10.0),
            self.made(2, gemm=9.0, sequential=12.0, one_shot=11.0, auto=12.0),  # slower than one-shot
            self.made(3, gemm=9.0, sequential=20.0, auto=15.7),  # 1.308 times the size before
            self.made(5, gemm=9.0, sequential=99.0, auto=99.0),  # no neighbour, and no slower than the sequence
            self.made(6, gemm=9.0, sequential=99.0),  # auto failed
        )
        assert [line.split()[1] for line in lines[3:8]] == ["1", "2", "3", "5", "6"]
        flags = [line.partition("fused x")[2].strip() for line in lines[3:8]]
        assert flags == ["", "1.09 x one-shot", "step 1.31 x", "", ""]
        assert lines[-1].startswith("2 flags at 5 sizes")
        assert lines[-1].endswith("M = 2: 1.09 x one-shot, M = 3: step 1.31 x")
        assert lines[-2] == "auto is 1.11 x as fast as sequential, geometric mean"  # (1.2 * 1 * 1.274 * 1) ** (1 / 4)

    def test_a_step_of_shared_rows_is_one_row_a_rank(self):
        made = [self.made(m, "gemm_rs", sequential=90.0, auto=time) for m, time in ((2, 10.0), (3, 20.0), (4, 40.0))]
        assert self.lines("gemm_rs", *made)[-1].endswith(": M = 4: step 4.00 x")
        assert self.lines("ag_gemm", *made) == []


def test_results_go_to_the_checkout_or_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    assert report.folders(keep=True) == [report.RESULTS]
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert report.folders(keep=False) == [tmp_path / "out"]
    monkeypatch.setattr(report, "IS_CHECKOUT", False)
    monkeypatch.chdir(tmp_path)
    assert report.folders(keep=True) == [tmp_path, tmp_path / "out"]
    assert report._git("rev-parse", "HEAD") is None


def test_an_installed_package_is_no_checkout(tmp_path):
    shutil.copytree(report.ROOT / "flux_ops", tmp_path / "flux_ops", ignore=shutil.ignore_patterns("*.so"))
    code = "from flux_ops.bench import command, report; print(*report.folders(keep=True), command.SHAPES)"
    env = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == [str(tmp_path), str(tmp_path / "flux_ops" / "bench" / "shapes.json")]
    assert (tmp_path / "flux_ops" / "bench" / "shapes.json").exists()


class TestTables:
    def test_summary(self):
        rows = [
            row(name="a", gemm=10.0, sequential=20.0, fused=15.0, auto=12.0),
            row(name="b", gemm=10.0, sequential=20.0, torch=13.0, fused=14.0),  # auto ran the same
            row(name="c", list_name="sweep", gemm=10.0, sequential=20.0, fused=30.0),
        ]
        assert report.summary(document(*rows)) == [
            "ag_gemm, TP = 2, graph: mean E 0.70, worst 0.60 (b), the fastest on 1 of 2 shapes of mlp and gpt3"
        ]

    def test_studies_compare_with_the_first_column(self):
        columns = {"rank order": ["fused:x"], "same order": ["fused:y"], "chunks": ["c/c1", "c/c2", "c/c4"]}
        fields = {"columns": columns, "shard_bytes": 1}
        rows = [
            row(**{"fused:x": 100.0, "fused:y": 120.0, "c/c1": 90.0, "c/c2": 80.0}) | fields,
            row(name="b", notes={"fused:y": "no"}, **{"fused:x": 100.0, "c/c4": 125.0}) | fields,
        ]
        lines = studies.table(document(*rows, study="swizzle"), "ag_gemm", "graph").splitlines()
        assert lines[1].split() == ["shape", "M", "rank", "order", "same", "order", "chunks"]
        assert lines[3].split() == ["a", "64", "0.100", "1.200", "0.800", "c2"]
        assert lines[4].split() == ["b", "64", "0.100", "-", "1.250", "c4"]
        assert lines[5].split() == ["geometric", "mean", "1.200", "1.000"]
        assert lines[6:] == ["  fused:y: no"]
        assert studies.table(document(*rows, study="swizzle"), "gemm_rs", "graph") == ""

    def test_transfers_are_bandwidths(self):
        columns = {"push": ["push"], "fused op": ["fused:x"]}
        made = row(**{"push": 50.0, "fused:x": 200.0}) | {"columns": columns, "shard_bytes": 10_000_000}
        made = document(made, study="transfer")
        made["environment"]["tp"] = 4
        lines = studies.table(made, "ag_gemm", "graph").splitlines()
        assert lines[3].split() == ["a", "64", "600.0", "0.200"]

    @pytest.mark.parametrize("op, expected", (("ag_gemm", 0.1814), ("gemm_rs", 0.1814), ("gemm_ar", 0.3627)))
    def test_link(self, op, expected):
        assert report.link_ms(document(), row(op, shape=(8192, 8192, 28672))) == pytest.approx(expected, rel=1e-3)

    def test_first_whole_then_compact(self, tmp_path):
        rows = [row(op, gemm=1e4, sequential=2e4, torch=1.5e4, auto=1.25e4) for op in ("ag_gemm", "gemm_rs")]
        paths = [tmp_path / f"{name}.json" for name in ("one", "two")]
        for path in paths:
            path.write_text(json.dumps(document(*rows)))
        paths[1].with_suffix(".svg").touch()
        text = table.markdown(paths)
        whole, compact = text.split("one.json")
        assert whole.count("| a | 64 | 32 | 16 | 0.000 | 10.000 | 20.000 | 15.000 | **12.500** | 1.60 | 0.75 |") == 2
        line = "| a | 64 |" + " 0.000 | 10.000 | 20.000 | 15.000 | **12.500** | 0.75 |" * 2
        assert line in compact.splitlines()
        assert "two.svg" in compact
        assert ".svg" not in whole
        assert text.count("mean E 0.75, worst 0.75 (a), the fastest on 1 of 1 shapes") == 4

    @needs_results
    @pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
    def test_the_pages_have_what_the_command_prints(self, page):
        text = page.read_text()
        block = text.split(table.BEGIN)[1].split(table.END)[0]
        names = re.findall(r"`(benchmarks/results/\S+\.json)`", block)
        assert names
        assert table.placed(text, table.markdown([report.ROOT / name for name in names], page=page)) == text

    @needs_results
    def test_pictures_are_linked_from_the_page(self):
        for page in table.PAGES:
            link = re.search(r"\((\S+\.svg)\)", table.markdown([RESULTS], page=page))[1]
            assert (page.parent / link).samefile(RESULTS.with_suffix(".svg"))


class TestPicture:
    @pytest.fixture
    def plot(self):
        pytest.importorskip("matplotlib")
        from benchmarks import plot

        return plot

    def test_bars_are_speeds_relative_to_the_product(self, plot):
        rows = [row(gemm=10.0, sequential=20.0, fused=12.5), row(gemm=10.0, sequential=20.0, torch=16.0, auto=10.0)]
        bars = plot.speeds(rows, "ag_gemm")
        assert bars == {"sequential": [0.5, 0.5], "torch": [None, 0.625], "flux_ops": [0.8, 1.0]}

    @needs_results
    def test_it_is_light_searchable_and_the_same_each_time(self, plot, tmp_path):
        paths = tmp_path / "a.svg", tmp_path / "b.svg"
        for path in paths:
            plot.draw(json.loads(RESULTS.read_text()), "graph", path)
        text = paths[0].read_text()
        assert text == paths[1].read_text()
        assert len(text) < 60_000
        for word in ("llama3.1-70b", "gemm_rs", "flux_ops", "TP = 2"):
            assert word in text

    @needs_results
    def test_pictures_of_results_are_light(self):
        pictures = list(report.RESULTS.glob("*.svg"))
        assert pictures
        for path in pictures:
            assert path.stat().st_size < 60_000, path
            assert path.with_suffix(".json").exists(), path


def test_rows_of_the_gpu_runner():
    """A test's row has its name, or the forced configuration's: the longest that fits."""
    nodeid = "tests/gpu/test_gpu_shapes.py::TestGpuShapes::test_residues[gpu2-fused:k/n4/p16-gemm_rs]"
    assert Collector(print)._name_of(nodeid) == "shapes: residues (2 ranks)"
    assert Collector(print, ["fused:k/n4/p1", "fused:k/n4/p16"])._name_of(nodeid) == "fused:k/n4/p16 (2 ranks)"


def test_entry_of_a_checkout():
    assert "-m flux_ops bench $(ARGS)" in (report.ROOT / "Makefile").read_text()  # with the checkout as PYTHONPATH
    command, env = [sys.executable, "-m", "flux_ops", "bench", "--help"], {"PYTHONPATH": str(report.ROOT), "PATH": ""}
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=env)
    assert "--study" in run.stdout
