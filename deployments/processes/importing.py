"""How other Python processes of this installation import Mell.

In the source tree, a process finds Mell's packages only if the tree's folder is on its import path. An installed Mell
is in a folder that every process of this Python has on its path; there, the packages are below `mell`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).absolute().parents[__name__.count(".")]
"""The folder to import Mell from: that of the source tree, or the one into which Mell is installed."""

IS_INSTALLED = __name__.startswith("mell.")
"""False in the source tree."""


def importing(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a Python process can import Mell, from any working directory."""
    if IS_INSTALLED:
        return dict(environment)
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}
