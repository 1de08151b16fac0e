"""Tables for notebooks: static HTML in the colours of the page, light or dark, with every value escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

_BAR: Final = (
    '<div role="img" aria-label="{percent}" title="{percent}" style="width:20em;max-width:100%;height:.6em;'
    'margin:.4em 0;border:1px solid currentColor;border-radius:.3em;overflow:hidden">'
    '<div style="width:{percent};height:100%;background:currentColor;opacity:.6"></div></div>'
)
_ROW: Final = (
    '<tr style="background:none"><th scope="row" style="text-align:left;font-weight:normal;opacity:.75;'
    'padding:.1em 1em .1em 0">{}</th><td style="text-align:left;padding:.1em 0">{}</td></tr>'
)


def table(title: str, rows: Mapping[str, object], share: float | None = None) -> str:
    """A table of `rows`, name to value, under `title`, with a bar of `share` (0 to 1) if there is one.

    Rows whose value is "" or None are left out.
    """
    bar = "" if share is None else _BAR.format(percent=f"{100 * min(max(share, 0.0), 1.0):.1f}%")
    shown = {name: value for name, value in rows.items() if value is not None and value != ""}
    body = "".join(_ROW.format(escape(name), escape(str(value))) for name, value in shown.items())
    return (
        f'<div style="margin:.4em 0"><strong>{escape(title)}</strong>{bar}'
        f'<table style="margin:0;border:none;border-collapse:collapse"><tbody>{body}</tbody></table></div>'
    )
