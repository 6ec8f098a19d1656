"""Tables of text for a terminal."""

from collections.abc import Collection, Sequence


def table(heads: Sequence[str], lines: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return a table's lines: columns two spaces apart, those named in `right` set to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    shown = []
    for line in (heads, *lines):
        cells = [
            cell.rjust(width) if head in right else cell.ljust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        ]
        shown.append("  ".join(cells).rstrip())
    return shown
