"""A study as one HTML file that includes its pictures."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px } td, th { border: 1px solid #ccc; padding: 3px 8px }
th { background: #f3f3f3; text-align: left } img { max-width: 100% }
pre { background: #f6f6f6; padding: 1em; overflow: auto }
"""


def write_page(
    path: Path,
    *,
    title: str,
    summary: Sequence[str],
    grid: Sequence[Sequence[str]],
    pictures: Sequence[Path],
    table: Sequence[Sequence[str]],
    settings: str,
) -> Path:
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in summary),
        _table(grid),
        *(
            f"<img alt='{html.escape(picture.stem)}' src='data:image/png;base64,"
            f"{base64.b64encode(picture.read_bytes()).decode()}'>"
            for picture in pictures
        ),
        "<h2>Every cell</h2>",
        _table(table),
        "<h2>Settings</h2>",
        f"<pre>{html.escape(settings)}</pre></html>",
    ]
    path.write_text("\n".join(parts))
    return path


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table>{''.join(cells)}</table>"
