"""`LLM.embed`, `score` and `classify`, on checkpoints as they are published."""

import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from inflight import LLM, InvalidRequestError, ModelError
from inflight.entrypoints.pooling_requests import AFTER, BEFORE, INSTRUCTION
from tests.pooling.checkpoints import (
    causal_model,
    classifier,
    draw_ids,
    make_model,
    make_tokenizer,
    save,
    words,
    write_modules,
)

TOLERANCE = 1e-5
TANH = {"in_features": 64, "out_features": 32, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
PLAIN = {"in_features": 32, "out_features": 48, "bias": False, "activation_function": "torch.nn.Identity"}
QUERY = "w9 w10 w11 "


def states_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return states


def assert_close(actual: Any, expected: Any) -> None:
    """Relative to the size of a vector, but of a score at most 1, which may be small by chance."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.linalg.norm(actual - expected) < TOLERANCE * max(np.linalg.norm(expected), 1.0)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bert")
    return save(
        make_model("bert"), folder, "bert", pooling={"pooling_mode_mean_tokens": True}, prompts={"query": QUERY}
    )


@pytest.fixture(scope="module")
def llm(bert: str) -> LLM:
    return LLM(bert)


# ------------------------------------------------------------------------------------------- embeddings


def test_embeddings_are_pooled_and_normalised_as_the_folder_says(llm: LLM) -> None:
    texts, model = words(3, 40, 1), make_model("bert")
    outputs = llm.embed(texts)
    for text, output in zip(texts, outputs, strict=True):
        ids = make_tokenizer()(text)["input_ids"]
        mean = states_of(model, ids).mean(0)
        assert isinstance(output.embedding, array)
        assert_close(output.embedding, mean / mean.norm())
        assert output.num_prompt_tokens == len(ids)


def test_one_text_may_come_without_a_list_and_as_token_ids(llm: LLM) -> None:
    (text,) = words(5)
    ids = make_tokenizer()(text)["input_ids"]
    (as_text,), (as_ids,), (in_list, again) = llm.embed(text), llm.embed(ids), llm.embed([ids, text])
    assert as_text.embedding == as_ids.embedding == in_list.embedding == again.embedding
    assert llm.embed([]) == []


def test_texts_begin_with_a_prompt(llm: LLM) -> None:
    texts = words(4, 9)
    with_prompt = [QUERY + text for text in texts]
    expected = [output.embedding for output in llm.embed(with_prompt)]
    assert [output.embedding for output in llm.embed(texts, prompt_name="query")] == expected
    assert [output.embedding for output in llm.embed(texts, prompt=QUERY)] == expected
    with pytest.raises(InvalidRequestError, match="prompt_name is 'passage'; this model's prompts are: 'query'"):
        llm.embed(texts, prompt_name="passage")


def test_embeddings_can_be_shorter(llm: LLM) -> None:
    whole, short = llm.embed(words(8))[0].embedding, llm.embed(words(8), dimensions=10)[0].embedding
    assert len(whole) == 64
    assert len(short) == 10
    assert_close(short, np.asarray(whole[:10]) / np.linalg.norm(whole[:10]))
    with pytest.raises(InvalidRequestError, match="dimensions is 65; this model's vectors have 64"):
        llm.embed(words(8), dimensions=65)


def test_a_long_text_is_refused_or_cut(llm: LLM) -> None:
    """The folder says 128 tokens, fewer than the model has positions."""
    (text,) = words(140)
    with pytest.raises(InvalidRequestError, match="text 1: the text has 142 tokens; this model's maximum context"):
        llm.embed([words(3)[0], text])
    assert llm.embed(text, truncate_prompt_tokens=-1)[0].num_prompt_tokens == 128
    cut = make_tokenizer()(text, truncation=True, max_length=20)["input_ids"]
    (output,) = llm.embed(text, truncate_prompt_tokens=20)
    assert output.embedding == llm.embed(cut)[0].embedding


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("", "the text is empty"),
        (["w9", ""], "text 1: the text is empty"),
        ([[9, 256]], "token id 256 is out of range; this model has 256 tokens"),
        ([[9, "a"]], "token id 'a' is a str, not an integer"),
        ([[]], "the text has no tokens"),
        (["\ud800"], "at place 0; it must be text that UTF-8 can encode"),
        (7, "the texts are a int"),
        ([None], "the text is a NoneType; it must be text or token ids"),
    ],
)
def test_texts_that_are_none_are_refused(llm: LLM, texts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.embed(texts)


def test_dense_layers_and_prompts_that_are_not_pooled(tmp_path: Path) -> None:
    pooling = {"pooling_mode": ["cls", "mean"], "include_prompt": False}
    first = {**TANH, "in_features": 128}
    model = make_model("roberta")
    name = save(
        model, tmp_path, "roberta", pooling=pooling, dense=(first, PLAIN), normalize=False, prompts={"q": QUERY}
    )
    from safetensors.torch import load_file

    tanh, plain = (load_file(tmp_path / f"{number}_Dense" / "model.safetensors") for number in (2, 3))
    (text,) = words(20)
    (output,) = LLM(name).embed(text, prompt_name="q")
    states = states_of(model, make_tokenizer("roberta")(QUERY + text)["input_ids"])[4:]  # [CLS] and three words
    pooled = torch.cat([states[0], states.mean(0)])
    dense = torch.tanh(tanh["linear.weight"] @ pooled + tanh["linear.bias"])
    assert_close(output.embedding, plain["linear.weight"] @ dense)


def test_a_causal_checkpoint_embeds_by_its_modules(tmp_path: Path) -> None:
    """Qwen3-Embedding is published as a language model, whose head is not needed."""
    model = causal_model("qwen3")
    name = save(model, tmp_path, "qwen3", pooling={"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    (text,) = words(30)
    (output,) = LLM(name).embed(text)
    last = states_of(model.model, make_tokenizer("qwen3")(text)["input_ids"])[-1]
    assert_close(output.embedding, last / last.norm())
    assert LLM(name, task="generate").generate([[9, 10]], use_tqdm=False)[0].outputs[0].token_ids


def test_a_folder_without_modules_is_pooled_by_the_mean(tmp_path: Path) -> None:
    model = make_model("modernbert")
    name = save(model, tmp_path, "modernbert")
    (text,) = words(30)
    mean = states_of(model, make_tokenizer()(text)["input_ids"]).mean(0)
    assert_close(LLM(name).embed(text)[0].embedding, mean)


def test_a_loaded_model_embeds_token_ids() -> None:
    model = make_model("bert")
    (ids,) = draw_ids(12)
    llm = LLM(model)
    assert_close(llm.embed(ids)[0].embedding, states_of(model, ids).mean(0))
    with pytest.raises(InvalidRequestError, match="this model has no tokenizer"):
        llm.embed("w9")


def test_texts_become_lower_case_if_the_folder_says_so(tmp_path: Path) -> None:
    own = {"max_seq_length": 50, "do_lower_case": True}
    name = save(make_model("bert"), tmp_path, "bert", pooling={"pooling_mode_mean_tokens": True}, own=own)
    llm = LLM(name)
    assert llm.embed("W9 W10")[0].embedding == llm.embed("w9 w10")[0].embedding
    assert llm.model_info.max_model_len == 50


# -------------------------------------------------------------------------------- scores and labels


def test_embeddings_are_scored_by_their_cosine(llm: LLM) -> None:
    queries, documents = words(5, 9), words(11, 30)
    vectors = [np.asarray(output.embedding) for output in llm.embed(queries + documents)]
    scores = [output.score for output in llm.score(queries[0], documents)]
    assert_close(scores, [vectors[0] @ vectors[2], vectors[0] @ vectors[3]])
    scores = [output.score for output in llm.score(queries, documents)]
    assert_close(scores, [vectors[0] @ vectors[2], vectors[1] @ vectors[3]])
    with pytest.raises(InvalidRequestError, match="2 texts came with 1 others"):
        llm.score(queries, documents[:1])


@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert", "qwen3"])
def test_a_cross_encoder_scores_pairs(family: str, tmp_path: Path) -> None:
    model = classifier(family, 1)
    llm = LLM(save(model, tmp_path, family))
    queries, documents = words(5, 9), words(11, 30)
    outputs = llm.score(queries, documents)
    for query, document, output in zip(queries, documents, outputs, strict=True):
        read = make_tokenizer(family)(query, document, return_tensors="pt")
        with torch.inference_mode():
            logit = model(**read).logits[0, 0]
        assert_close(output.score, torch.sigmoid(logit))
        assert output.num_prompt_tokens == read["input_ids"].shape[1]


def test_a_pair_is_cut_as_its_tokenizer_cuts_pairs(tmp_path: Path) -> None:
    llm = LLM(save(classifier("bert", 1), tmp_path, "bert"))
    first, second = words(5, 90)
    assert llm.score(first, second, truncate_prompt_tokens=30)[0].num_prompt_tokens == 30
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        llm.score(second, second)


def test_labels_are_given_their_probabilities(tmp_path: Path) -> None:
    model = classifier("roberta", 3, id2label={0: "good", 1: "bad", 2: "ugly"})
    llm = LLM(save(model, tmp_path, "roberta"))
    (text,) = words(14)
    (output,) = llm.classify(text)
    ids = make_tokenizer("roberta")(text)["input_ids"]
    with torch.inference_mode():
        probabilities = model(input_ids=torch.tensor([ids])).logits[0].softmax(0)
    assert_close(output.probs, probabilities)
    assert output.label == ("good", "bad", "ugly")[int(probabilities.argmax())]
    with pytest.raises(InvalidRequestError, match="this model has 3 labels, and so no score"):
        llm.score(text, text)


def rerank_ids(tokenizer: Any, instruction: str, query: str, document: str) -> list[int]:
    def encode(text: str, **options: Any) -> list[int]:
        token_ids: list[int] = tokenizer.encode(text, **options)
        return token_ids

    middle = encode(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    return encode(BEFORE, add_special_tokens=False) + middle + encode(AFTER, add_special_tokens=False)


def test_a_language_model_reranks_by_its_answer(tmp_path: Path) -> None:
    """As Qwen3-Reranker's card has it: how likely "yes" is, of "yes" and "no", after its template."""
    model, tokenizer = causal_model("qwen3"), make_tokenizer("qwen3")
    llm = LLM(save(model, tmp_path, "qwen3"), task="rerank")
    query, document = words(4, 20)
    for instruction in (None, "w9 w12"):
        (output,) = llm.score(query, document, instruction=instruction)
        ids = rerank_ids(tokenizer, instruction or INSTRUCTION, query, document)
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        no, yes = (logits[tokenizer.convert_tokens_to_ids(word)] for word in ("no", "yes"))
        assert_close(output.score, torch.stack([no, yes]).softmax(0)[1])
        assert output.num_prompt_tokens == len(ids)


# -------------------------------------------------------------------------------------- the wrong model


def test_a_model_that_pools_does_not_generate(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="BertModel was loaded to embed; it does not generate text"):
        llm.generate("w9")
    with pytest.raises(InvalidRequestError, match="BertModel was loaded to embed; it classifies nothing"):
        llm.classify("w9")


@pytest.mark.parametrize("llm", [LLM, lambda: LLM(causal_model("gpt2"))])
def test_a_model_that_generates_does_not_pool(llm: Any) -> None:
    """GPT-2's class is called a Model, too."""
    llm = llm()
    for call in (llm.embed, llm.classify, lambda text: llm.score(text, text)):
        with pytest.raises(InvalidRequestError, match=r"generates text; it .* nothing"):
            call("Once")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is not supported with a model that pools"),
        ({"executor": "rows"}, "an executor other than packed is not supported with a model that pools"),
        ({"max_model_len": 500}, "max_model_len is 500; this model accepts at most 160"),
        ({"task": "classify"}, "task is 'classify', but the checkpoint's architecture is BertModel"),
    ],
)
def test_options_that_do_not_fit_are_refused(bert: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LLM(bert, **options)


def test_replicas_pool(bert: str) -> None:
    texts = [[1, 2, 3], [4, 5], [6] * 9]
    expected = [output.embedding for output in LLM(bert).embed(texts)]
    assert [output.embedding for output in LLM(bert, replicas=2).embed(texts)] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": {"pooling_mode": "median"}}, "the model pools by 'median'"),
        ({"dense": ({**TANH, "activation_function": "os.system"},)}, "must be a module of torch.nn"),
        ({"dense": ({**TANH, "in_features": 65},)}, "cannot be multiplied|size mismatch|shapes"),
    ],
)
def test_folders_that_ask_for_something_unknown_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    name = save(make_model("bert"), tmp_path, "bert")
    write_modules(tmp_path, **{"pooling": {"pooling_mode_mean_tokens": True}, **changes})
    with pytest.raises((ModelError, RuntimeError), match=message):
        LLM(name)


# ---------------------------------------------------------------------------------------------- threads


def test_threads_share_a_model(llm: LLM) -> None:
    texts = words(*range(1, 41))
    expected = [output.embedding for output in llm.embed(texts)]
    given: dict[int, Any] = {}

    def call(number: int) -> None:
        given[number] = [output.embedding for output in llm.embed(texts[number::4])]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [given[number] for number in range(4)] == [expected[number::4] for number in range(4)]


def test_weights_are_reloaded(tmp_path: Path) -> None:
    model = make_model("bert")
    llm = LLM(model)
    (ids,) = draw_ids(12)
    llm.embed(ids)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(1.5)
    with pytest.raises(InvalidRequestError, match="weights have changed since"):
        llm.embed(ids)
    llm.reload_weights()
    assert_close(llm.embed(ids)[0].embedding, states_of(model, ids).mean(0))
