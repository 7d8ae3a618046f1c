"""python -m rag_explain: the command line."""

import sys

from rag_explain.cli import main

sys.exit(main())
