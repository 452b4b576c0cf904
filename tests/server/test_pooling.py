# SPDX-License-Identifier: Apache-2.0
"""Pooling endpoints over HTTP: vectors, classes, scores, ranks, and what they refuse."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rbln_vllm.cli.main import main
from tests.pooling_models import embedding, label_logits, pair_tokenizer, pooling_model_dir
from tests.server.live import MODEL, LiveServer, prompt, running_server, serve_arguments

MAX_LEN = 64
EMBEDDER, SCORER = "BertModel", "BertForSequenceClassification"
QUERY = "What may I distribute?"
DOCUMENTS = [
    "You may reproduce and distribute copies of the Work.",
    "There is no warranty.",
    "Licensor shall mean the copyright owner.",
]


def serve(name: str, tmp_path_factory: pytest.TempPathFactory, **overrides: Any) -> Any:
    directory = pooling_model_dir(name, **overrides)
    arguments = serve_arguments(directory, max_model_len=MAX_LEN, max_num_batched_tokens=128)
    return running_server(arguments, tmp_path_factory.mktemp("pooling") / "log")


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serve(EMBEDDER, tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Compiled ahead of time: the directory says all that there is to say."""
    root = tmp_path_factory.mktemp("compiled")
    model, sizes = str(pooling_model_dir(SCORER, num_labels=1)), ["--max-model-len", str(MAX_LEN)]
    sizes += ["--max-num-seqs", "4", "--max-num-batched-tokens", "128"]
    assert main(["compile", model, "--output", str(root / "model"), *sizes]) == 0
    arguments = [str(root / "model"), "--served-model-name", MODEL]
    with running_server(arguments, root / "log") as server:
        yield server


def post(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    """The answer; HTTPError for a refusal."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps({"model": MODEL, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        answer = json.loads(response.read())
    assert isinstance(answer, dict)
    return answer


def refused(server: LiveServer, path: str, **body: Any) -> tuple[int, str]:
    """Status and message of what must be refused."""
    with pytest.raises(urllib.error.HTTPError) as error:
        post(server, path, **body)
    return error.value.code, error.value.read().decode()


def near(found: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-3, atol=1e-4)


class TestEmbeddings:
    def test_texts_and_tokens(self, embedder: LiveServer) -> None:
        tokens = prompt(20)
        vector = embedding(pooling_model_dir(EMBEDDER), EMBEDDER, tokens, "cls")
        answer = post(embedder, "/v1/embeddings", input=[tokens, tokens[:7]])
        near(answer["data"][0]["embedding"], vector)
        assert answer["usage"]["prompt_tokens"] == 27
        text = post(embedder, "/v1/embeddings", input=QUERY)
        encoded = pair_tokenizer().encode(QUERY)
        vector = embedding(pooling_model_dir(EMBEDDER), EMBEDDER, encoded, "cls")
        near(text["data"][0]["embedding"], vector)

    def test_pooling(self, embedder: LiveServer) -> None:
        answer = post(embedder, "/pooling", input=prompt(9), task="embed")
        vector = embedding(pooling_model_dir(EMBEDDER), EMBEDDER, prompt(9), "cls")
        near(answer["data"][0]["data"], vector)

    def test_the_longest_and_one_more(self, embedder: LiveServer) -> None:
        assert post(embedder, "/v1/embeddings", input=prompt(MAX_LEN))["data"]
        status, message = refused(embedder, "/v1/embeddings", input=prompt(MAX_LEN + 1))
        assert status == 400
        assert str(MAX_LEN) in message
        cut = post(
            embedder,
            "/v1/embeddings",
            input=prompt(MAX_LEN + 1),
            truncate_prompt_tokens=MAX_LEN,
        )
        assert cut["usage"]["prompt_tokens"] == MAX_LEN

    def test_nothing(self, embedder: LiveServer) -> None:
        assert refused(embedder, "/v1/embeddings", input=[])[0] == 400

    def test_generation_is_not_there(self, embedder: LiveServer) -> None:
        status, _ = refused(embedder, "/v1/completions", prompt="a", max_tokens=1)
        assert status in (400, 404)

    def test_many_clients_at_once(self, embedder: LiveServer) -> None:
        """Each gets its own vector, the one it gets alone."""
        prompts = [prompt(length, seed=length) for length in (1, 5, 16, 17, 30, 50, 63, 64)]
        alone = [post(embedder, "/v1/embeddings", input=tokens)["data"] for tokens in prompts]
        found: dict[int, Any] = {}

        def ask(number: int) -> None:
            found[number] = post(embedder, "/v1/embeddings", input=prompts[number % 8])["data"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(found[number] == alone[number % 8] for number in range(24))
        metrics = embedder.metrics()
        assert metrics["rbln_programs_compiled_after_ready_total"] == 0


class TestScores:
    def expected(self, document: str) -> torch.Tensor:
        """A pair's second text has segments of its own."""
        pair = pair_tokenizer()(QUERY, document)
        directory = pooling_model_dir(SCORER, num_labels=1)
        return label_logits(directory, SCORER, pair.input_ids, pair.token_type_ids).sigmoid()

    def test_score(self, scorer: LiveServer) -> None:
        answer = post(scorer, "/score", text_1=QUERY, text_2=DOCUMENTS)
        for item, document in zip(answer["data"], DOCUMENTS, strict=True):
            near([item["score"]], self.expected(document))

    def test_rerank(self, scorer: LiveServer) -> None:
        answer = post(scorer, "/rerank", query=QUERY, documents=DOCUMENTS)
        scores = [float(self.expected(document)) for document in DOCUMENTS]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        assert [item["index"] for item in answer["results"]] == order
        near([item["relevance_score"] for item in answer["results"]], torch.tensor(scores)[order])

    def test_classify(self, scorer: LiveServer) -> None:
        answer = post(scorer, "/classify", input=prompt(12))
        directory = pooling_model_dir(SCORER, num_labels=1)
        near(answer["data"][0]["probs"], label_logits(directory, SCORER, prompt(12)).sigmoid())

    def test_embeddings_are_not_there(self, scorer: LiveServer) -> None:
        assert refused(scorer, "/v1/embeddings", input="a")[0] in (400, 404)
