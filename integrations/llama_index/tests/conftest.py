from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The tiny models of the library's own tests.
sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
