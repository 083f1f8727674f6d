"""Finds the GGUF file of a model's name.

A GGUF file in several parts: `NAME-00001-of-00003.gguf` and so on, as llama.cpp's `gguf-split` calls them. The first
has the metadata.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from inflight.contracts.api.errors import ModelError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def parts_of(name: str) -> list[str]:
    """The names of all parts of a file, of which `name` is one; only `name`, if it is none."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    stem, _, count, suffix = match.groups()
    return [f"{stem}-{number:05}-of-{count}{suffix}" for number in range(1, int(count) + 1)]


def without_further_parts(names: Iterable[str]) -> list[str]:
    """Names of files, of which parts after the first are left out if the first is there."""
    given = list(names)
    return [name for name in given if parts_of(name)[0] == name or parts_of(name)[0] not in given]


SUFFIX, MMPROJ = ".gguf", "mmproj"


def find_gguf(source: str | os.PathLike[str], revision: str | None = None) -> Path | None:
    """The GGUF file of a model's name: a file's path, a folder with one and no config.json, `folder:file`, or
    `repository:file` on the Hugging Face hub (`file` may be part of its name, such as `Q4_K_M`). For a file in parts,
    the first. None if the name is something else.

    Raises:
        ModelError: no such file, or several.
    """
    name = os.path.expanduser(os.fspath(source))
    path = Path(name)
    if path.is_dir():
        return _in_folder(path) if not (path / "config.json").exists() else None
    if name.lower().endswith(SUFFIX):
        if path.is_file():
            first = path.with_name(parts_of(path.name)[0])
            return first if first.is_file() else path
        if ":" not in name:
            raise ModelError(f"there is no GGUF file {name!r}")
    place, colon, file = name.rpartition(":")
    if not colon or path.exists():
        return None
    if Path(place).is_file():
        raise ModelError(f"{place!r} is a file, and nothing can be chosen in it: leave out ':{file}'")
    if Path(place).is_dir():
        return _in_folder(Path(place), file)
    if place.count("/") == 1 and not place.startswith((".", "/")):
        return _from_hub(place, file, revision)
    return None


def _in_folder(folder: Path, file: str = "") -> Path | None:
    """The only GGUF file whose name has `file` in it; None if there is none, and none is asked for."""
    names = sorted(each.name for each in folder.iterdir() if each.suffix.lower() == SUFFIX)
    fitting = _fitting(names, file)
    if len(fitting) == 1:
        return folder / fitting[0]
    if file:
        found = ", ".join(without_further_parts(names)) or "none"
        raise ModelError(f"the folder {str(folder)!r} has not exactly one GGUF file for {file!r} (it has {found})")
    if fitting:
        raise ModelError(f"the folder {str(folder)!r} has several GGUF files: name one of {', '.join(fitting)}")
    return None


def _fitting(names: Iterable[str], file: str) -> list[str]:
    """The GGUF files among `names`, one for each that is in parts, whose names have `file` in them. A file of encoders
    (`mmproj`) lies beside a model's."""
    wanted = file.lower()
    ggufs = (each for each in names if each.lower().endswith(SUFFIX) and wanted in each.lower())
    return without_further_parts(each for each in ggufs if MMPROJ in wanted or MMPROJ not in each.lower())


def _from_hub(repository: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        if not file.lower().endswith(SUFFIX):
            names = HfApi().list_repo_files(repository, revision=revision)
            fitting = _fitting(names, file)
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
