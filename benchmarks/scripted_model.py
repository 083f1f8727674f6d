"""A model whose steps cost as much as another's, and that answers every prompt with the same text."""

import json
import re
import shutil
from pathlib import Path

from benchmarks.peers.models import MODELS, make_once, model_folder
from tests.agents.turns import TEMPLATE

QUIET = 1e-3
"""What layers add to a token's embedding is made so small."""
UNUSED = 1000
"""The first of the tokens that get the script's names: no text has their names."""


def scripted_model(model: str, script: str) -> tuple[Path, int]:
    """Make a copy of a model with the tokenizer of bytes; return its folder and the number of tokens it answers with.

    Each mark and each four characters of `script` are one token. A token's row of the output weights is the embedding
    of the token before it, so the model, whose layers add next to nothing, writes the script behind a prompt that ends
    with a line break, and then the token that ends answers. Raises `ValueError` if two tokens have the same text.
    """
    source, pieces = model_folder(model), re.findall(r"<[^>]*>|[^<]{1,4}", script)
    if len({*pieces}) < len(pieces):
        raise ValueError("two tokens of the script have the same text")
    return make_once(MODELS / f"{source.name}-scripted", lambda target: _make(source, target, pieces)), len(pieces) + 1


def _make(source: Path, target: Path, pieces: list[str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer, pre_tokenizers

    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))

    file = target / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    names = {UNUSED + number: spell(piece)[0][0] for number, piece in enumerate(pieces)}
    vocabulary = {token: name for name, token in tokenizer["model"]["vocab"].items()} | names
    tokenizer["model"]["vocab"] = {name: token for token, name in vocabulary.items()}
    file.write_text(json.dumps(tokenizer))
    [line_break] = Tokenizer.from_file(str(file)).encode("\n", add_special_tokens=False).ids

    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(QUIET)
    embeddings = weights["model.embed_tokens.weight"].float()
    head = embeddings.roll(1, 0) * QUIET
    order = [line_break, *names, config["eos_token_id"]]
    head[order[1:]] = torch.nn.functional.normalize(embeddings[order[:-1]])
    weights["lm_head.weight"] = head.to(weights["model.embed_tokens.weight"].dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
