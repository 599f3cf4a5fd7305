#!/usr/bin/env python
"""Run ``torchtitan-npu doctor`` from a checkout that need not be installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_npu.cli.main import main

if __name__ == "__main__":  # a spawned process imports this file again
    sys.exit(main(["doctor", *sys.argv[1:]]))
