"""Runs as people look at them: tables, plots, pages. Public as `fm.report`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # at run time a name is imported when it is first used: charts of a live page need no torch
    from fairmesh.report.first_sentences import headline
    from fairmesh.report.plots import plot, plot_sites
    from fairmesh.report.site_pictures import picture
else:
    _HOMES = {"headline": "first_sentences", "plot": "plots", "plot_sites": "plots", "picture": "site_pictures"}

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["headline", "picture", "plot", "plot_sites"]
