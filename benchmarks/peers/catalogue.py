"""The peers: their names, the precisions that they support, and the places of their environments.

Decides neither how a peer is run (its runner does) nor what it loads (`models.py` does).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parents[1]
ENVIRONMENTS = FOLDER / ".environments"
REQUIREMENTS = FOLDER / "requirements"

OURS = "inflight"
Precision: TypeAlias = tuple[str, str | None]
"""dtype and quantization."""
FLOATS: tuple[Precision, ...] = (("float32", None), ("bfloat16", None))
INT8: tuple[Precision, ...] = (("float32", "int8"), ("bfloat16", "int8"))
INT4: tuple[Precision, ...] = tuple((dtype, bits) for dtype in ("float32", "bfloat16") for bits in ("int4", "q4_k_m"))
"""In four bits: as each engine rounds to them by itself; and llama.cpp's usual file, which others that do not read it
replace by their own four bits."""
FEW_BITS: tuple[Precision, ...] = tuple(("bfloat16", kind) for kind in ("q2_k", "q3_k_m", "tq2_0"))
"""Files of llama.cpp's of two and three bits."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine in the comparison.

    Attributes:
        name: the name on the command line.
        title: the name in the report.
        module: its runner, for `python -m`.
        model_format: the format that it loads: a name that `models.prepare` knows.
        precisions: the precisions that it supports on a CPU.
        speculations: which drafters it has: "ngram", "draft".
        environment: its folder in `ENVIRONMENTS`; None: it shares the environment of `compare.py`.
        unwanted_packages: dependencies that are removed after installation.
        needs_build: whether something must be compiled after installation.
    """

    name: str
    title: str
    module: str
    model_format: str = "hf"
    precisions: tuple[Precision, ...] = FLOATS
    speculations: tuple[str, ...] = ()
    environment: str | None = None
    unwanted_packages: tuple[str, ...] = ()
    needs_build: bool = False

    @property
    def root(self) -> Path:
        """The folder of its environment."""
        return ENVIRONMENTS / self.environment if self.environment else Path(sys.prefix)

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python" if self.environment else Path(sys.executable)

    @property
    def requirements(self) -> Path:
        return REQUIREMENTS / f"{self.environment}.txt"

    @property
    def is_installed(self) -> bool:
        return self.environment is None or self.installed_mark.exists()

    @property
    def installed_mark(self) -> Path:
        """A file that exists once the installation is complete."""
        return self.root / ".installed"


UNWANTED_TORCH_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            OURS,
            "inflight",
            "benchmarks.peers.this_engine",
            precisions=FLOATS + INT8 + INT4 + FEW_BITS,
            speculations=("ngram", "draft"),
        ),
        Peer("hf-static", "transformers, static waves", "benchmarks.peers.hf_static"),
        Peer("hf-continuous", "transformers, continuous", "benchmarks.peers.hf_continuous"),
        Peer(
            "openvino",
            "OpenVINO GenAI",
            "benchmarks.peers.openvino_genai_pipeline",
            model_format="openvino",
            precisions=FLOATS + INT8 + INT4,
            environment="openvino",
            unwanted_packages=UNWANTED_TORCH_PACKAGES,
        ),
        Peer(
            "vllm",
            "vLLM (CPU)",
            "benchmarks.peers.vllm_cpu",
            model_format="awq",
            precisions=(*FLOATS, ("bfloat16", "int4"), ("bfloat16", "q4_k_m")),
            speculations=("ngram",),
            environment="vllm",
            unwanted_packages=UNWANTED_TORCH_PACKAGES,
        ),
        Peer(
            "llamacpp",
            "llama.cpp server",
            "benchmarks.peers.llamacpp_server",
            model_format="gguf",
            precisions=FLOATS + INT8 + INT4 + FEW_BITS,
            speculations=("ngram", "draft"),
            environment="llamacpp",
            needs_build=True,
        ),
        Peer(
            "mistralrs",
            "mistral.rs",
            "benchmarks.peers.mistralrs_runner",
            precisions=INT8 + INT4,
            environment="mistralrs",
        ),
        Peer(
            "ctranslate2",
            "CTranslate2",
            "benchmarks.peers.ctranslate2_generator",
            model_format="ctranslate2",
            precisions=(("float32", None), *INT8),  # on a CPU it computes in float32 or int8, never in bfloat16
            environment="ctranslate2",
        ),
    )
}
