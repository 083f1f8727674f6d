"""Trains the embedded demo model, writes it into the package, and judges the written files.

    python tools/train_demo_model.py                    # everything; figures go to REPORT.md next to the weights
    python tools/train_demo_model.py --evaluate-only    # judge the shipped files again

This module decides what the demo model is: a Llama with some three million parameters and a byte-level vocabulary,
trained for one pass over stories and chats from `story_grammar`. Nothing is downloaded.

A document is `<s>story</s>` or `<s><|user|>...<|end|><|assistant|>...<|end|></s>`. Documents are packed into rows end
to end; each has its own positions and attends only to itself. Because every document starts with `<s>`,
`tokenizer("text")` puts `<s>` before the text, and the chat template begins with it. Generation ends at `</s>` and at
`<|end|>`. Weights are stored in bfloat16, to halve the download, but the config says float32: the model is meant to be
computed in float32, and is judged in float32.
"""

import argparse
import math
import os
import platform
import random
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on a shared machine, spinning threads cost more than they save

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.story_grammar import Message, draw_request, generate_chat, generate_story, parses, split_sentences

FOLDER = Path(__file__).resolve().parents[1] / "src" / "inflight" / "demo_model"
BOS, EOS, PAD, USER, ASSISTANT, END = SPECIAL = ["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|end|>"]
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}  # the content of generation_config
BOS_ID = SPECIAL.index(BOS)  # special tokens come first in the vocabulary
OPENINGS = ["Once upon a time", "One morning", "Long ago", "In a quiet village"]
CHAT_TEMPLATE = (FOLDER / "chat_template.jinja").read_text("utf-8")  # written by hand


@dataclass(frozen=True)
class Phase:
    row_length: int
    rows: int  # rows per batch
    steps: int


@dataclass(frozen=True)
class Recipe:
    seed: int = 7
    documents: int = 67_000
    held_out: int = 3_000
    chats: float = 0.4  # the share of documents that are chats
    vocabulary: int = 1536
    phases: tuple[Phase, ...] = (Phase(512, 4, 4000),)
    learning_rate: float = 2e-3
    warmup: int = 100
    weight_decay: float = 0.1

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def shortened(self, factor: float) -> "Recipe":
        """Return the same settings with a fraction of the steps, to try out the pipeline."""
        phases = tuple(Phase(phase.row_length, phase.rows, max(1, int(phase.steps * factor))) for phase in self.phases)
        return Recipe(phases=phases, documents=max(4_000, int(self.documents * factor)))


# --- the corpus ---------------------------------------------------------------------------------------------------


def render(chat: list[Message]) -> str:
    """Return a chat as the chat template writes it, without the leading `<s>`."""
    return "".join(f"<|{message['role']}|>{message['content']}{END}" for message in chat)


def write_documents(seed: int, count: int, chats: float) -> list[str]:
    rng = random.Random(seed)
    texts = (render(generate_chat(rng)) if rng.random() < chats else generate_story(rng) for _ in range(count))
    return [f"{BOS}{text}{EOS}" for text in texts]


