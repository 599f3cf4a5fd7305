"""Register the tiny models of a campaign in this rank, and install its fault; a job imports it by its configuration."""

from __future__ import annotations

import os

from tests._helpers.layouts import add_flavor, add_flavors
from tests._helpers.swapping_jobs import swapping_options
from tools.fault_injection.jobs import FLAVOR, Plan
from tools.fault_injection.rank_faults import install

model = os.environ["TINY_MODEL"]
family = model.partition("_moe")[0]
add_flavors()
add_flavor(family, FLAVOR, {"n_layers": 2}, base=model)
swapping_options(family)
install(Plan.from_environment(), int(os.environ["RANK"]))
