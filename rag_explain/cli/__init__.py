"""rag-explain, the command line. Each command is a module that `add` registers; heavy imports happen when it runs."""

import argparse
import codecs
import io
import sys
from collections.abc import Sequence

from rag_explain import __version__
from rag_explain.cli import contrast, demo, doctor, explain, index, log, search, store
from rag_explain.errors import RagExplainError, first_line

# What this library itself draws with, for a locale that has no more than ASCII.
_LOOKS_LIKE = {"“": '"', "”": '"', "…": "...", "⋯": "...", "→": "->", "±": "+-", "Σ": "sum ", "✓": "+", "✗": "x"}
_LOOKS_LIKE |= dict.fromkeys("·–─╍−", "-") | {"━": "="}
_COMMANDS = (explain, index, search, contrast, demo, doctor, store, log)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on stderr and exit code 2. `python -X dev` shows unexpected ones whole."""
    top = argparse.ArgumentParser(prog="rag-explain", description="Why did the retriever return this document?")
    top.add_argument("--version", action="version", version=f"rag-explain {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    arguments = top.parse_args(argv)
    if sys.stdout is not None and isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error("rag_explain", _as_it_can)
        sys.stdout.reconfigure(errors="rag_explain")
    try:
        code: int = arguments.run(arguments) or 0
        print(end="", flush=True)  # a full disk is known here, and not where Python ends
    except RagExplainError as error:
        print(f"rag-explain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rag-explain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `rag-explain ... | head`
        sys.stderr.close()
        return 1
    except Exception as error:  # a file, a system or a library that is not as we know it
        if sys.flags.dev_mode:
            raise
        print(f"rag-explain: {arguments.command} failed: {first_line(error)}", file=sys.stderr)
        return 2
    return code


def _as_it_can(error: UnicodeError) -> tuple[str, int]:
    """Something like the characters that a locale does not have; of a text's own, that there is one."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_LOOKS_LIKE.get(one, "?") for one in error.object[error.start : error.end]), error.end
