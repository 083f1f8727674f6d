"""llama.cpp's `convert_hf_to_gguf.py`, for a model whose tokenizer it does not know: it is taken for GPT-2's.

python -m benchmarks.peers.convert_to_gguf LLAMACPP_SOURCES MODEL_FOLDER --outfile FILE --outtype TYPE

The converter recognises a pre-tokenizer by what it makes of a text and refuses others. Prompts are token ids here, so
that it does not matter which one it writes down. Run by the environment of llama.cpp.
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
