"""A frame as a tree for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from rd2h.cli.inspect.layout import Layout
from rd2h.cli.inspect.report import Fault, Report
from rd2h.wire import PROTOCOL_VERSION, LayerMetadata, ReadRequest
from rd2h.wire.support import at_key

__all__ = ["id_list", "print_report", "printable", "version_text"]

_SHOWN = 8  # items that a list may have before it is cut
_HEAD, _TAIL = 4, 2
_INDEX = re.compile(r'\[(?:\d+|"(?:[^"\\]|\\.)*")\]')


def printable(text: str) -> str:
    """The text with everything escaped that would do something to a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def id_list(ids: Sequence[int], *, full: bool = False) -> str:
    """Block ids with their number and how many runs of neighbours a reader can merge them to."""
    if full or len(ids) <= _SHOWN:
        shown = ", ".join(map(str, ids))
    else:
        head, tail = (", ".join(map(str, part)) for part in (ids[:_HEAD], ids[-_TAIL:]))
        shown = f"{head}, ... {tail}"
    runs = bool(ids) + sum(after != before + 1 for before, after in pairwise(ids))
    return f"[{shown}]" + (f"  {_many(len(ids), 'id')} in {_many(runs, 'run')}" if ids else "")


def version_text(layout: Layout) -> str:
    """The version that a layout implies, in words."""
    if layout.extra:
        extra = _many(len(layout.extra), "element or key", "elements or keys")
        return f"newer than {PROTOCOL_VERSION}: {extra} not known here"
    if not layout.exact:
        return f"version {layout.version}, in a mix that no version sends"
    others = [str(version) for version in layout.exact if version != layout.version]
    return f"version {layout.version}" + (f" (the same in {', '.join(others)})" if others else "")


def print_report(console: Console, report: Report, *, full: bool = False) -> None:
    """Print one frame."""
    console.print(_tree(report, full), highlight=False)


def _tree(report: Report, full: bool) -> Tree:
    title = Text(printable(report.source), "bold").append(": ", "not bold")
    tree = Tree(title, highlight=False)
    if report.fault is not None:
        _add_fault(tree, title, report, report.fault)
    elif report.layout is None:
        title.append("empty frame (a delimiter or a probe; both sides drop it)", "yellow")
    else:
        _add_message(tree, title, report, report.layout, full)
    return tree


def _add_fault(tree: Tree, title: Text, report: Report, fault: Fault) -> None:
    if fault.path is None:
        title.append(printable(fault.reason), "bold red")
        return
    claim = f"{_many(report.size, 'byte')}, by its tag {report.name}" if report.name else ""
    title.append("BAD ", "bold red").append(claim or _many(report.size, "byte"), "not bold")
    tree.add(Text(printable(fault.reason), "red"))
    tree.add(Text(f"at {printable(fault.path)}  {fault.kind}"))
    tree.add(Text("\n".join(fault.excerpt), "dim", no_wrap=True))


def _add_message(tree: Tree, title: Text, report: Report, layout: Layout, full: bool) -> None:
    title.append(f"{report.name}", "bold green")
    title.append(
        f", {report.direction}, {version_text(layout)}, {_many(report.size, 'byte')}", "not bold"
    )
    sizes = layout.element_bytes
    header = f"array header{_size(layout.header_bytes)}, " if layout.header_bytes else ""
    tree.add(Text(f"{header}tag{_size(sizes['tag'])}", "dim"))
    absent = set(layout.absent)
    for name in report.message.__struct_fields__ if report.message is not None else ():
        value = getattr(report.message, name)
        label = Text(f"{name}: ").append(_brief(name, value, full))
        if name in absent:
            label.append("  absent: the default", "yellow")
        else:
            label.append(_size(sizes[name]), "dim")
        branch = tree.add(label)
        if name == "read_reqs":
            for index, request in enumerate(value):
                _add_request(branch, index, request, layout.item_bytes[index], absent, full)
        elif name == "layers":
            for key, layer in value.items():
                _add_layer(branch, key, layer, absent)
    for path in layout.extra:
        size = sizes.get(path.removeprefix("$"))
        note = "" if size is None else _size(size)
        tree.add(Text(f"{printable(path)}{note}: not known here, and ignored", "yellow"))
    if layout.absent:
        tree.add(Text(f"absent, read as defaults: {printable(_grouped(layout.absent))}", "yellow"))


def _brief(name: str, value: object, full: bool) -> str:
    """A value on one line; what is inside a structure comes below it."""
    match value:
        case str():
            return f'"{printable(value)}"'
        case dict():
            return _many(len(value), "layer")
        case list() if name == "read_reqs":
            return _many(len(value), "request")
        case list():
            quoted = [f'"{printable(item)}"' for item in value]
            if full or len(quoted) <= _SHOWN:
                return f"[{', '.join(quoted)}]"
            cut = [*quoted[:_HEAD], "...", *quoted[-_TAIL:]]
            return f"[{', '.join(cut)}]  {len(quoted)} ids"
    return str(value)


def _add_request(
    branch: Tree, index: int, request: ReadRequest, size: int, absent: set[str], full: bool
) -> None:
    title = Text(f'[{index}] "{printable(request.ext_id)}"')
    node = branch.add(title.append(_size(size), "dim"))
    for name in request.__struct_fields__[1:]:
        value = getattr(request, name)
        shown = id_list(value, full=full) if isinstance(value, list) else str(value)
        label = Text(f"{name}: {shown}")
        if f"read_reqs[{index}].{name}" in absent:
            label.append("  absent: the default", "yellow")
        node.add(label)
        if isinstance(value, list) and len(set(value)) < len(value):
            node.add(Text(f"{name} has an id more than once", "yellow"))


def _add_layer(branch: Tree, key: str, layer: LayerMetadata, absent: set[str]) -> None:
    prefix = at_key("layers", key)
    lacking = [name for name in layer.__struct_fields__ if f"{prefix}.{name}" in absent]
    title = Text(f'"{printable(key)}"  main_tensor_count: {layer.main_tensor_count}')
    title.append(f"  has_indexer: {str(layer.has_indexer).lower()}")
    node = branch.add(title)
    if lacking:
        node.add(Text(f"absent: {', '.join(lacking)}", "yellow"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in (
        "tensor",
        "role",
        "base address",
        "block_len",
        "scale",
        "bytes a block",
        "group",
    ):
        table.add_column(heading, justify="left" if heading == "role" else "right", no_wrap=True)
    rows = zip(
        layer.base_addrs,
        layer.block_len,
        layer.block_size_scale,
        layer.tensor_group_idx,
        strict=True,
    )
    for index, (address, length, scale, group) in enumerate(rows):
        table.add_row(
            str(index),
            _role(index, layer),
            f"{address:#x}",
            str(length),
            str(scale),
            str(length * scale),
            str(group),
        )
    node.add(table)


def _role(index: int, layer: LayerMetadata) -> str:
    if index < layer.main_tensor_count:
        return "main"
    if not layer.has_indexer:
        return "unused"
    return "indexer" if index == layer.main_tensor_count else "indexer scale"


def _grouped(names: Sequence[str]) -> str:
    """Names with their indices taken together: ``read_reqs[*].main_start_block (2 times)``."""
    counts = Counter(_INDEX.sub("[*]", name) for name in names)
    return ", ".join(
        f"{name} ({_many(count, 'time')})" if "[*]" in name else name
        for name, count in counts.items()
    )


def _size(size: int) -> str:
    return f" ({_many(size, 'byte')})"


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"
