"""On PYTHONPATH, it lets Python find no package that $FAIRMESH_HIDDEN names, as if it were not installed."""

import os
import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset(os.environ.get("FAIRMESH_HIDDEN", "").split())


class Visible(PathFinder):
    """Finds what the path has, without what is hidden."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Visible if finder is PathFinder else finder for finder in sys.meta_path]
