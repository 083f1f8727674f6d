"""Whether a checkpoint has a processor of images or sounds, told without importing torch or `transformers`."""

import os
from contextlib import suppress
from pathlib import Path

FILES = ("processor_config.json", "preprocessor_config.json")


def has_processor(source: str | os.PathLike[str], revision: str | None = None) -> bool:
    """Whether a folder, or a repository on the Hugging Face hub, has one; False if it cannot be reached."""
    path = Path(os.path.expanduser(source))
    if path.exists():
        return any((path / name).exists() for name in FILES)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    for name in FILES:
        with suppress(Exception):  # there is no such file, name or network
            found = try_to_load_from_cache(str(source), name, revision=revision)
            if isinstance(found, str) or (found is None and hf_hub_download(str(source), name, revision=revision)):
                return True
    return False
