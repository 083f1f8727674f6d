"""llama.cpp's `convert_hf_to_gguf.py`, for a model whose tokenizer it does not know: GPT-2's is written instead.

python -m benchmarks.peers.convert_to_gguf LLAMACPP_SOURCES MODEL_FOLDER --outfile FILE --outtype TYPE

The converter recognises a pre-tokenizer by its output for a text and refuses unknown ones. Prompts are token ids here,
so it does not matter which one it writes. Runs in llama.cpp's environment.
"""

import runpy
import sys


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

    base.TextModel.get_vocab_base_pre = recognise_or_gpt2
    runpy.run_path(f"{sources}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
