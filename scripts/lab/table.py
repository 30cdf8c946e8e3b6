"""The tables of the laboratory as lines of text, and numbers as they stand in them."""

from collections.abc import Iterator, Sequence


def table_lines(title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield a title, headings, and rows in columns: words begin at one place, numbers end at one."""
    grid = [tuple(headings), *(tuple(map(str, row)) for row in rows)]
    columns = list(zip(*grid, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [False, *(all(not cell or cell[0] in "+-0123456789" for cell in column[1:]) for column in columns[1:])]
    if title:
        yield title
    for row in grid:
        cells = zip(row, widths, numeric, strict=True)
        yield "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()


def written(value: float | None, form: str) -> str:
    """Return a figure in a format such as `.2f` or `.0%`; empty where there is none."""
    return "" if value is None else format(value, form)
