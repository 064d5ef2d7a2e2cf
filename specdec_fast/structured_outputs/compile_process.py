"""A process that compiles grammars. It imports nothing of this package, whose import would take longer than its work.

``compiling.py`` starts it, sends it pickled jobs and kills it when a job takes too long: no code in C++ can be
interrupted otherwise. The first answer says that it is ready. A job is ``(key, vocabulary, kind, text, whitespace,
before)``: ``vocabulary`` is xgrammar's TokenizerInfo as JSON, or None if the process has got the one of ``key`` before;
``before`` is what may stand before the text, as JSON of a structural tag's format, or None. The answer is ``(compiled
grammar as JSON, "")``, or ``(None, what xgrammar says)``.
"""

import os
import pickle
import signal
from typing import Any

_MOST_BYTES = 4 << 30  # of address space that a job may take
_LONGEST_REASON = 2000
_MOST_WHITESPACE = 20  # characters in a row in JSON: without a limit, models may write spaces until the end


def compiled(compiler: Any, kind: str, text: str, any_whitespace: bool, before: str | None) -> Any:
    """Return xgrammar's compiled grammar."""
    import json

    from xgrammar import Grammar

    if kind == "structural_tag":
        tag = json.loads(text)
        if before is None or "format" not in tag:  # what is wrong then, xgrammar says
            return compiler.compile_structural_tag(text)
        elements = [json.loads(before), tag["format"]]
        whole = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        return compiler.compile_structural_tag(json.dumps(whole))
    if kind == "json":
        most = _MOST_WHITESPACE if any_whitespace else None
        grammar = Grammar.from_json_schema(text, any_whitespace=any_whitespace, max_whitespace_cnt=most)
    elif kind == "regex":
        grammar = Grammar.from_regex(text)
    elif kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]  # EBNF escapes as JSON
        grammar = Grammar.from_ebnf(f"root ::= {' | '.join(choices)}")
    else:
        grammar = Grammar.from_ebnf(text)
    if before is not None:
        reasoning = json.dumps({"type": "structural_tag", "format": json.loads(before)})
        grammar = Grammar.concat(Grammar.from_structural_tag(reasoning), grammar)
    return compiler.compile_grammar(grammar)


def limit_memory() -> None:
    """Let a job that needs more than ``_MOST_BYTES`` fail; where there is no such limit, do nothing."""
    try:
        import resource
    except ImportError:
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MOST_BYTES, resource.RLIM_INFINITY))


def main() -> None:
    """Answer jobs until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the other end
    jobs = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between answers

    import xgrammar

    if os.path.exists("/proc/self/statm"):
        limit_memory()
    compilers: dict[int, Any] = {}
    answer: tuple[str | None, str] = (None, "ready")
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        try:
            key, vocabulary, *job = pickle.load(jobs)
        except EOFError:
            return
        try:
            if vocabulary is not None:
                info = xgrammar.TokenizerInfo.deserialize_json(vocabulary)
                compilers[key] = xgrammar.GrammarCompiler(info, cache_enabled=False)
            answer = (compiled(compilers[key], *job).serialize_json(), "")
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {str(error)[:_LONGEST_REASON]}")


if __name__ == "__main__":
    main()
