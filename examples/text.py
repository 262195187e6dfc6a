"""Text to train on that every machine has, as bytes: the sources of Python's standard library, docstrings and all.

A token is a byte, so the vocabulary has 256 of them.
"""

import pathlib
import sysconfig

import torch

VOCABULARY = 256


def encode(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode(tokens: torch.Tensor) -> str:
    return bytes(tokens.tolist()).decode(errors="replace")


def standard_library(limit: int = 8 << 20) -> torch.Tensor:
    """The top-level modules one after the other, as uint8; at most `limit` bytes."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)[:limit]), dtype=torch.uint8)


def batch(text: torch.Tensor, length: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, the token that follows each): [length, size] each, from random places of the text."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (size,), generator=generator)
    windows = torch.stack([text[start : start + length + 1] for start in starts.tolist()], dim=1).long()
    return windows[:-1], windows[1:]
