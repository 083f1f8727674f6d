"""Whether a model's name means a GGUF file, and which."""

import os
from pathlib import Path

from inflight.contracts.errors import ModelError
from inflight.gguf.parts import parts_of, without_further_parts

SUFFIX = ".gguf"


def find_gguf(source: str | os.PathLike[str], revision: str | None = None) -> Path | None:
    """The GGUF file that a model's name means: a file's path, a folder in which there is one and no config.json, or
    `repository:file` on the Hugging Face hub (`file` may be a piece of its name, such as `Q4_K_M`). Of a file in
    several parts, the first. None if the name means something else.

    Raises:
        ModelError: there is no such file, or more than one.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_dir():
        return _only_one(path) if not (path / "config.json").exists() else None
    if name.lower().endswith(SUFFIX):
        if path.is_file():
            first = path.with_name(parts_of(path.name)[0])
            return first if first.is_file() else path
        if ":" not in name:
            raise ModelError(f"there is no GGUF file {name!r}")
    repository, colon, file = name.partition(":")
    if colon and not path.exists() and repository.count("/") == 1 and not repository.startswith((".", "/")):
        return _from_hub(repository, file, revision)
    return None


def _only_one(folder: Path) -> Path | None:
    names = without_further_parts(sorted(each.name for each in folder.iterdir() if each.suffix.lower() == SUFFIX))
    if len(names) > 1:
        raise ModelError(f"the folder {str(folder)!r} has several GGUF files: name one of {', '.join(names)}")
    return folder / names[0] if names else None


def _from_hub(repository: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        if not file.lower().endswith(SUFFIX):
            names = HfApi().list_repo_files(repository, revision=revision)
            fitting = without_further_parts(
                each for each in names if each.lower().endswith(SUFFIX) and file.lower() in each.lower()
            )
            if len(fitting) != 1:
                found = ", ".join(fitting) or "none"
                raise ModelError(f"{repository!r} has not exactly one GGUF file for {file!r} (it has {found})")
            (file,) = fitting
        first, *_ = [hf_hub_download(repository, each, revision=revision) for each in parts_of(file)]
        return Path(first)
    except ModelError:
        raise
    except Exception as error:
        line = str(error).strip().split("\n")[0]
        raise ModelError(f"the model {repository}:{file} cannot be loaded: {line}") from error
