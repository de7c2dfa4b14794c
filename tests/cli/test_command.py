"""The `longleaf` command as a shell sees it: output and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def longleaf(
    folder: Path, *words: str, api: str = "http://127.0.0.1:1", stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LONGLEAF_API": api, "LONGLEAF_DATA": str(folder), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "cli", *words],
        env=env,
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
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


def test_missing_api_exits_with_3_and_says_how_to_start_it(tmp_path: Path) -> None:
    done = longleaf(tmp_path, "status", "job_1")
    assert done.returncode == 3
    assert "longleaf up" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LONGLEAF_PORT", "many", "LONGLEAF_PORT='many' is not accepted: a whole number is wanted"),
        ("LONGLEAF_API", "http://::1:8399", "http://[::1]:8321"),
        ("LONGLEAF_API", "localhost:8321", "http://HOST:PORT or https://HOST:PORT is accepted"),
        ("LONGLEAF_API", "http://u:SECRET@h:port", "LONGLEAF_API='http://…@h:port' is not accepted"),
        ("LONGLEAF_API_KEY", "llk_é SECRET", "holds no key"),
        ("SSL_CERT_FILE", "/no/such", "SSL_CERT_FILE='/no/such' is not accepted"),
        ("https_proxy", "http://u:SECRET@[::1", "https_proxy='http://…@[::1' is no proxy that can be used"),
        ("ALL_PROXY", "socks4://10.0.0.1:1080", "socks5://HOST:PORT is accepted"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    variables = {"LONGLEAF_API": "https://longleaf.example", name: value}
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    for variable, its in variables.items():
        monkeypatch.setenv(variable, its)
    done = longleaf(tmp_path, "models", api=variables["LONGLEAF_API"])
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "SECRET" not in done.stderr


def test_an_env_file_of_another_project_is_not_read(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"OWNER=J\xfcrgen\nLOG_FORMAT=pretty\nLONGLEAF_API_KEY=llk_theirs\n")
    shown: list[str | None] = []

    def answer(request: Request) -> None:
        shown.append(request.headers.get("Authorization"))
        request.reply(200, [])

    with fake_api(answer) as url:
        assert longleaf(tmp_path, "models", api=url).returncode == 0
    assert shown == [None]


@pytest.mark.parametrize(("host", "said"), [("[::1", "--host='[::1'"), ("http://x", "without http://")])
def test_a_host_on_the_command_line_is_checked_as_one_of_the_environment(
    tmp_path: Path, host: str, said: str
) -> None:
    done = longleaf(tmp_path, "up", "--host", host)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    "option", [["--summarize"], ["--focus", "x"], ["--length", "long"], ["--language", "de"]]
)
def test_options_of_a_summary_are_refused_with_an_own_instruction(tmp_path: Path, option: list[str]) -> None:
    done = longleaf(tmp_path, "submit", "doc_1", *option, "--prompt", "x")
    assert (done.returncode, option[0] in done.stderr) == (2, True)


def sent_specs(tmp_path: Path, *commands: list[str]) -> list[dict[str, Any]]:
    """What commands send as a job."""
    sent = []

    def keep(request: Request) -> None:
        if request.path == "/v1/jobs":
            sent.append(json.loads(request.body))
        finished_job(request)

    with fake_api(keep) as url:
        for words in commands:
            done = longleaf(tmp_path, *words, api=url)
            assert done.returncode == 0, done.stderr
    return sent


def test_several_documents_are_one_job(tmp_path: Path) -> None:
    asked, summarised = sent_specs(
        tmp_path,
        ["ask", "doc_2", "doc_1", "-q", "Who?", "--question", "Why?", "--language", "German"],
        ["submit", "doc_1", "doc_2", "--focus", "costs", "--length", "long", "--language", "pt-br"],
    )
    assert (asked["documents"], asked["questions"]) == (["doc_2", "doc_1"], ["Who?", "Why?"])
    assert (asked["language"], asked["max_output_tokens"]) == ("de", 512)
    assert summarised["documents"] == ["doc_1", "doc_2"]
    wanted = {"focus": "costs", "length": "long", "language": "pt-BR", "max_output_tokens": 1024}
    assert {name: summarised[name] for name in wanted} == wanted


def test_without_q_a_document_in_the_place_of_a_question_is_no_question(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("B")
    for second in ("doc_2", "b.txt", "-"):
        done = longleaf(tmp_path, "ask", "doc_1", second, "Who?")
        assert done.returncode == 2
        assert f"longleaf ask doc_1 {second} -q" in done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["ask", "doc_1"], "name a question"),
        (["ask", "doc_1", " "], "questions[0]: it is empty"),
        (["ask", "doc_1", "Who?", "--temperature", "3"], "--temperature: 2 is the most, not 3"),
        (["ask", "doc_1", "Who?", "--priority", "now"], "--priority: 'high', 'normal' or 'low' is wanted"),
        (["submit", "doc_1", "--length", "huge"], "--length: 'short', 'medium' or 'long' is wanted, not"),
        (["submit", "doc_1", "--length", ""], "--length: 'short', 'medium' or 'long' is wanted, not ''"),
        (["submit", "doc_1", "--language", "Klingon"], "--language: 'Klingon' is not accepted: no language"),
        (["submit", "doc_1", "--language", ""], "--language: '' is not accepted: no language"),
        (["submit", "doc_1", "--focus", ""], "--focus: it is empty"),
    ],
)  # fmt: skip
def test_what_is_not_accepted_is_told_by_the_name_of_the_option(
    tmp_path: Path, words: list[str], told: str
) -> None:
    done = longleaf(tmp_path, *words)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_document_comes_through_a_pipe(tmp_path: Path) -> None:
    uploads: list[bytes] = []

    def keep(request: Request) -> None:
        if request.path == "/v1/documents":
            uploads.append(request.body)
            document = {
                "id": "doc_1",
                "name": "n",
                "media_type": "text/plain",
                "num_bytes": 7,
                "num_chars": 7,
            }
            request.reply(201, document)
        else:
            finished_job(request)

    with fake_api(keep) as url:
        for words in (["-"], ["/dev/stdin"], ["-", "--name", "minutes.txt"]):
            done = longleaf(tmp_path, "ask", words[0], "Who?", *words[1:], api=url, stdin="A text.")
            assert done.returncode == 0, done.stderr
    assert all(b"A text." in body for body in uploads)
    names = [re.search(rb'filename="([^"]*)"', body) for body in uploads]
    assert [name and name[1] for name in names] == [b"stdin", b"stdin", b"minutes.txt"]


def test_a_refusal_of_the_api_is_told_in_the_words_of_the_command(tmp_path: Path) -> None:
    detail = "job_1 is running; wait with /v1/jobs/job_1?wait=30, or lower max_output_tokens"
    with fake_api(lambda request: request.reply(409, {"code": "x", "detail": detail})) as url:
        done = longleaf(tmp_path, "retry", "job_1", api=url)
    assert "wait with `longleaf wait job_1`, or lower --max-tokens" in done.stderr


HOSTILE = "a\x1b[2J\x9b31m\u202egnp\u2066\u200bb"


def hostile_job(request: Request) -> None:
    """A result, an error and a list whose every text holds what a terminal must not get."""
    if request.path.endswith("/result"):
        output = {**RESULT["outputs"][0], "text": HOSTILE, "question": HOSTILE, "thinking": HOSTILE}
        request.reply(200, {**RESULT, "outputs": [output]})
    elif request.path == "/v1/models":
        request.reply(200, [{"id": HOSTILE, "context_tokens": 10}])
    elif request.path == "/v1/documents?limit=50":
        document = {"id": HOSTILE, "name": HOSTILE, "num_tokens": {}, "num_pages": None, "num_bytes": 1}
        request.reply(200, {"data": [document | {"created_at": "2026-11-29T17:16:01.918Z"}]})
    elif request.path == "/v1/jobs?limit=50":
        job = {**JOB, "spec": {"documents": ["doc_1"], "questions": [HOSTILE]}}
        request.reply(200, {"data": [job | {"created_at": "2026-11-29T17:16:01.918Z"}]})
    elif request.path == "/v1/jobs/job_2":
        request.reply(200, {**JOB, "state": "failed", "error": {"code": HOSTILE, "detail": HOSTILE}})
    else:
        request.reply(200, {**JOB, "state": "succeeded"})


@pytest.mark.parametrize(
    "words",
    [
        ["result", "job_1"], ["result", "job_1", "--json"], ["status", "job_2"], ["result", "job_2"],
        ["models"], ["documents"], ["documents", "list", "--json"], ["jobs"], ["ask", HOSTILE, "Who?"],
    ],
)  # fmt: skip
def test_nothing_that_others_wrote_steers_the_terminal(tmp_path: Path, words: list[str]) -> None:
    with fake_api(hostile_job) as url:
        done = longleaf(tmp_path, *words, api=url)
    printed = done.stdout + done.stderr
    assert "31m" in printed
    assert [c for c in printed if not (c.isprintable() or c in "\n\t")] == []
    if "--json" in words:
        assert HOSTILE in json.dumps(json.loads(done.stdout), ensure_ascii=False).replace("\\u001b", "\x1b")


def test_output_whose_reader_went_away_ends_quietly(tmp_path: Path) -> None:
    with fake_api(hostile_job) as url:
        for words in ("result job_1", "result job_1 --json", "models", "status job_1"):
            env = {**os.environ, "LONGLEAF_API": url, "LONGLEAF_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
            read, write = os.pipe()
            os.close(read)
            command = [sys.executable, "-m", "cli", *words.split()]
            done = subprocess.run(
                command, env=env, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, timeout=60
            )
            os.close(write)
            assert (done.returncode, done.stderr) == (141, b""), words


@pytest.mark.parametrize(("quiet", "told"), [([], True), (["--quiet"], False)])
def test_progress_is_told_off_a_terminal_unless_it_is_unwanted(
    tmp_path: Path, quiet: list[str], told: bool
) -> None:
    with fake_api(finished_job) as url:
        done = longleaf(tmp_path, "ask", "doc_1", "How many?", *quiet, api=url)
    assert (done.returncode, bool(done.stderr)) == (0, told)


LONG_NAME = "The minutes of the third meeting of the committee for the harbour and the lighthouse.txt"


def test_jobs_and_documents_are_listed_in_pages(tmp_path: Path) -> None:
    paths = []

    def answer(request: Request) -> None:
        paths.append(request.path)
        if "documents" in request.path:
            item = {
                "id": "doc_1",
                "name": LONG_NAME,
                "num_tokens": {"m": 1234},
                "num_pages": 6,
                "num_bytes": 8587,
            }
        else:
            item = {**JOB, "spec": {"documents": ["doc_1", "doc_2"], "questions": ["Who?", "Why?"]}}
        page = {"data": [item | {"created_at": "2026-11-29T17:16:01.918Z"}], "has_more": True, "next": "x_9"}
        request.reply(200, page)

    with fake_api(answer) as url:
        documents = longleaf(tmp_path, "documents", "list", "--limit", "1", "--after", "doc_0", api=url)
        jobs = longleaf(tmp_path, "jobs", "list", "--state", "failed", api=url)
        assert longleaf(tmp_path, "jobs", "list", "--state", "asleep", api=url).returncode == 2
    assert paths == ["/v1/documents?limit=1&after=doc_0", "/v1/jobs?state=failed&limit=50"]
    assert (f"doc_1  {LONG_NAME}  1,234" in documents.stdout, "8.6 kB" in documents.stdout) == (True, True)
    assert "Who? (and 1 more)" in jobs.stdout
    assert "longleaf documents list --after x_9" in documents.stderr


def test_what_is_in_use_is_told_and_the_rest_is_deleted(tmp_path: Path) -> None:
    asked = []

    def answer(request: Request) -> None:
        asked.append((request.command, request.path))
        if request.path.endswith("_2"):
            request.reply(409, {"code": "document_in_use", "detail": "job_9 reads doc_2 and is not finished"})
        else:
            request.send_response(204)
            request.end_headers()

    with fake_api(answer) as url:
        documents = longleaf(tmp_path, "documents", "rm", "doc_1", "doc_2", "doc_3", api=url)
        jobs = longleaf(tmp_path, "jobs", "rm", "job_1", api=url)
    assert asked == [
        ("DELETE", "/v1/documents/doc_1"), ("DELETE", "/v1/documents/doc_2"),
        ("DELETE", "/v1/documents/doc_3"), ("DELETE", "/v1/jobs/job_1"),
    ]  # fmt: skip
    assert (documents.returncode, documents.stdout) == (2, "doc_1: deleted\ndoc_3: deleted\n")
    assert "job_9 reads doc_2" in documents.stderr
    assert (jobs.returncode, jobs.stdout) == (0, "job_1: deleted\n")


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


KEPT = "1 of its 3 answers is complete and stays its result, and a retry asks only for the others"


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("cancelled", None, ["1 of 3 answers; `longleaf retry job_1` asks for the others", "cancelled"]),
        ("expired", {"code": "expired", "detail": f"too late; {KEPT}"}, [KEPT]),
    ],
)
def test_the_answers_of_a_job_that_ended_early_are_printed(
    tmp_path: Path, state: str, error: dict[str, Any] | None, said: list[str]
) -> None:
    def answer(request: Request) -> None:
        if request.path.endswith("/result"):
            request.reply(200, RESULT | {"num_outputs": 3, "complete": False})
        else:
            request.reply(200, JOB | {"state": state, "error": error, "num_outputs": 3, "num_done": 1})

    with fake_api(answer) as url:
        done = longleaf(tmp_path, "result", "job_1", api=url)
    assert "Forty-two." in done.stdout
    assert done.returncode == 1
    for words in said:
        assert words in done.stderr
    assert done.stderr.count("the others") == 1
