"""What benchmarks/demo.py makes of a trace."""

from benchmarks.demo import last_of_chunks


def test_last_of_chunks():
    parts = [
        (1, 0, 0.0, 1000.0),
        (2, 0, 0.0, 2000.0),
        (2, 1, 0.0, 3000.0),
        (1, 1, 500.0, 4000.0),
        (0, 0, 7000.0, 8000.0),
    ]
    assert last_of_chunks(parts) == [(2, 0.0, 3.0), (1, 0.5, 4.0), (0, 7.0, 8.0)]
