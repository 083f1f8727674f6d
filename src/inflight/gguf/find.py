"""Whether a model's name means a GGUF file, and which."""

import os
from pathlib import Path

from inflight.contracts.errors import ModelError

SUFFIX = ".gguf"


def find_gguf(source: str | os.PathLike[str], revision: str | None = None) -> Path | None:
    """The GGUF file that a model's name means: a file's path, a folder in which there is one and no config.json, or
    `repository:file` on the Hugging Face hub (`file` may be a part of its name, such as `Q4_K_M`). None if the name
    means something else.

    Raises:
        ModelError: there is no such file, or more than one.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_dir():
        return _only_one(path) if not (path / "config.json").exists() else None
    if name.lower().endswith(SUFFIX):
        if path.is_file():
            return path
        if ":" not in name:
            raise ModelError(f"there is no GGUF file {name!r}")
    repository, colon, file = name.partition(":")
    if colon and not path.exists() and repository.count("/") == 1 and not repository.startswith((".", "/")):
        return _from_hub(repository, file, revision)
    return None


def _only_one(folder: Path) -> Path | None:
    files = sorted(each for each in folder.iterdir() if each.suffix.lower() == SUFFIX)
    if len(files) > 1:
        names = ", ".join(each.name for each in files)
        raise ModelError(f"the folder {str(folder)!r} has several GGUF files: name one of {names}")
    return files[0] if files else None


def _from_hub(repository: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        if not file.lower().endswith(SUFFIX):
            names = HfApi().list_repo_files(repository, revision=revision)
            fitting = [each for each in names if each.lower().endswith(SUFFIX) and file.lower() in each.lower()]
            if len(fitting) != 1:
                found = ", ".join(fitting) or "none"
                raise ModelError(f"{repository!r} has not exactly one GGUF file for {file!r} (it has {found})")
            (file,) = fitting
        return Path(hf_hub_download(repository, file, revision=revision))
    except ModelError:
        raise
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        raise ModelError(f"the model {repository}:{file} cannot be loaded: {line}") from error
