"""What the tests of whole engines on a GPU share."""

from pathlib import Path

import pytest
import torch

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEMO = Path(__file__).resolve().parents[2] / "demo"
FAMILIES = ["nemotron-h-code", "qwen3.5-code"]
SIZES = {"max_len": 512, "max_rows": 8, "max_step_tokens": 256, "page_len": 64, "chunk_len": 16}
PAGE, NUM_DRAFTS = SIZES["page_len"], 3
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}
START = "import os\n\n\nclass Stack:\n    "
