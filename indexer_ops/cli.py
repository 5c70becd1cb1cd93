"""The ``indexer-ops`` command: a table of sub-commands."""

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .bench import command as bench
from .command_error import CommandError
from .demo import command as demo

# A command is a module with SUMMARY, DESCRIPTION, add_arguments(parser) and run(arguments). They are all imported for
# the help texts, so each imports what it needs beyond torch in run() only.
COMMANDS = {"demo": demo, "bench": bench}


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Names an option's default, but not None or False: there the help text says what happens without the option."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None or action.default is False else super()._get_help_string(action)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``indexer-ops`` with ``arguments`` (default: the process's own); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="indexer-ops",
        description="Differentiable ops that teach a DeepSeek-V4 lightning indexer which tokens to look at.",
        epilog="'indexer-ops COMMAND --help' describes a command and its options.",
    )
    parser.add_argument("--version", action="version", version=f"indexer-ops {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=_HelpFormatter,
        )
        module.add_arguments(subparser)
    parsed = parser.parse_args(arguments)
    try:
        COMMANDS[parsed.command].run(parsed)
    except CommandError as error:
        print(f"indexer-ops {parsed.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"indexer-ops {parsed.command}: interrupted", file=sys.stderr)
        return 130
    return 0
