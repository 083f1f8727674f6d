"""An invalid header is refused in one sentence, and nothing outside the file is read."""

import itertools
import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from click.testing import CliRunner

from inflight import LLM
from inflight.cli import app
from inflight.contracts.api.config import EngineConfig
from inflight.contracts.api.errors import ModelError
from inflight.execution.hf.gguf_config import read_gguf_config
from inflight.execution.hf.load import load_model
from inflight.gguf.find import find_gguf
from inflight.gguf.header import GgufHeader
from inflight.gguf.summary import GgufSummary
from tests.gguf.files import tiny, write
from tests.gguf.mutations import check_mutations


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a tiny model."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(path, tiny("llama", num_hidden_layers=1), lambda name: "Q4_K" if "attn" in name else "Q6_K")
    return path.read_bytes()


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as refused:
        GgufHeader.read(path)
    message = str(refused.value)
    assert "broken.gguf" in message
    assert "\n" not in message
    return message


def changed(whole: bytes, at: int, what: bytes) -> bytes:
    return whole[:at] + what + whole[at + len(what) :]


def entry_of(whole: bytes, name: str) -> int:
    """Where the sizes of a tensor begin in a header."""
    encoded = name.encode()
    return whole.index(struct.pack("<Q", len(encoded)) + encoded) + 8 + len(encoded)


