#!/usr/bin/env python
"""`torchtitan-npu convert` under its old path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also in a checkout that is not installed

from torchtitan_npu.cli.main import main

sys.exit(main(["convert", *sys.argv[1:]]))
