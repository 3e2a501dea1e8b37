"""The header of a GGUF file, read and checked before the gguf package reads it.

That package follows the numbers of a file wherever they lead: it recurses into nested lists, makes objects of each
entry of a list, and lets tensors share the same bytes. Here each number is compared with the length of the file.

    magic "GGUF", version, number of tensors, number of metadata entries
    each entry: name, type, value; a list: type, length, values
    each tensor: name, number of dimensions, dimensions, type, offset
    the tensors' data, aligned
"""

from __future__ import annotations

import math
import mmap
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
DIMENSIONS = 4  # of a tensor, at most
MOST_ENTRIES, MOST_TENSORS = 2**14, 2**17
LARGEST_LIST, LARGEST_LISTS = 2**20, 2**21  # entries of a list, and of all; Gemma 3 has 1.3 million
LONGEST_NAME = 2**12


class Header(NamedTuple):
    metadata: dict[str, Any]  # without the lists
    shapes: dict[str, tuple[int, ...]]


def read_header(path: Path) -> Header:
    """The metadata and the tensors' shapes; a ValueError says what is wrong with the file."""
    with open(path, "rb") as file:
        if not (size := file.seek(0, 2)):
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            return _Reader(data).read()


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.offset, self.order = data, 0, "<"
        self.entries = 0  # of all lists

    def read(self) -> Header:
        if self._bytes(4) != MAGIC:
            raise ValueError("it does not start with GGUF")
        version = self._scalar("I")
        if version & 0xFFFF == 0:  # written on a machine of the other byte order
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise ValueError(f"it has version {version}; 2 and 3 can be read")
        tensors, entries = self._scalar("Q"), self._scalar("Q")
        if tensors > MOST_TENSORS or entries > MOST_ENTRIES:
            raise ValueError(f"it claims to have {tensors:,} tensors and {entries:,} metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._name()
            if name in metadata:
                raise ValueError(f"it has the metadata entry {name!r} twice")
            metadata[name] = self._value(name)
        infos = [self._tensor() for _ in range(tensors)]
        shapes = {name: shape for name, shape, _, _ in infos}
        if len(shapes) < len(infos):
            raise ValueError("two of its tensors have the same name")
        self._check_data(infos, metadata.get("general.alignment", 32))
        return Header({name: value for name, value in metadata.items() if value is not None}, shapes)

    def _value(self, name: str) -> Any:
        """A scalar or a text; None for a list, which is skipped."""
        kind = self._scalar("I")
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise ValueError(f"the metadata entry {name!r} has the unknown type {kind}")
        kind, length = self._scalar("I"), self._scalar("Q")
        self.entries += length
        if length > LARGEST_LIST or self.entries > LARGEST_LISTS:
            raise ValueError(f"the list {name!r} has {length:,} entries, more than a tokenizer has")
        if kind in SCALARS:
            self._skip(length * struct.calcsize(SCALARS[kind]))
        elif kind == STRING:
            for _ in range(length):
                self._skip(self._scalar("Q"))
        else:
            raise ValueError(f"the list {name!r} holds other lists, or values of the unknown type {kind}")
        return None

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset."""
        name, dimensions = self._name(), self._scalar("I")
        if dimensions > DIMENSIONS:
            raise ValueError(f"the tensor {name!r} has {dimensions:,} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _check_data(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: Any) -> None:
        """The tensors lie within the file, and do not share bytes."""
        from gguf.constants import GGML_QUANT_SIZES

        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 2**20:
            raise ValueError(f"its alignment is {alignment!r}, not a power of two")
        start = -(-self.offset // alignment) * alignment
        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        spans = []
        for name, shape, kind, offset in infos:
            if kind not in sizes:
                raise ValueError(f"the tensor {name!r} has the unknown type {kind}")
            block, block_bytes = sizes[kind]
            count = math.prod(shape)
            if not count or (shape and shape[0] % block):
                raise ValueError(f"the tensor {name!r} of type {kind} cannot have the shape {shape}")
            end = start + offset + count // block * block_bytes
            if end > len(self.data):
                raise ValueError(f"it is truncated, it has only {len(self.data):,} bytes: {name!r} ends at {end:,}")
            spans.append((start + offset, end, name))
        spans.sort()
        for (_, end, name), (begin, _, other) in pairwise(spans):
            if begin < end:
                raise ValueError(f"the tensors {name!r} and {other!r} share bytes")

    def _name(self) -> str:
        length = self._scalar("Q")
        if length > LONGEST_NAME:
            raise ValueError(f"a name has {length:,} characters")
        return self._bytes(length).decode()

    def _text(self) -> str:
        return self._bytes(self._scalar("Q")).decode()

    def _scalar(self, code: str) -> Any:
        layout = self.order + code
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))[0]

    def _bytes(self, count: int) -> bytes:
        start = self.offset
        self._skip(count)
        return self.data[start : self.offset]

    def _skip(self, count: int) -> None:
        if self.offset + count > len(self.data):
            raise ValueError(f"it is truncated, it has only {len(self.data):,} bytes")
        self.offset += count
