from __future__ import annotations

import os
import sys
from pathlib import Path

# Set before torch or transformers are imported: no test may reach for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))
