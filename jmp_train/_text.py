"""Small pieces of text that reports are made of."""

import os
from collections.abc import Sequence
from typing import Any


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of left-aligned columns under a header.

    >>> print(columns(("name", "n"), [("dot_general", "2")]))
    name         n
    dot_general  2
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """
    >>> count(1, "cast"), count(2, "cast"), count(2, "leaf", "leaves")
    ('1 cast', '2 casts', '2 leaves')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def megabytes(number: int) -> str:
    """
    >>> megabytes(1_234_567), megabytes(2_345_678_901)
    ('1.23 MB', '2.35 GB')
    """
    if number < 1e4:
        return f"{number} B"
    return f"{number / 1e6:.3g} MB" if number < 999.5e6 else f"{number / 1e9:.3g} GB"


def short_source(source: str) -> str:
    """`file:line:column (function)` without folders and columns.

    >>> short_source("/home/me/model.py:12:4 (Model.__call__)")
    'model.py:12 (Model.__call__)'
    """
    place, _, function = source.partition(" ")
    file, *numbers = place.split(":")
    return " ".join(filter(None, [":".join([os.path.basename(file), *numbers[:1]]), function]))


def short_repr(value: Any) -> str:
    """`repr` in a line of at most 160 characters: where a wrong argument may be a tree of arrays.

    >>> short_repr("high")
    "'high'"
    >>> len(short_repr({"w": list(range(1000))}))
    160
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 160 else f"{text[:127]} ... {text[-28:]}"


def as_lists(value: Any) -> Any:
    """Dictionaries, lists and tuples as JSON gives them back: with lists for tuples.

    >>> as_lists({"shape": (2, (3,))})
    {'shape': [2, [3]]}
    """
    if isinstance(value, dict):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, tuple | list) else value
