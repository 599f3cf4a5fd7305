#!/usr/bin/env python3
"""Write the prototypes of CANN's operators, read from git repositories of its public sources.

    tools/emulator_prototypes.py hicann/ops-math=PATH … > torchtitan_npu/emulator/prototypes.json

Each argument names a repository and a clone of it (bare or not) with CANN's release branches. A prototype comes from
the newest branch that has one: from a header, from a document, or from the definition of an operator whose interface
CANN generates. On a tie the first repository counts. ``since`` is the first version that has the operator in one of
these places, or in its list of operators, if that is not the oldest version.

The table was made from hicann/ops-math, hicann/ops-nn, hicann/ops-cv, libochao-huawei/ops-transformer (master only) and
cannmirror/ops-transformer, in this order. The last two are mirrors of CANN's repository: they have the commits of
hicann/ops-transformer, which ends in November 2025, before the first release branch. Where that one has the same
declaration it is the source (``--first-hand hicann/ops-transformer=PATH``). Prototypes that differ between places are
reported on stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VERSIONS = {"8.5": "8.5.0", "9.0": "9.0.0", "9.1": "9.1.0", "master": "master"}
"""CANN's versions, oldest first, and their branches."""

LETTERS = {
    "aclTensor*": "t",
    "aclTensorList*": "T",
    "aclScalar*": "s",
    "aclScalarList*": "S",
    "aclIntArray*": "I",
    "aclFloatArray*": "F",
    "aclBoolArray*": "B",
    **dict.fromkeys(("char*", "string"), "z"),
    **dict.fromkeys(("void*", "float*", "int64_t*", "HcclComm"), "p"),
    **dict.fromkeys(("aclTensor**", "aclTensor*&"), "o"),
    **dict.fromkeys(("uint64_t", "size_t"), "Q"),
    **dict.fromkeys(("int32_t", "int"), "i"),
    **dict.fromkeys(("aclDataType", "aclFormat", "aclSparseType"), "e"),
    **{"double": "d", "float": "f", "int64_t": "q", "uint32_t": "u", "int8_t": "b", "uint8_t": "c", "int16_t": "h"},
    "bool": "?",
}
"""The letter of each C type, a key of ``C_TYPES`` in torchtitan_npu/emulator/build.py."""

LAST = ["uint64_t*", "aclOpExecutor**"]
"""The types of the last two parameters of every GetWorkspaceSize."""

ATTRIBUTES = {"Int": "q", "Float": "d", "Bool": "?", "String": "z", "ListInt": "I", "ListFloat": "F", "ListBool": "B"}
"""The letter of each type of attribute in a definition."""

ARRAYS = {"DT_INT64": "I", "DT_FLOAT": "F", "DT_BOOL": "B"}
"""The letter of an input whose value the host reads, by its dtype."""

EXCLUDED = (":!experimental", ":!*/tests/*", ":!examples", ":!*/examples/*", ":!scripts")
"""Folders whose operators are in no release."""

PROTOTYPE = re.compile(r"\b(aclnn\w+?)GetWorkspaceSize\s*\(([^;{}()]*)\)", re.DOTALL)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
PARAMETER = re.compile(r"(\w+)([\s*&]*?)(\w+)?\s*(?:\[\])?\s*(?:=.*)?", re.DOTALL)
LISTED = re.compile(r"^\|\s*\[?((?:aclnn\w+[&、]?)+)", re.MULTILINE)
GENERATED = re.compile(r"OPTYPE\s+(\w+)\s+ACLNNTYPE\s+aclnn\s*[A-Z)]")
DEFINITION = re.compile(r"class\s+(\w+)\s*:\s*public\s+OpDef")
VERSION = re.compile(r"\.Version\((\w+)\)")
ITEM = re.compile(r'this->(Input|Attr|Output)\("(\w+)"\)([^;]*);')


WRITTEN = {
    "aclnnApplyAdam": ["varRef", "m", "v"],
    "aclnnForeachNonFiniteCheckAndUnscale": ["scaledGrads", "foundInf"],
    "aclnnGeluBackward": ["gradInput"],
    "aclnnGroupedDynamicMxQuantV2": ["y", "mxscale"],
    "aclnnSparseFlashAttentionV2": ["attentionOut", "softmaxMax", "softmaxSum"],
}
"""Outputs of operators whose declarations are wrong or do not tell."""

OUTPUT = re.compile(r"^out|(?:Out|_out)(?:put)?\d?(?:Optional)?$")
GRADIENT = re.compile(r"^(?:grad|d)_?out(?:put)?\d?(?:Optional)?$", re.IGNORECASE)


class Prototype(NamedTuple):
    types: str
    arguments: list[str]
    outputs: list[str]
    """Arguments that the operator writes."""
    source: str


