"""rag-explain, the command line. Each command is a module that `add` registers; heavy imports happen when it runs."""

import argparse
import io
import sys
from collections.abc import Sequence

from rag_explain import __version__
from rag_explain.cli import contrast, demo, doctor, explain, index, log, search, store
from rag_explain.errors import RagExplainError, first_line

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
        sys.stdout.reconfigure(errors="replace")  # a locale of ASCII shows what it can
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
