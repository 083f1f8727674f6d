"""llama.cpp's `convert_hf_to_gguf.py`, for a model whose tokenizer it does not know: GPT-2's is written instead.

python -m benchmarks.peers.convert_to_gguf LLAMACPP_SOURCES MODEL_FOLDER --outfile FILE --outtype TYPE

The converter recognises a pre-tokenizer by its output for a text and refuses unknown ones. Prompts are token ids here,
so it does not matter which one it writes. Patterns of hybrid layers are read as the model's file has them. Runs in
llama.cpp's environment.
"""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace


def main() -> None:
    sources = sys.argv.pop(1)
    sys.path.insert(0, sources)
    from conversion import base  # type: ignore[import-not-found]

    recognise = base.TextModel.get_vocab_base_pre

    def recognise_or_gpt2(self: object, tokenizer: object) -> object:
        try:
            return recognise(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    load_config = base.AutoConfig.from_pretrained

    def as_published(folder: Path, **options: object) -> object:
        """Leave a pattern of layers to the converter, which does not know the names that `transformers` gives them."""
        if "hybrid_override_pattern" in (Path(folder) / "config.json").read_text():
            raise ValueError("the converter reads the file itself")
        return load_config(folder, **options)

    base.TextModel.get_vocab_base_pre = recognise_or_gpt2
    base.AutoConfig = SimpleNamespace(from_pretrained=as_published)
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
