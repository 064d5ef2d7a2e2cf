"""``specdec-fast chat``: through a pipe, at a terminal, and what Ctrl-C and errors leave."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys

import pytest

import specdec_fast as sd
from specdec_fast.cli import main
from specdec_fast.commands import chat
from specdec_fast.engine.engine import Engine
from support.chats import TEMPLATE
from support.commands import PAIR, RUN
from support.source_tree import ROOT


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def prompts(monkeypatch):
    """The messages of every answer, as the engine got them, after the trial one."""
    seen, stream = [], Engine.stream

    def noted(self, messages, params, **options):
        seen.append((messages, params))
        return stream(self, messages, params, **options)

    monkeypatch.setattr(Engine, "stream", noted)
    return seen


def talk(monkeypatch, text, *options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    return main(["chat", *PAIR, "--num-draft-tokens", "2", "--max-new-tokens", "12", *options])


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_ends_in_one_line(monkeypatch, capsys, template, stream):
    monkeypatch.setattr(sys, stream, None)
    assert main(["chat", *PAIR, "--chat-template", template]) == 2
    assert "one of them is closed" in capsys.readouterr().err


def test_every_line_of_a_pipe_is_a_message(monkeypatch, capsys, template, prompts):
    options = ("--chat-template", template, "--system", "Be brief.", "--temperature", "0.9", "--seed", "5")
    assert talk(monkeypatch, "Grüße\n\nOne day\n/reset\nHi".encode(), *options) == 0
    system = {"role": "system", "content": "Be brief."}
    engine = sd.Engine(PAIR[1], None, dtype="float32")
    answers = []
    for number, text in enumerate(("Grüße", "One day", "Hi")):
        earlier = [user("Grüße"), {"role": "assistant", "content": answers[0]}] if number == 1 else []
        messages = [system, *earlier, user(text)]
        params = sd.SamplingParams(max_new_tokens=12, temperature=0.9, seed=6 + number)
        assert prompts[number] == (messages, params)
        answers.append(engine.generate(messages, params, chat_template=TEMPLATE)[0].text)
    captured = capsys.readouterr()
    assert captured.out == "".join(answer + "\n" for answer in answers)
    assert captured.err == ""


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_stops_the_answer_only(monkeypatch, capsys, template, prompts, presses):
    noted, before = Engine.stream, signal.getsignal(signal.SIGINT)

    def pressed(self, messages, params, **options):
        for count, chunk in enumerate(noted(self, messages, params, **options)):
            yield chunk
            if len(prompts) == 1 and count == 0:
                for _ in range(presses):
                    signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Engine, "stream", pressed)
    assert talk(monkeypatch, b"One\nTwo\n", "--chat-template", template) == 0
    (first, _), (second, _) = prompts
    assert second[:1] == first
    assert second[2] == user("Two")
    assert len(capsys.readouterr().out.splitlines()) >= 2
    whole = sd.generate(*PAIR[1:4:2], first, prompts[0][1], chat_template=TEMPLATE, dtype="float32")[0].text
    assert whole.startswith(second[1]["content"])
    assert len(second[1]["content"]) < len(whole)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_message_that_fails_is_no_part_of_the_chat(monkeypatch, capsys, template, prompts):
    text = b"Hi\n" + b"word " * 600 + b"\nOne day\n"
    assert talk(monkeypatch, text, "--chat-template", template) == 1
    assert "can serve 512 positions" in (err := capsys.readouterr().err)
    assert err.startswith("specdec-fast chat: the prompt has")
    assert [len(messages) for messages, _ in prompts] == [1, 3, 3]
    assert prompts[2][0][2] == user("One day")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (b"Hi\n", [], "has no chat template; .* On the command line: --chat-template FILE"),
        (b"Hi\n", ["--chat-template", "no/such/file"], "No such file"),
        (
            b"Hi\n",
            ["--chat-template", "{template}", "--chat-template-kwargs", "{"],
            "--chat-template-kwargs .*not JSON",
        ),
        (b"Hi\n", ["--chat-template", "{template}", "--chat-template-kwargs", "[]"], "expected a dictionary"),
        (b"Hi\n", ["--chat-template", "{template}", "--top-p", "7"], "top_p=7"),
        (b"Gr\xfc\xdfe\n", ["--chat-template", "{template}"], "stdin is not utf-8 text"),
    ],
)
def test_what_cannot_work_ends_in_one_line(monkeypatch, capsys, template, text, options, message):
    assert (
        talk(monkeypatch, text, *(option.format(template=template) if "{t" in option else option for option in options))
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert re.match(f"specdec-fast chat: .*{message}", captured.err)


# Makes the pseudo-terminal the one whose Ctrl-C interrupts the process.
TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
# Lets the first answer wait, after its first chunk, until it is interrupted.
WAITS = """
import threading, time
from specdec_fast.commands import chat
from specdec_fast.engine.engine import Engine
stream, events = Engine.stream, []
class Noted(threading.Event):
    def __init__(self):
        super().__init__()
        events.append(self)
def waits(self, *args, **options):
    for chunk in stream(self, *args, **options):
        yield chunk
        if len(events) == 1 and not events[0].is_set():
            print("it waits", flush=True)
            while not events[0].is_set():
                time.sleep(0.01)
chat.Event, Engine.stream = Noted, waits
"""


@pytest.mark.grid
def test_at_a_terminal(template):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    argv = ["chat", *PAIR, "--num-draft-tokens", "0", "--max-new-tokens", "7", "--chat-template", template]
    command = [sys.executable, "-c", f"{TERMINAL}\n{WAITS}\n{RUN}", *argv]
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, **ends, cwd=ROOT, start_new_session=True)
    os.close(theirs)
    screen = b""

    def expect(text):
        nonlocal screen
        while text not in screen:
            screen += os.read(ours, 4096)
        shown, _, screen = screen.partition(text)
        return shown

    try:
        assert chat._WELCOME.encode() in expect(b">>> ")
        os.write(ours, b"One day\n")
        expect(b"it waits")
        os.write(ours, b"\x03")
        assert b"[stopped]" in expect(b">>> ")
        os.write(ours, b"One day\n")
        assert b"[no more tokens; see --max-new-tokens]" in expect(b">>> ")
        os.write(ours, b"\x1b[A\n")  # the line before, again
        assert b"One day" in expect(b"\r\n")
        expect(b">>> ")
        os.write(ours, b"\x04")
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
