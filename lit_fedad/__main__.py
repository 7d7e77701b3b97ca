"""``python -m lit_fedad``: the command line without its installed script."""

import sys

from lit_fedad.cli.main import run

sys.exit(run())
