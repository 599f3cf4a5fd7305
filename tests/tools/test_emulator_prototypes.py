"""Every prototype of the emulator has a source: the file of a public repository of CANN, first-hand where possible."""

from __future__ import annotations

import json
from collections import Counter

from tools.emulator_prototypes import WITHOUT_SOURCE, Prototype, table
from torchtitan_npu.emulator.build import PROTOTYPES

MIRRORS = {"libochao-huawei/ops-transformer", "cannmirror/ops-transformer"}
REPOSITORIES = {"hicann/ops-math", "hicann/ops-nn", "hicann/ops-cv", "hicann/ops-transformer", *MIRRORS}


def test_every_prototype_has_a_source() -> None:
    sources = {name: prototype["source"] for name, prototype in json.loads(PROTOTYPES.read_text()).items()}
    places: Counter[str] = Counter()
    for name, source in sources.items():
        if name in WITHOUT_SOURCE:
            assert source == WITHOUT_SOURCE[name].source
            continue
        owner, repository, *path = source.split("/")
        assert len(path) > 1 and path[-1].endswith((".h", ".md", "_def.cpp")), name
        places[f"{owner}/{repository}"] += 1
    assert places.keys() == REPOSITORIES
    assert sum(places[mirror] for mirror in MIRRORS) < 0.15 * places.total()


def test_the_first_hand_declaration_is_the_source() -> None:
    mirror = Prototype("tt", ["self", "out"], ["out"], "mirror/repository/new.h")
    own = Prototype("tt", ["self", "out"], [], "hicann/repository/old.h")
    newer = own._replace(source="hicann/other/new.h", outputs=["out"])
    found = {"aclnnSame": [mirror], "aclnnOther": [mirror], "aclnnMoved": [newer]}
    other = own._replace(arguments=["self", "result"])
    first_hand = {"aclnnSame": [own], "aclnnOther": [other], "aclnnMoved": [own]}
    entries = json.loads(table(found, {name: {"8.5"} for name in found}, first_hand))
    assert entries["aclnnSame"] == {**mirror._asdict(), "source": own.source}
    assert entries["aclnnOther"] == mirror._asdict()
    assert entries["aclnnMoved"] == newer._asdict()
