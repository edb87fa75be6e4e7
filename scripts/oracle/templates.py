"""Compares chat templates of a directory (*.jinja) as rendered by transformers and by cprun: text and generation spans.

    python scripts/oracle/templates.py DIR

prints a row for each template: renders that are equal, renders that both refuse, and the differences. DIR may be
trl/chat_templates of the pip package trl. No template of others is part of cprun.
"""

import datetime
import json
import pathlib
import subprocess
import sys

from transformers.utils import chat_template_utils as utils

ARGS = {"city": "Tübingen <1>", "days": 2, "exact": True, "shift": None, "scale": 1.5, "tags": ["a", "b\n"], "o": {"k": "it's"}}
CALL = [{"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": ARGS}}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast & more, for a <city>",
            "parameters": {
                "type": "object",
                "properties": {
                    "zone": {"type": "string", "description": "time \"zone\"", "enum": ["utc", "cet"]},
                    "city": {"type": "string", "description": "name"},
                    "days": {"type": ["integer", "null"], "default": 1, "minimum": 0.5},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "o": {"type": "object", "properties": {"k": {"type": "string"}}, "required": ["k"]},
                },
                "required": ["city"],
            },
            "return": {"type": "string"},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


def user(text="Hi there"):
    return {"role": "user", "content": text}


def assistant(text="Hello!", **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "  Be brief. \n"}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "{\"rain\": 0.5}"}
THINK = "<think>\nfirst\n</think>\n\nthen"
CASES = {
    "plain": {"messages": [user(), assistant()]},
    "system": {"messages": [SYSTEM, user(), assistant()]},
    "turns": {"messages": [SYSTEM, user("a"), assistant("b"), user("c\n"), assistant(" d ")]},
    "prompt": {"messages": [user("a"), assistant("b"), user("c")], "add_generation_prompt": True},
    "empty": {"messages": [user(""), assistant("")]},
    "null": {"messages": [user(), assistant(None)]},
    "tools": {"messages": [SYSTEM, user(), assistant("", tool_calls=CALL), RESULT, assistant("Dry.")], "tools": TOOLS},
    "tools2": {"messages": [user(), assistant(None, tool_calls=CALL + CALL), RESULT, RESULT, assistant("Dry.")], "tools": TOOLS},
    "call": {"messages": [user(), assistant("I look.", tool_calls=CALL)], "tools": TOOLS},
    "string": {"messages": [user(), assistant("", tool_calls=[{"type": "function", "function": {"name": "now", "arguments": "{\"a\": 1}"}}])], "tools": TOOLS[1:]},
    "bare": {"messages": [user(), assistant("", tool_calls=[CALL[0]["function"]]), RESULT], "tools": [t["function"] for t in TOOLS]},
    "offered": {"messages": [user(), assistant()], "tools": TOOLS},
    "reasoning": {"messages": [user(), assistant("then", reasoning_content="first\n", thinking="first\n")]},
    "thought": {"messages": [user(), assistant(THINK)]},
    "thoughts": {"messages": [user(), assistant(THINK), user("b"), assistant(THINK)], "enable_thinking": True},
    "think-tool": {"messages": [user(), assistant("x", reasoning_content="why", thinking="why", tool_calls=CALL), RESULT, assistant(THINK)], "tools": TOOLS},
    "nothink": {"messages": [user()], "add_generation_prompt": True, "enable_thinking": False},
    "parts": {"messages": [user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]), assistant([{"type": "text", "text": "three"}])]},
    "image": {"messages": [user([{"type": "image"}, {"type": "text", "text": "what?"}]), assistant("a cat")]},
    "unicode": {"messages": [user("é 日本 👩‍👩‍👧 \u2028\u00a0x\u00a0"), assistant("\u00a0ß 🙂\n\n")]},
    "crlf": {"messages": [user("a\r\nb"), assistant("c\r\n")]},
    "markup": {"messages": [user("<|im_end|> {{ 1 }} & <b>"), assistant("\\n 'x' \"y\"")]},
    "order": {"messages": [assistant("first"), user("x"), user("y"), assistant("z"), assistant("zz")]},
    "developer": {"messages": [{"role": "developer", "content": "rules"}, user(), assistant()], "reasoning_effort": "high"},
    "only-system": {"messages": [SYSTEM]},
    "none": {"messages": []},
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
NOW = datetime.datetime(2026, 7, 4, 5, 6, 7)


def expected(source, case):
    try:
        compiled = utils._compile_jinja_template(source)
        compiled.environment.globals["strftime_now"] = NOW.strftime
        kw = dict(case)
        text, spans = utils._render_with_assistant_indices(
            compiled, kw.pop("messages"), kw.pop("tools", None), kw.pop("documents", None),
            kw.pop("add_generation_prompt", False), **kw, **TOKENS)
    except Exception as e:
        return None, None, f"{type(e).__name__}: {e}"
    size = lambda n: len(text[:n].encode())
    return text, [{"From": size(a), "To": size(b)} for a, b in spans], None


def main():
    names = sorted(pathlib.Path(sys.argv[1]).glob("*.jinja"))
    jobs = [(p, name, case) for p in names for name, case in CASES.items()]
    lines = []
    for p, name, case in jobs:
        made = {"tools": None, "documents": None, "add_generation_prompt": False, **case, **TOKENS}
        lines.append(json.dumps({"template": p.read_bytes().decode(), "vars": made}))
    go = subprocess.run(["go", "run", str(pathlib.Path(__file__).with_name("render.go")), NOW.strftime("%Y-%m-%dT%H:%M:%SZ")],
                        input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in go.stdout.splitlines()]
    assert len(results) == len(jobs), go.stderr
    total = {"equal": 0, "refused": 0, "wrong": 0, "accepted": 0, "only transformers": 0}
    rows = {}
    for (p, name, case), got in zip(jobs, results):
        text, spans, error = expected(p.read_bytes().decode(), case)
        if error is not None:
            what = "refused" if got["Error"] else "accepted"
        elif got["Error"]:
            what, error = "only transformers", got["Error"]
        elif got["Text"] == text and (got["Spans"] or []) == spans:
            what = "equal"
        else:
            what = "wrong"
        total[what] += 1
        rows.setdefault(p.name, []).append((name, what, error, got, text))
    for file, list_ in rows.items():
        print(f"{file:45} equal {sum(w == 'equal' for _, w, *_ in list_):3}  both refuse "
              f"{sum(w == 'refused' for _, w, *_ in list_):3}")
        for name, what, error, got, text in list_:
            if what not in ("equal", "refused"):
                print(f"    {name}: {what}: {error or ''} {got['Error']}")
                if what == "wrong" and "-v" in sys.argv:
                    print("      want", repr(text), "\n      got ", repr(got["Text"]), got["Spans"])
    print(len(rows), "templates,", len(jobs), "renders:", ", ".join(f"{n} {k}" for k, n in total.items()))
    sys.exit(total["wrong"] + total["only transformers"] > 0)


if __name__ == "__main__":
    main()