def test_what_a_header_says_is_what_its_writer_wrote(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header, read = GgufHeader.read(path), gguf.GGUFReader(path)
    assert header.architecture == "llama"
    assert header.metadata["llama.context_length"] == 512
    assert list(header.tensors) == [each.name for each in read.tensors]
    for each in read.tensors:
        own = header.tensors[each.name]
        assert own.shape == tuple(int(size) for size in each.shape[::-1])
        assert own.kind == each.tensor_type.name
        assert (own.start, own.nbytes) == (each.data_offset, each.n_bytes)
    summary = GgufSummary.from_header(header)
    assert summary.cache_bytes_per_token == 1 * 2 * (64 + 64) * 2
    assert summary.context == 512


def test_what_is_impossible_is_refused(tmp_path: Path, whole: bytes) -> None:
    sizes = entry_of(whole, "blk.0.attn_q.weight")
    attention, embedding = struct.pack("<I", 2), entry_of(whole, "token_embd.weight")
    assert whole[sizes : sizes + 4] == attention
    kind, offset = sizes + 4 + 16, sizes + 4 + 16 + 4
    for content, words in [
        (b"", "cannot be read"),
        (b"GGUF", "ends within its header"),
        (b"GGML" + whole[4:], "does not begin with 'GGUF'"),
        (changed(whole, 4, struct.pack("<I", 1)), "has version 1"),
        (changed(whole, 4, struct.pack(">I", 3)), "is big-endian"),
        (changed(whole, 8, struct.pack("<Q", 10**9)), "announces 1000000000 entries"),
        (changed(whole, 16, struct.pack("<Q", 2**63)), "more than it has room for"),
        (changed(whole, 24, struct.pack("<Q", 2**62)), "has a name of"),
        (changed(whole, sizes, struct.pack("<I", 9)), "with 9 dimensions"),
        (changed(whole, sizes + 4, struct.pack("<Q", 2**40)), "ends before its tensor"),
        (changed(whole, sizes + 4, struct.pack("<Q", 100)), "which its type Q4_K cannot have"),
        (changed(whole, sizes + 4, struct.pack("<Q", 0)), "which its type Q4_K cannot have"),
        (changed(whole, kind, struct.pack("<I", 77)), "in type 77, which is unknown"),
        (changed(whole, offset, struct.pack("<Q", 2**50)), "ends before its tensor"),
        (changed(whole, offset, struct.pack("<Q", 3)), "not aligned"),
        (whole[:-100], "ends before its tensor"),
        (whole[:embedding], "it is cut off"),
        (whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), "has two tensors"),
        (whole.replace(b"general.architecture", b"general.architectura"), "does not say what architecture"),
        (whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_\xff.weight"), "not UTF-8"),
    ]:
        assert words in refusal(tmp_path, content)


def test_no_mutation_breaks_the_reader(tmp_path: Path, whole: bytes) -> None:
    """`make soak` makes a hundred times as many."""
    assert check_mutations(whole, tmp_path, random.Random(0), 1000) > 300


def test_a_model_that_cannot_be_read_is_one_sentence(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    for content, words in [
        (whole[:1000], "cut off"),
        (whole.replace(b"llama", b"drama"), "drama"),
        (whole.replace(b"blk.0.attn_k.weight", b"blk.0.attn_x.weight"), "no place for: blk.0.attn_x.weight"),
        (whole.replace(b"token_embd.weight", b"token_embx.weight"), "holds no language model"),
        (changed(whole, -210 * 3 + 208, b"\xff\x7f"), "not finite"),
    ]:
        at_the_end = content if len(content) < len(whole) else content[: len(whole)]
        path.write_bytes(at_the_end)
        with pytest.raises(ModelError, match=words):
            LLM(str(path))


def test_what_cannot_be_honoured_is_refused_and_what_transformers_overlooks_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def config_of(model_type: str, **extra: Any) -> Any:
        model = tiny(model_type, num_hidden_layers=1, vocab_size=32, intermediate_size=256)
        write(path, model, lambda name: "Q4_K", extra=extra)
        return read_gguf_config(GgufHeader.read(path))

    assert config_of("qwen3").head_dim == 64
    linear = config_of("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert linear.rope_parameters["rope_type"] == "linear"
    assert linear.rope_parameters["factor"] == 8.0
    gemma = config_of("gemma3_text", **{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert gemma.rope_parameters["full_attention"]["factor"] == 8.0
    assert gemma.rope_parameters["sliding_attention"]["rope_type"] == "default"
    with pytest.raises(ModelError, match="scales positions in a way"):
        config_of("llama", **{"rope.scaling.type": "longrope", "rope.scaling.factor": 8.0})


def test_frequencies_are_divided_as_the_file_says(tmp_path: Path) -> None:
    path, factors = tmp_path / "model.gguf", torch.linspace(1, 8, 32)
    model = tiny("llama", num_hidden_layers=1, vocab_size=32, intermediate_size=256)
    write(path, model, lambda name: "Q4_K", more={"rope_freqs.weight": factors})
    own = load_model(path, EngineConfig(dtype="float32"))
    expected = model.model.rotary_emb.inv_freq / factors
    assert torch.equal(own.model.rotary_emb.inv_freq, expected)
    write(path, model, lambda name: "Q4_K", more={"blk.0.attn_q.bias": torch.ones(256)})
    with pytest.raises(ModelError, match=r"no place for: blk\.0\.attn_q\.bias"):
        load_model(path, EngineConfig(dtype="float32"))


# ------------------------------------------------------------------------------------------------------ names


def test_a_name_means_a_file(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.Q4_K_M.gguf"
    path.write_bytes(whole)
    assert find_gguf(path) == path
    assert find_gguf(tmp_path) == path
    assert find_gguf("some/repository") is None
    encoders = tmp_path / "mmproj-model-f16.gguf"
    encoders.write_bytes(whole)
    assert find_gguf(tmp_path) == path, "encoders lie beside a model"
    assert find_gguf(f"{tmp_path}:mmproj") == encoders
    header = replace(GgufHeader.read(encoders), metadata={"general.architecture": "clip"}, tensors={})
    with pytest.raises(ModelError, match=r"has the encoders of one \(mmproj\); for images and sounds, give the check"):
        read_gguf_config(header)
    encoders.unlink()
    (tmp_path / "other.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"several GGUF files: name one of model.Q4_K_M.gguf, other.gguf"):
        find_gguf(tmp_path)
    assert find_gguf(f"{tmp_path}:q4_k") == path
    with pytest.raises(ModelError, match=r"not exactly one .* for 'Q9' \(it has model.Q4_K_M.gguf, other.gguf\)"):
        find_gguf(f"{tmp_path}:Q9")
    with pytest.raises(ModelError, match="is a file, and nothing can be chosen in it: leave out ':Q9'"):
        find_gguf(f"{path}:Q9")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(tmp_path) is None
    with pytest.raises(ModelError, match="there is no GGUF file"):
        find_gguf(tmp_path / "missing.gguf")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A file in several parts."""
    write(tmp_path / "model.gguf", tiny("llama", num_hidden_layers=1), lambda name: "Q6_K", tensors_of_part=5)
    return sorted(tmp_path.iterdir())


def test_a_file_in_several_parts_is_one(tmp_path: Path, whole: bytes, parts: list[Path]) -> None:
    assert len(parts) == 3
    assert find_gguf(tmp_path) == find_gguf(parts[0]) == find_gguf(parts[2]) == parts[0]
    (tmp_path / "whole.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"name one of model-00001-of-00003.gguf, whole.gguf"):
        find_gguf(tmp_path)
    header, alone = GgufHeader.read(parts[0]), GgufHeader.read(tmp_path / "whole.gguf")
    assert {name: each.shape for name, each in header.tensors.items()} == {
        name: each.shape for name, each in alone.tensors.items()
    }
    for part in parts:
        for each in gguf.GGUFReader(part).tensors:
            own = header.tensors[each.name]
            assert (own.path, own.start, own.nbytes) == (part, each.data_offset, each.n_bytes)


def test_parts_that_do_not_fit_are_refused(parts: list[Path]) -> None:
    first, second, third = parts

    def says(what: str, path: Path = first) -> None:
        with pytest.raises(ModelError, match=what):
            GgufHeader.read(path)

    says("is one of 3 parts, but not the first, called NAME-00001-of-00003.gguf", second)
    kept = third.read_bytes()
    third.write_bytes(second.read_bytes())
    says("00003-of-00003.gguf' is no GGUF file that can be read: it is not part 3 of 3")
    third.write_bytes(kept[:-100])
    says("ends before its tensor")
    third.unlink()
    says("00003-of-00003.gguf' cannot be read")
    third.write_bytes(kept)
    tensors = GgufHeader.read(first).tensors.values()
    twice, other = next(
        (one, another)
        for one, another in itertools.permutations(tensors, 2)
        if one.path != another.path != first and len(one.name) == len(another.name)
    )
    content = other.path.read_bytes()
    other.path.write_bytes(content.replace(other.name.encode(), twice.name.encode()))
    says("which another part has, too")
    other.path.write_bytes(content)
    first.rename(first.with_name("model.gguf"))
    says("not the first", first.with_name("model.gguf"))


def test_a_file_of_a_repository_is_looked_for_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(tmp_path / file)

    names = ["README.md", "model-Q4_K_M.gguf", "model-Q8_0.gguf", "model-Q4_K_S.gguf"]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *args, **kwargs: names)
    assert find_gguf("org/model:model-Q8_0.gguf", "main") == tmp_path / "model-Q8_0.gguf"
    assert find_gguf("org/model:q4_k_m") == tmp_path / "model-Q4_K_M.gguf"
    assert asked == [("org/model", "model-Q8_0.gguf", "main"), ("org/model", "model-Q4_K_M.gguf", None)]
    with pytest.raises(ModelError, match="has not exactly one GGUF file for 'Q4'"):
        find_gguf("org/model:Q4")
    asked.clear()
    names += ["folder/large-Q6_K-00001-of-00002.gguf", "folder/large-Q6_K-00002-of-00002.gguf"]
    assert find_gguf("org/model:q6_k") == tmp_path / names[-2]
    assert [file for _, file, _ in asked] == names[-2:]


def test_info_reads_only_the_header(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    done = CliRunner().invoke(app, ["info", str(path)])
    assert done.exit_code == 0
    assert "4 in Q4_K" in done.output
    assert "512 tokens" in done.output
    summary = json.loads(CliRunner().invoke(app, ["info", "--json", str(path)]).output)
    assert summary["architecture"] == "llama"
