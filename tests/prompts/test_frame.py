"""The place of the documents is found in any template that can carry a user's message."""

from __future__ import annotations

import datetime

import pytest

from prompts import SYSTEM, ChatTemplate, PromptError, find_frame
from prompts.frame import MARK

LOOP = "{% for m in messages %}"
TURN = "{{ '[' + m['role'] + ']' + m['content'] }}{% endfor %}[model]"
JOINED = f"[user]{SYSTEM}\n\n"
OWN_TURN = f"[system]{SYSTEM}[user]"

TEMPLATES = {
    "plain": (LOOP + TURN, OWN_TURN, "[model]"),
    "trims": (LOOP + "[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}[model]", None, "\n[model]"),
    "strips in Python's way": (
        LOOP + "[{{ m.role }}]{{ m['content'].strip() }}{% endfor %}[model]",
        OWN_TURN,
        "[model]",
    ),
    "escapes white space": (
        LOOP + "[{{ m.role }}]{{ m.content | tojson }}{% endfor %}[model]",
        f'[system]"{SYSTEM}"[user]"',
        '"[model]',
    ),
    "splits thinking off": (
        LOOP + "[{{ m.role }}]{{ m.content.split('</think>')[-1].lstrip() }}{% endfor %}[model]",
        OWN_TURN,
        "[model]",
    ),
    "prints today's date": (
        "{{ strftime_now('%d %B %Y') }} " + LOOP + TURN,
        f"26 July 2024 {OWN_TURN}",
        "[model]",
    ),
    "takes a date": ("{{ date_string }} " + LOOP + TURN, f"26 Jul 2024 {OWN_TURN}", "[model]"),
    "wants a date": ("{{ 'on ' + datetime + ' ' }}" + LOOP + TURN, f"on 2024-07-26 {OWN_TURN}", "[model]"),
    "refuses a system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}" + LOOP + TURN,
        JOINED,
        "[model]",
    ),
    "drops a system message": (
        LOOP + "{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}{% endfor %}[model]",
        JOINED,
        "[model]",
    ),
    "puts the system's words into the user's turn": (
        "{% set s = messages[0].content %}[user]{{ s }}\n{{ messages[-1].content }}[model]",
        f"[user]{SYSTEM}\n",
        "[model]",
    ),
    "takes content as parts alone": (
        LOOP + "[{{ m.role }}]{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}[model]",
        OWN_TURN,
        "[model]",
    ),
    "fails without tools": (
        "{% for tool in tools %}{{ tool }}{% endfor %}" + LOOP + TURN,
        OWN_TURN,
        "[model]",
    ),
    "branches on tools": (
        "{% if tools is not none %}{{ tools[0].name }}{% endif %}" + LOOP + TURN,
        OWN_TURN,
        "[model]",
    ),
    "adds tools' text": ("{{ 'tools: ' + functions }} " + LOOP + TURN, f"tools: [] {OWN_TURN}", "[model]"),
    "marks what the model writes": (
        LOOP
        + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
        + "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}[model]{% generation %}{% endgeneration %}",
        OWN_TURN,
        "[model]",
    ),
    "breaks out of loops": (
        LOOP + "[{{ m.role }}]{{ m.content }}{% if loop.last %}{% break %}{% endif %}{% endfor %}[model]",
        OWN_TURN,
        "[model]",
    ),
    "names its tokens": ("{{ bos_token }}" + LOOP + TURN + "{{ unk_token }}", f"<s>{OWN_TURN}", "[model]"),
    "indents its blocks": (
        "{%- for m in messages %}\n    {%- if true %}\n[{{ m.role }}]{{ m.content }}\n    {%- endif %}\n"
        "{%- endfor %}\n[model]",
        OWN_TURN,
        "[model]",
    ),
    "repeats a message in a comment of its own": (
        "{# {{ messages }} #}" + LOOP + TURN,
        OWN_TURN,
        "[model]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_place_is_found_in_a_template_that(name: str) -> None:
    source, before, after = TEMPLATES[name]
    frame = find_frame(ChatTemplate(source, {"bos_token": "<s>"}), thinking=False)
    if before is not None:
        assert frame.before == before
    assert SYSTEM in frame.before
    assert frame.after == after
    assert MARK not in frame.before + frame.after


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_what_transformers_renders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.utils.chat_template_utils as theirs

    from prompts.template import THE_DAY, RenderError

    class ThatDay(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> ThatDay:
            return cls(*THE_DAY.timetuple()[:6])

    monkeypatch.setattr(theirs, "datetime", ThatDay)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": 'Is «é» <b>"so"</b>?\n'}]
    variables = {
        "bos_token": "<s>",
        "add_generation_prompt": True,
        "enable_thinking": True,
        "thinking": True,
        "date_string": "26 Jul 2024",
        "datetime": "2024-07-26",
        "tools": None,
    }

    def outcome(render: object) -> object:
        try:
            return render()  # type: ignore[operator]
        except Exception as error:
            return str(error.__cause__ if isinstance(error, RenderError) else error)

    source = TEMPLATES[name][0]
    compiled = theirs._cached_compile_jinja_template(source)
    ours = outcome(lambda: ChatTemplate(source, {"bos_token": "<s>"}).render(messages, True, tools=None))
    assert ours == outcome(lambda: compiled.render(messages=messages, **variables))


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("nothing", "shows the user's message 0 times"),
        (LOOP + "{{ m.content }}{{ m.content }}{% endfor %}", "shows the user's message 2 times"),
        ("{{ raise_exception('Only images') }}", "fails with «Only images»"),
        ("{% if %}", "fails with «Expected an expression"),
        ("{{ messages[5].content.x }}", "fails with «"),
        (LOOP + "{{ m.content | lower }}{% endfor %}", "shows the user's message 0 times"),
    ],
)
def test_a_template_that_carries_no_message_is_refused_with_the_reason(source: str, why: str) -> None:
    with pytest.raises(PromptError, match="choose another model") as caught:
        find_frame(ChatTemplate(source), thinking=False)
    assert caught.value.code == "no_chat_template"
    assert why in str(caught.value)


def test_a_template_cannot_leave_its_sandbox() -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}" + LOOP + TURN
    with pytest.raises(PromptError, match="unsafe"):
        find_frame(ChatTemplate(source), thinking=False)


SWITCHED = "{% if enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
HARMONY = "{# <|channel|>analysis<|message|> #}" + LOOP + TURN + "<|start|>assistant"


@pytest.mark.parametrize(
    ("source", "plain", "asked"),
    [
        (LOOP + TURN, "answer", "answer"),
        (LOOP + TURN + SWITCHED, "before", "thinking"),
        (LOOP + TURN + "<think>\n", "thinking", "thinking"),
        (LOOP + TURN + "{% if not thinking %}<think></think>{% endif %}", "before", "before"),
        (LOOP + TURN + "{% if not thinking %}<|channel>thought\n<channel|>{% endif %}", "before", "before"),
        (HARMONY, "answer", "before"),
    ],
)  # fmt: skip
def test_where_the_answer_begins_is_known(source: str, plain: str, asked: str) -> None:
    stages = [find_frame(ChatTemplate(source), thinking).stage for thinking in (False, True)]
    assert stages == [plain, asked]


def test_gpt_oss_without_thinking_begins_in_its_final_channel() -> None:
    frame = find_frame(ChatTemplate(HARMONY), thinking=False)
    assert frame.after == "[model]<|start|>assistant<|channel|>final<|message|>"
