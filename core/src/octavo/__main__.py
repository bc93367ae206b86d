"""`python -m octavo` is the `octavo` command."""

import sys

from octavo.cli.start import main

sys.exit(main())