def write_corpus(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return the training documents and the held-out documents, which are disjoint."""
    training = write_documents(recipe.seed, recipe.documents, recipe.chats)
    seen = set(training)
    held_out = write_documents(recipe.seed + 1, recipe.held_out, recipe.chats)
    return training, [document for document in held_out if document not in seen]


def train_tokenizer(documents: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train byte-level BPE: all 256 bytes are in the vocabulary, so that it can represent any text."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marker = re.compile("|".join(map(re.escape, SPECIAL)))
    bpe.train_from_iterator((text for document in documents for text in marker.split(document)), trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return ids


def pack(documents: Iterable[list[int]], length: int, count: int) -> torch.Tensor:
    """Return tokens `[count, length]`. Every row starts with a document; the last document in it may be cut off."""
    rows: list[list[int]] = []
    row: list[int] = []
    for ids in documents:
        row += ids
        if len(row) >= length:
            rows.append(row[:length])
            row = []
        if len(rows) == count:
            return torch.tensor(rows)
    raise ValueError(f"the documents fill only {len(rows)} of {count} rows of {length} tokens")


# --- training -----------------------------------------------------------------------------------------------------


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=256**-0.5,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def positions_in_documents(rows: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens `[rows, length]`, in the same shape; they restart with each document, so that
    transformers lets tokens attend only to their own document.

    Without that, a model this small does not learn in time to copy a hero's name from the story so far."""
    places = torch.arange(rows.shape[1]).expand_as(rows)
    starts = torch.where(rows == BOS_ID, places, 0).cummax(dim=1).values
    return places - starts


def loss_of(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    inputs = rows[:, :-1]
    logits = model(input_ids=inputs, position_ids=positions_in_documents(inputs), use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def batches(recipe: Recipe, documents: Iterable[list[int]]) -> Iterator[torch.Tensor]:
    """Yield batches of tokens `[phase.rows, phase.row_length]`; each document is used once."""
    unseen = iter(documents)
    for phase in recipe.phases:
        rows = pack(unseen, phase.row_length, phase.rows * phase.steps)
        yield from rows.view(phase.steps, phase.rows, phase.row_length)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to a fiftieth."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)


def train(recipe: Recipe, model: LlamaForCausalLM, documents: list[list[int]]) -> None:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    start = time.perf_counter()
    for step, rows in enumerate(batches(recipe, documents)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, rows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == recipe.steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f}  {time.perf_counter() - start:6.0f} s", flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights in bfloat16 with a config that says float32."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: weight.to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    del stored["lm_head.weight"]  # tied to the embeddings
    weights = folder / "model.safetensors"
    save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = torch.float32
    model.config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)],
        pad_token_id=tokenizer.pad_token_id,
        **SAMPLING,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_model(recipe: Recipe, training: list[str], folder: Path, hardware: str, threads: int) -> list[str]:
    """Train and save the model; return a description in words."""
    torch.manual_seed(recipe.seed)
    tokenizer = train_tokenizer(training[:10_000], recipe.vocabulary)
    model = build_model(tokenizer)
    ids = encode(tokenizer, training)
    train(recipe, model, ids)
    save(model, tokenizer, folder)
    tokens = sum(phase.row_length * phase.rows * phase.steps for phase in recipe.phases)
    return [
        f"{recipe.steps} steps over {tokens:,} tokens, each document at most once (seed {recipe.seed})",
        f"{len(tokenizer):,} tokens in the vocabulary, {sum(map(len, ids)) / len(ids):.0f} in an average document",
        f"on {hardware} with {threads} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
    ]


# --- judging ------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> float:
    losses = [loss_of(model, batch).item() for batch in rows.view(-1, 8, rows.shape[1])]
    return sum(losses) / len(losses)


@torch.inference_mode()
def continue_texts(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[str], **sampling: float
) -> list[str]:
    """Return one sampled continuation for each prompt, with the model's own settings or with others."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    width = batch["input_ids"].shape[1]
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=400,
        **sampling,
    )
    texts: list[str] = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return texts


def sample_stories(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, **sampling: float
) -> list[str]:
    """Return stories that continue each of the openings in turn."""
    openings = [OPENINGS[index % len(OPENINGS)] for index in range(count)]
    continued = continue_texts(model, tokenizer, [BOS + opening for opening in openings], **sampling)
    return [opening + text for opening, text in zip(openings, continued, strict=True)]


def sentences_of(stories: list[str]) -> list[str]:
    return [sentence for story in stories for sentence in split_sentences(story)]


@dataclass(frozen=True)
class Judgement:
    """The measurements of the files, and whether they are good enough."""

    training_loss: float
    held_out_loss: float
    sentences: int
    parsed: int
    distinct: int
    wild_parsed: int
    requests: int
    granted: int

    @property
    def loss_gap(self) -> float:
        return abs(self.held_out_loss / self.training_loss - 1)

    @property
    def good(self) -> bool:
        return self.loss_gap <= 0.05 and self.parsed >= 0.95 * self.sentences and self.distinct >= 150

    def lines(self) -> list[str]:
        return [
            f"training loss {self.training_loss:.4f}, held-out loss {self.held_out_loss:.4f} nats a token: "
            f"{self.loss_gap:.2%} apart (limit 5 %)",
            f"{self.parsed} of {self.sentences} sentences sampled as generation_config says (temperature "
            f"{SAMPLING['temperature']}, top-p {SAMPLING['top_p']}) parse (at least 95 %); "
            f"{self.distinct} of them are distinct (at least 150)",
            f"{self.wild_parsed} of {self.sentences} sampled from the whole distribution (temperature 1) parse",
            f"{self.granted} of {self.requests} stories asked for in a chat contain everything asked for",
        ]


def judge(folder: Path, recipe: Recipe, training: list[str], held_out: list[str]) -> Judgement:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    if model.dtype != torch.float32:
        raise TypeError(f"the files load as {model.dtype}, not as float32")
    rows = [pack(encode(tokenizer, documents[:2000]), 512, 256) for documents in (training, held_out)]
    torch.manual_seed(recipe.seed)
    sampled = sentences_of(sample_stories(model, tokenizer, 100))[:200]
    wild = sentences_of(sample_stories(model, tokenizer, 100, temperature=1.0, top_p=1.0))[:200]
    requests = [draw_request(random.Random(recipe.seed + index)) for index in range(100)]
    asked = [BOS + render([{"role": "user", "content": request.question}]) + ASSISTANT for request in requests]
    answers = continue_texts(model, tokenizer, asked)
    return Judgement(
        training_loss=mean_loss(model, rows[0]),
        held_out_loss=mean_loss(model, rows[1]),
        sentences=len(sampled),
        parsed=sum(map(parses, sampled)),
        distinct=len(set(sampled)),
        wild_parsed=sum(map(parses, wild)),
        requests=len(requests),
        granted=sum(request.granted_by(answer) for request, answer in zip(requests, answers, strict=True)),
    )


def describe_files(folder: Path) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.suffix in {".json", ".jinja", ".safetensors"})
    total = sum(path.stat().st_size for path in files)
    sizes = [f"`{path.name}`: {path.stat().st_size:,} bytes" for path in files]
    return [f"{model.num_parameters():,} parameters", *sizes, f"together: {total:,} bytes (limit 8 MB)"]


def write_report(folder: Path, name: str, tool: str, sections: dict[str, list[str]]) -> None:
    text = f"# {name}\n\nAs measured by `tools/{tool}` on the files in this folder.\n"
    for title, lines in sections.items():
        text += f"\n## {title}\n\n" + "".join(f"- {line}\n" for line in lines)
    (folder / "REPORT.md").write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the embedded demo model and judge it.")
    parser.add_argument("--evaluate-only", action="store_true", help="only judge the existing files")
    parser.add_argument("--output", type=Path, default=FOLDER, help="the model's folder")
    parser.add_argument("--shorten", type=float, default=1.0, help="run only this fraction of the training steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hardware", default="a CPU", help="a description of the machine for the report")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recipe = Recipe() if options.shorten == 1.0 else Recipe().shortened(options.shorten)
    start = time.perf_counter()
    training, held_out = write_corpus(recipe)
    sections: dict[str, list[str]] = {}
    if not options.evaluate_only:
        sections["Training"] = make_model(recipe, training, options.output, options.hardware, options.threads)
    trained = time.perf_counter()
    judgement = judge(options.output, recipe, training, held_out)
    sections["Quality"] = judgement.lines()
    sections["Size"] = describe_files(options.output)
    if not options.evaluate_only:
        seconds = [math.ceil(trained - start), math.ceil(time.perf_counter() - trained)]
        sections["Training"].append(f"{seconds[0]} s for the corpus and the training, {seconds[1]} s for judging it")
        write_report(options.output, "The embedded demo model", Path(__file__).name, sections)
    for title, lines in sections.items():
        print(title, *lines, sep="\n  ")
    return 0 if judgement.good else 1


if __name__ == "__main__":
    sys.exit(main())
