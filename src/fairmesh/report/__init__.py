"""Runs as people look at them: tables, plots, pages. Public as `fm.report`."""

from fairmesh.report.first_sentences import headline
from fairmesh.report.plots import plot, plot_sites
from fairmesh.report.site_pictures import picture

__all__ = ["headline", "picture", "plot", "plot_sites"]
