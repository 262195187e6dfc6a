"""Shapes: a layer's, by name, as lists of a JSON file have them, and a product's sizes on the command line."""

import dataclasses
import json
import pathlib


def takes_rows(op: str, m: int, world: int) -> bool:
    """Whether the op takes so many rows: those that gather or scatter take a multiple of TP."""
    return op == "gemm_ar" or m % world == 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer: AG is x [M/TP, H] gathered, times w [I/TP, H]^T; RS is x [M, I/TP] times w [H, I/TP]^T, scattered.

    AR is RS with all rows on every rank.
    """

    name: str
    m: int
    h: int
    i: int

    def suits(self, op: str, world: int) -> bool:
        return takes_rows(op, self.m, world)

    def product(self, op: str, world: int) -> tuple[int, int, int]:
        """(M, N, K) of one rank's product."""
        return (self.m, self.i // world, self.h) if op == "ag_gemm" else (self.m, self.h, self.i // world)


def read_lists(path: str | pathlib.Path, names: str = "") -> list[tuple[str, Shape]]:
    """(list, shape) for each shape of the lists that are named, comma-separated; of all where none is.

    The file holds lists of {"name": ..., "M": ..., "H": ..., "I": ...} by name. Raises ValueError if it doesn't.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text())
        lists = {name: rows for name, rows in content.items() if isinstance(rows, list)}
        wanted = [name for name in names.split(",") if name] or list(lists)
        for name in wanted:
            if name not in lists:
                raise ValueError(f"it has no list '{name}'; it has {', '.join(lists)}")
        return [
            (name, Shape(row["name"], int(row["M"]), int(row["H"]), int(row["I"])))
            for name in wanted
            for row in lists[name]
        ]
    except OSError as error:
        raise ValueError(f"{path}: it can't be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from None


def parse_shapes(text: str, op: str, world: int) -> list[tuple[int, int, int]]:
    """(M, N, K) for each shape of "M,N,K[;M,N,K]", or for those of FILE[:LIST,...] whose rows the op takes. Raises
    ValueError for anything else, an M alone that the op does not take among it.
    """
    products = []
    if any(c.isalpha() for c in text):
        path, _, names = text.partition(":")
        shapes = [shape for _, shape in read_lists(path, names)]
        products = [shape.product(op, world) for shape in shapes if shape.suits(op, world)]
        if shapes and not products:
            raise ValueError(f"{text}: {op} takes none of these M: an M must be a multiple of the {world} ranks")
        return products
    for part in filter(None, text.split(";")):
        sizes = [s.strip() for s in part.split(",")]
        if len(sizes) != 3 or not all(s.isdecimal() and int(s) > 0 for s in sizes):
            raise ValueError(f"'{part}' is no shape: it must be M,N,K, or FILE or FILE:LIST in place of all of them")
        if not takes_rows(op, int(sizes[0]), world):
            raise ValueError(f"'{part}': {op} takes an M that is a multiple of the {world} ranks")
        products.append(tuple(map(int, sizes)))
    if not products:
        raise ValueError("there is no shape; give M,N,K[;M,N,K...] or FILE[:LIST,...]")
    return products