WITHOUT_SOURCE = {
    "aclnnTopkV2": Prototype(
        "tqq??qtt",
        ["self", "k", "dim", "largest", "sorted", "unknown", "values", "indices"],
        ["values", "indices"],
        "read from calls of torch_npu 2.13.0",
    )
}
"""Operators that torch_npu calls and no public source declares. They belong to the newest version."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", nargs="+", metavar="OWNER/NAME=PATH")
    parser.add_argument("--first-hand", action="append", default=[], metavar="OWNER/NAME=PATH")
    arguments = parser.parse_args()
    found: dict[str, list[Prototype]] = defaultdict(list)
    versions: dict[str, set[str]] = defaultdict(set)
    for operator, prototype in WITHOUT_SOURCE.items():
        found[operator].append(prototype)
        versions[operator].add(next(reversed(VERSIONS)))
    repositories = [argument.partition("=") for argument in arguments.repositories]
    for version in reversed(VERSIONS):
        for name, _, path in repositories:
            if has_branch(path, VERSIONS[version]):
                for operator, prototype in operators(name, path, VERSIONS[version]):
                    found[operator].append(prototype)
                    versions[operator].add(version)
                for operator in listed(path, VERSIONS[version]):
                    versions[operator].add(version)
    first_hand: dict[str, list[Prototype]] = defaultdict(list)
    for name, _, path in (argument.partition("=") for argument in arguments.first_hand):
        for operator, prototype in operators(name, path, VERSIONS["master"]):
            first_hand[operator].append(prototype)
    print(table(found, versions, first_hand))


def operators(repository: str, path: str, branch: str) -> Iterator[tuple[str, Prototype]]:
    """Yield the name and prototype of every operator of a branch, the most reliable prototypes first."""
    for suffix in ("*.h", "*aclnn*.md"):
        for file, text in files(path, branch, "GetWorkspaceSize", suffix):
            yield from declared(text, f"{repository}/{file}")
    builds = files(path, branch, "ACLNNTYPE", "*/CMakeLists.txt")
    generated = {(Path(file).parent, name) for file, text in builds for name in GENERATED.findall(text)}
    for file, text in files(path, branch, "OpDef", "*_def.cpp"):
        name = Path(file).name.removesuffix("_def.cpp")
        if any((folder, name) in generated for folder in Path(file).parents):
            yield from defined(text, f"{repository}/{file}")


def listed(path: str, branch: str) -> Iterator[str]:
    """Yield the operators that a branch lists: some are in a release before their sources are in the repository."""
    for _, text in files(path, branch, "aclnn", "*/op_api_list*.md"):
        for match in LISTED.finditer(text):
            yield from re.findall(r"aclnn\w+", match[1])


def has_branch(path: str, branch: str) -> bool:
    command = ("git", "-C", path, "rev-parse", "--quiet", "--verify", branch)
    return subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0


def files(path: str, branch: str, word: str, *paths: str) -> Iterator[tuple[str, str]]:
    """Yield the name and text of every file of a branch that contains ``word``."""
    command = ("git", "-C", path, "grep", "-z", "-l", word, branch, "--", *paths, *EXCLUDED)
    names = [name for name in subprocess.run(command, stdout=subprocess.PIPE).stdout.split(b"\0") if name]
    command = ("git", "-C", path, "cat-file", "--batch")
    rest = subprocess.run(command, input=b"\n".join(names), stdout=subprocess.PIPE, check=True).stdout
    for name in names:
        # "<hash> blob <size>\n<content>\n"
        header, _, rest = rest.partition(b"\n")
        size = int(header.split()[-1])
        yield name.decode().partition(":")[2], rest[:size].decode(errors="replace")
        rest = rest[size + 1 :]


def declared(text: str, source: str) -> Iterator[tuple[str, Prototype]]:
    """Yield the name and prototype of every operator that a header or document declares."""
    for match in PROTOTYPE.finditer(text):
        parameters = COMMENT.sub("", match[2]).replace("`", "").replace("\\", "").split(",")
        types_and_names = [type_and_name(parameter) for parameter in parameters]
        if [type_ for type_, _ in types_and_names[-2:]] != LAST:
            continue  # a call, or prose
        del types_and_names[-2:]
        unknown = [type_ for type_, _ in types_and_names if type_ not in LETTERS]
        if unknown:
            print(f"{source}: {match[1]} has a parameter {unknown}", file=sys.stderr)
            continue
        types = "".join(LETTERS[type_] for type_, _ in types_and_names)
        names = [name for _, name in types_and_names]
        constant = {
            name for name, parameter in zip(names, parameters, strict=False) if re.search(r"\bconst\b", parameter)
        }
        yield match[1], Prototype(types, names, written(types, names, constant), source)


def written(types: str, names: list[str], constant: set[str]) -> list[str]:
    """Return the tensors that are not ``const``, or nothing if no output is among them.

    Many declarations have ``const`` everywhere, or everywhere but at tensors that are written in place (``…Ref``).
    """
    free = [name for name in tensors(types, names) if name not in constant]
    if all(name.endswith("Ref") for name in free):
        return []
    return [name for name in tensors(types, names) if name in free or name.endswith("Ref")]


def tensors(types: str, names: list[str]) -> list[str]:
    return [name for name, letter in zip(names, types, strict=True) if letter in "tTo"]


def type_and_name(parameter: str) -> tuple[str, str]:
    """Split ``const aclTensor *self`` into ``("aclTensor*", "self")``."""
    match = PARAMETER.fullmatch(re.sub(r"\bconst\b|\bstruct\b|\bstd::", "", parameter).strip())
    return ("".join(f"{match[1]}{match[2]}".split()), match[3] or "") if match else (parameter, "")


def defined(text: str, source: str) -> Iterator[tuple[str, Prototype]]:
    """Yield the names and prototypes that CANN generates from a definition: inputs, attributes, outputs.

    An item of version 2 is an argument of the interface V2 only.
    """
    match = DEFINITION.search(text)
    if not match:
        return
    items = ITEM.findall(COMMENT.sub("", text))
    inputs = {name for which, name, _ in items if which == "Input"}
    results = {name for which, name, _ in items if which == "Output"}
    constants = dict(re.findall(r"(\w+) = (\d+);", text))
    versions = [int(constants[found[1]]) if (found := VERSION.search(item)) else 1 for _, _, item in items]
    for version in range(1, max(versions, default=1) + 1):
        arguments = [
            (name, attribute_letter(properties) if part == "Attr" else tensor_letter(properties))
            for part in ("Input", "Attr", "Output")
            for (which, name, properties), since in zip(items, versions, strict=True)
            # an output of an input's name is written in place
            if which == part and since <= version and not (which == "Output" and name in inputs)
        ]
        suffix = f"V{version}" if version > 1 else ""
        names = [camel_case(name) for name, _ in arguments]
        outputs = [camel_case(name) for name, _ in arguments if name in results]
        yield f"aclnn{match[1]}{suffix}", Prototype("".join(letter for _, letter in arguments), names, outputs, source)


def attribute_letter(properties: str) -> str:
    return next(ATTRIBUTES[name] for name in re.findall(r"\.(\w+)\(", properties) if name in ATTRIBUTES)


def tensor_letter(properties: str) -> str:
    if ".ScalarList(" in properties:
        return "S"
    if ".Scalar(" in properties:
        return "s"
    if ".ValueDepend(" in properties:
        return next((letter for dtype, letter in ARRAYS.items() if re.search(rf"\b{dtype}\b", properties)), "t")
    return "T" if "ParamType(DYNAMIC)" in properties else "t"


def camel_case(name: str) -> str:
    return re.sub(r"_(\w)", lambda match: match[1].upper(), name)


def table(
    found: dict[str, list[Prototype]], versions: dict[str, set[str]], first_hand: dict[str, list[Prototype]]
) -> str:
    """Return the prototypes as JSON, one line an operator."""
    lines = []
    for name in sorted(found):
        best = found[name][0]
        for types, source in sorted({(p.types, p.source) for p in found[name] if p.types != best.types}):
            print(f"{name}: {best.types} in {best.source}, {types} in {source}", file=sys.stderr)
        entry: dict[str, object] = best._asdict() | {"outputs": outputs(name, found[name])}
        entry["source"] = first_source(best, first_hand.get(name, []))
        since = next(version for version in VERSIONS if version in versions[name])
        if since != next(iter(VERSIONS)):
            entry["since"] = since
        lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def first_source(best: Prototype, first_hand: list[Prototype]) -> str:
    """Return the first-hand source of the same declaration, unless that of ``best`` has the same owner."""
    same = (other.source for other in first_hand if other[:2] == best[:2])
    source = next(same, best.source)
    return best.source if best.source.partition("/")[0] == source.partition("/")[0] else source


def outputs(operator: str, declarations: list[Prototype]) -> list[str]:
    """Return the arguments that an operator writes.

    The first declaration that tells counts. Otherwise the names tell: ``…Ref`` is written in place, ``out`` and
    ``…Out`` are outputs, unless they are the gradient of one. Otherwise it is the last tensor.
    """
    if operator in WRITTEN:
        return WRITTEN[operator]
    names = tensors(declarations[0].types, declarations[0].arguments)
    for declaration in declarations:
        declared_names = tensors(declaration.types, declaration.arguments)
        if declaration.outputs and len(declared_names) == len(names):
            return [names[declared_names.index(output)] for output in declaration.outputs]
    in_place = [name for name in names if name.endswith("Ref")]
    if not in_place and "Inplace" in operator:
        in_place = names[:1]
    named = [name for name in names if OUTPUT.search(name)]
    found = in_place + ([name for name in named if not GRADIENT.match(name)] or ([] if in_place else named[-1:]))
    if not found:
        print(f"{operator}: no declaration says what it writes", file=sys.stderr)
    return [name for name in names if name in found] or names[-1:]


if __name__ == "__main__":
    main()
