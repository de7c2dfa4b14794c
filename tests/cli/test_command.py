"""The `longleaf` command as a shell sees it: output and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.fake_api import JOB, Request, fake_api, sse

ROOT = Path(__file__).parents[2]
RESULT = {
    "type": "ask",
    "model": "m",
    "outputs": [
        {
            "text": "Forty-two.",
            "question": "How many?",
            "finish_reason": "stop",
            "usage": {
                "prompt_tokens": 1000,
                "cached_tokens": 960,
                "prefilled_tokens": 40,
                "output_tokens": 3,
            },
            "timing": {"decode_s": 1.0, "time_to_first_token_s": 0.25},
            "prefix": "exact",
        }
    ],
    "usage": {},
    "timing": {},
}


def longleaf(folder: Path, *words: str, api: str = "http://127.0.0.1:1") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LONGLEAF_API": api, "LONGLEAF_DATA": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "cli", *words], env=env, cwd=folder, capture_output=True, text=True, timeout=60
    )


def finished_job(request: Request) -> None:
    if request.path == "/v1/jobs":
        request.reply(202, JOB)
    elif request.path.endswith("/events"):
        request.stream(sse(1, "job.started") + sse(2, "job.succeeded"))
    elif request.path.endswith("/result"):
        request.reply(200, RESULT)
    else:
        request.reply(200, {**JOB, "state": "succeeded"})


def failed_job(request: Request) -> None:
    if request.path.endswith("/events"):
        request.stream(sse(1, "job.failed"))
    elif request.path == "/v1/jobs":
        request.reply(202, JOB)
    else:
        error = {"code": "engine_crashed", "detail": "three attempts were lost"}
        request.reply(200, {**JOB, "state": "failed", "error": error})


def test_answer_is_printed_with_what_it_cost(tmp_path: Path) -> None:
    with fake_api(finished_job) as url:
        done = longleaf(tmp_path, "ask", "doc_1", "How many?", api=url)
    assert done.returncode == 0
    assert "Forty-two." in done.stdout
    assert "1,000 prompt tokens, 960 of them cached" in done.stdout
    assert "first token after 0.25 s\n" in done.stdout


@pytest.mark.parametrize(
    ("reason", "told"), [("length", "cut at the limit, see --max-tokens"), ("repetition", "repeated itself")]
)
def test_why_an_answer_was_ended_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, told: str
) -> None:
    monkeypatch.setitem(RESULT["outputs"][0], "finish_reason", reason)
    with fake_api(finished_job) as url:
        assert told in longleaf(tmp_path, "ask", "doc_1", "How many?", api=url).stdout


def test_result_as_json_is_the_result_alone(tmp_path: Path) -> None:
    with fake_api(finished_job) as url:
        done = longleaf(tmp_path, "result", "job_1", "--json", api=url)
    assert json.loads(done.stdout)["outputs"][0]["text"] == "Forty-two."


def test_submit_prints_the_job_id_alone(tmp_path: Path) -> None:
    with fake_api(finished_job) as url:
        done = longleaf(tmp_path, "submit", "doc_1", "--prompt", "List the names.", api=url)
    assert (done.returncode, done.stdout) == (0, "job_1\n")


def test_options_of_the_answer_reach_the_api(tmp_path: Path) -> None:
    sent = []

    def keep(request: Request) -> None:
        if request.path == "/v1/jobs":
            sent.append(json.loads(request.body))
        finished_job(request)

    options = ["--temperature", "0.7", "--top-p", "0.9", "--seed", "3", "--stop", "END", "--stop", "\n"]
    with fake_api(keep) as url:
        longleaf(tmp_path, "ask", "doc_1", "How many?", *options, "--thinking", api=url)
        longleaf(tmp_path, "submit", "doc_1", *options, api=url)
    wanted = {"temperature": 0.7, "top_p": 0.9, "seed": 3, "stop": ["END", "\n"]}
    assert [{key: spec[key] for key in wanted} for spec in sent] == [wanted, wanted]
    assert [spec["thinking"] for spec in sent] == [True, False]


def test_an_option_out_of_bounds_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with fake_api(finished_job) as url:
        done = longleaf(tmp_path, "ask", "doc_1", "How many?", "--temperature", "3", api=url)
    assert done.returncode == 2
    assert "temperature" in done.stderr


def test_thinking_is_printed_before_the_answer(tmp_path: Path) -> None:
    def thoughtful(request: Request) -> None:
        if request.path.endswith("/result"):
            output = {**RESULT["outputs"][0], "thinking": "Six by [nine]?"}
            request.reply(200, {**RESULT, "outputs": [output]})
        else:
            finished_job(request)

    with fake_api(thoughtful) as url:
        done = longleaf(tmp_path, "result", "job_1", api=url)
    assert done.stdout.index("Six by [nine]?") < done.stdout.index("Forty-two.")


def test_failed_job_exits_with_1_and_its_reason(tmp_path: Path) -> None:
    with fake_api(failed_job) as url:
        done = longleaf(tmp_path, "ask", "doc_1", "How many?", api=url)
    assert done.returncode == 1
    assert "three attempts were lost" in done.stderr


def test_refusal_exits_with_2_and_the_detail(tmp_path: Path) -> None:
    detail = "the document has 9,000 tokens, the model reads 8,192"
    problem = {"code": "context_exceeded", "detail": detail}
    with fake_api(lambda request: request.reply(413, problem)) as url:
        done = longleaf(tmp_path, "ask", "doc_1", "How many?", api=url)
    assert done.returncode == 2
    assert detail in done.stderr


@pytest.mark.parametrize("source", ["missing.txt", ".", "doc_1/../x"])
def test_source_that_is_neither_file_nor_id_is_refused(tmp_path: Path, source: str) -> None:
    done = longleaf(tmp_path, "ask", source, "How many?")
    assert done.returncode == 2
    assert "neither a file nor a document id" in done.stderr


def test_missing_api_exits_with_3_and_says_how_to_start_it(tmp_path: Path) -> None:
    done = longleaf(tmp_path, "status", "job_1")
    assert done.returncode == 3
    assert "longleaf up" in done.stderr


def test_bad_setting_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("LONGLEAF_PORT=many\n")
    done = longleaf(tmp_path, "models")
    assert done.returncode == 2
    assert "LONGLEAF_PORT='many' is not accepted" in done.stderr


def test_contradicting_options_are_refused(tmp_path: Path) -> None:
    done = longleaf(tmp_path, "submit", "doc_1", "--summarize", "--prompt", "x")
    assert done.returncode == 2


def test_plan_prints_what_a_model_folder_needs(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = longleaf(tmp_path, "plan", str(tmp_path), "--context", "131072", "--memory", "16GB")
    assert done.returncode == 0
    assert "weights                 16.06 GB" in done.stdout
    assert "fits in 16.00 GB?             no" in done.stdout


def test_plan_of_a_model_that_is_not_there_exits_with_2(tmp_path: Path) -> None:
    done = longleaf(tmp_path, "plan", "nobody/nothing")
    assert done.returncode == 2
    assert "python -m worker.models pull nobody/nothing" in done.stderr


@pytest.mark.parametrize(
    ("prefix_id", "status", "said"),
    [("ab" * 16, 0, f"{'ab' * 16}: 448 tokens, 320 of them before"), (None, 1, "nothing is stored")],
)
def test_a_document_is_warmed_and_the_prefix_named(
    tmp_path: Path, prefix_id: str | None, status: int, said: str
) -> None:
    bodies = []

    def answer(request: Request) -> None:
        if request.path == "/v1/prefixes":
            bodies.append(json.loads(request.body))
            request.reply(202, JOB | {"type": "warm"})
        elif request.path.endswith("/result"):
            usage = {"prompt_tokens": 448, "cached_tokens": 320, "prefilled_tokens": 128}
            result = {"type": "warm", "outputs": [], "usage": usage, "prefix_id": prefix_id}
            request.reply(200, RESULT | result)
        else:
            finished_job(request)

    with fake_api(answer) as url:
        done = longleaf(tmp_path, "prefixes", "warm", "doc_1", "--model", "m", api=url)
    assert (done.returncode, bodies) == (
        status, [{"documents": ["doc_1"], "model": "m", "thinking": False}],
    )  # fmt: skip
    assert said in done.stdout + done.stderr
